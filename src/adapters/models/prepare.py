"""From a published export to the model that a CPU runs fastest: built once, verified, kept.

The graph is fused, the heads are put into it, and its matrices become 8-bit blocks, with all
weights in one file that engines map. What comes out must be as good as the source on fixed texts;
otherwise finer blocks are tried, and in the end the source is served as it is.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import attrs
import onnx

from ...domain.cost_model import DEFAULT_MAX_WORKSPACE_BYTES, CostModel
from ...domain.embedder import Embedder
from ...domain.errors import CacheDirectoryError, PreparationError
from ...domain.fidelity import FLOORS, Fidelity, fidelity, shortfalls
from ...domain.padding import cpu_padding
from ...domain.ports import InferenceBackend, Tokenizer
from ...domain.types import Attention, Embedding, ModelContract
from .block_weights import halve_tables, quantize_matmuls, store_remaining
from .contract import ATTENTION_HEADS_KEY, ATTENTION_KEY, MAX_TOKENS_KEY
from .files import ModelFiles, is_whole, verify_file, write_record
from .fusion import fuse, make_mask_optional
from .ready_heads import add_ready_heads
from .source_digest import source_digest
from .torch_weights import read_heads
from .verification_texts import VERIFICATION_TEXTS
from .weights import WeightsFile, read_structure

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

RECIPE_VERSION = 3
"""Raised whenever the same source would be prepared into different files."""

BLOCK_SIZES = (128, 32)
"""Tried in this order: larger blocks are faster, smaller ones more exact."""

GRAPH_NAME = "model.onnx"
PRECISION = "w8"
VERDICT_NAME = "fidelity.json"

VERIFICATION_TOKENS = 512
"""Texts are compared up to this length."""

_DIRECTORY = "prepared"
_BUILDING = ".building-"
_LOCKED_SECONDS = 10
"""Within them a preparation has locked the directory that it made."""

Progress = Callable[[str, float], None]
"""Told the step and the share that is done, from 0 to 1."""


@attrs.frozen
class Engine:
    """The engine that a model is prepared for.

    `name`: part of the directory's name. `is_fused`: it wants ONNX Runtime's fused operations.
    `convert`: turns the ONNX file into the engine's own format; returns what to load.
    `load`: loads that.
    """

    name: str
    is_fused: bool
    convert: Callable[[Path], Path]
    load: Callable[[Path], InferenceBackend]


@attrs.frozen
class Source:
    """The model to prepare.

    `load_tokenizer`: with a limit of so many tokens. `load`: the model in full precision.
    """

    files: ModelFiles
    load_tokenizer: Callable[[int], Tokenizer]
    load: Callable[[], InferenceBackend]


def prepare(
    source: Source,
    engine: Engine,
    cache_dir: Path,
    progress: Progress,
    floors: Fidelity = FLOORS,
) -> ModelFiles:
    """The prepared form of `source`, from `cache_dir` if it is there.

    Several processes may prepare at once: each works in a directory of its own, and the first to
    end wins.

    Raises:
        PreparationError: the graph cannot be prepared, or comes out too far from its source.
        CorruptFileError: a file of the source is damaged or missing.
        UnsafeWeightsError, ContractError: a head of the source that is to be put in is no head.
        InferenceError: an engine failed on a fixed text.
        CacheDirectoryError: `cache_dir` cannot be written, or is full.
    """
    directory = cache_dir / _DIRECTORY
    try:
        digest = source_digest(source.files, directory)
        target = directory / f"{digest[:24]}-{engine.name}-recipe{RECIPE_VERSION}"
        if not is_whole(target):
            _prepare(source, engine, target, progress, floors)
        verdict = json.loads((target / VERDICT_NAME).read_text(encoding="utf-8"))
    except OSError as error:
        raise CacheDirectoryError(
            f"the model cannot be prepared in {directory} ({error}): make that directory writable, "
            "with 3 GB free, or set BGE_M3_CACHE_DIR to another one"
        ) from error
    if verdict["refused"]:
        raise PreparationError(
            f"the 8-bit form of this model was refused: {verdict['refused']}. Serve the model as "
            f"it is with BGE_M3_MODEL=fp32; to prepare it again, delete {target}"
        )
    return attrs.evolve(
        source.files,
        graph_path=target / verdict["graph"],
        sparse_path=None,
        colbert_path=None,
        precision=PRECISION,
    )


def _prepare(
    source: Source, engine: Engine, target: Path, progress: Progress, floors: Fidelity
) -> None:
    """Build in a directory beside `target`, and move it there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    building = target.parent / f"{_BUILDING}{uuid.uuid4().hex}"
    building.mkdir()
    lock = _lock(building)
    try:
        try:
            verdict = _try_block_sizes(source, engine, building, progress, floors)
        except PreparationError as error:  # remembered: another attempt would end the same
            _clear(building)
            verdict = {"refused": str(error)}
        (building / VERDICT_NAME).write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
        names = [path.name for path in building.iterdir()]
        write_record(building, {name: verify_file(building / name) for name in names})
        _move(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    progress("prepared", 1.0)


def _move(building: Path, target: Path) -> None:
    """To `target`, unless another process was first: then its files serve."""
    if is_whole(target):
        return
    with contextlib.suppress(FileNotFoundError):
        damaged = building.with_name(f"{_BUILDING}{uuid.uuid4().hex}")
        target.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        building.rename(target)
    except OSError:
        if not is_whole(target):
            raise


def _try_block_sizes(
    source: Source, engine: Engine, building: Path, progress: Progress, floors: Fidelity
) -> dict[str, object]:
    progress("embedding fixed texts with the source", 0.0)
    backend = source.load()
    contract = backend.contract
    tokenizer = source.load_tokenizer(
        min(VERIFICATION_TOKENS, contract.max_tokens or VERIFICATION_TOKENS)
    )
    reference = _embed(tokenizer, backend)
    backend.close()
    problems: list[str] = []
    for attempt, block_size in enumerate(BLOCK_SIZES):
        done = (1 + 2 * attempt) / (1 + 2 * len(BLOCK_SIZES))
        progress(f"8-bit weights in blocks of {block_size}", done)
        graph = engine.convert(_write(source, contract, engine, building, block_size))
        progress("comparing with the source", done + 0.2)
        prepared = engine.load(graph)
        found = fidelity(reference, _embed(tokenizer, prepared))
        prepared.close()
        problems = shortfalls(found, floors)
        logger.info(
            "a prepared model was compared with its source",
            extra={"fields": {"block_size": block_size, **attrs.asdict(found)}},
        )
        verdict: dict[str, object] = {
            "graph": graph.name,
            "block_size": block_size,
            "fidelity": attrs.asdict(found),
            "refused": "; ".join(problems),
        }
        if not problems:
            break
        _clear(building)
    return verdict


def _write(
    source: Source, contract: ModelContract, engine: Engine, building: Path, block_size: int
) -> Path:
    """The prepared ONNX file, whose weights are beside it."""
    model, weights = read_structure(source.files.graph_path)
    if engine.is_fused and contract.attention_heads is not None:
        fused = fuse(model, contract.attention_heads, contract.hidden_size)
        if fused is None:  # what was begun is of no use
            model, weights = read_structure(source.files.graph_path)
        else:
            model = fused
            make_mask_optional(model, contract.hidden_size)
            _set_metadata(model, ATTENTION_KEY, Attention.BLOCKWISE.value)
    for key, value in (
        (MAX_TOKENS_KEY, contract.max_tokens),
        (ATTENTION_HEADS_KEY, contract.attention_heads),
    ):
        if value is not None:
            _set_metadata(model, key, str(value))
    graph_path = building / GRAPH_NAME
    with (building / f"{GRAPH_NAME}_data").open("wb") as data:
        file = WeightsFile(data, f"{GRAPH_NAME}_data")
        quantize_matmuls(model, weights, file, block_size)
        if engine.is_fused:  # OpenVINO's own format halves tables too, and is not widened in memory
            halve_tables(model, weights, file)
        add_ready_heads(model, contract, read_heads(source.files))
        store_remaining(model, weights, file)
    graph_path.write_bytes(model.SerializeToString())
    return graph_path


def _embed(tokenizer: Tokenizer, backend: InferenceBackend) -> list[Embedding]:
    embedder = Embedder(
        tokenizer,
        backend,
        CostModel.conservative(DEFAULT_MAX_WORKSPACE_BYTES),
        padding=cpu_padding(threads=1),  # so that chunks with padding and without are compared
    )
    return embedder.embed(VERIFICATION_TEXTS, backend.contract.heads)


def _set_metadata(model: onnx.ModelProto, key: str, value: str) -> None:
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    model.metadata_props.add(key=key, value=value)


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def _sweep(directory: Path) -> None:
    """Remove what preparations that were killed have left behind; those at work hold a lock."""
    for leftover in directory.glob(f"{_BUILDING}*"):
        with contextlib.suppress(FileNotFoundError):  # another preparation ends just now
            is_old = time.time() - leftover.stat().st_mtime > _LOCKED_SECONDS
            lock = _lock(leftover) if is_old else None
            if lock is not None:
                shutil.rmtree(leftover, ignore_errors=True)
                os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that locks `directory` until it is closed or the process ends; None if taken."""
    if sys.platform == "win32":  # nothing locks directories
        return None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # taken, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor
