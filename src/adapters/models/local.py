"""A model from a plain directory: one that `fetch --dir` filled, or a published export."""

from collections.abc import Mapping
from pathlib import Path

from ...domain.errors import CorruptFileError, ModelError
from .files import (
    COLBERT_HEAD,
    MODEL_ID,
    RECORD_NAME,
    SPARSE_HEAD,
    TOKENIZER,
    FileRecord,
    ModelFiles,
    read_record,
    verify_file,
    write_record,
)
from .onnx_file import check_external_data
from .published import PUBLISHED

GRAPH_NAMES: Mapping[str, str] = {
    "fp32": "model.onnx",
    "fp16": "model_fp16.onnx",
    "int8": "model_int8.onnx",
}
"""Variant → file name, in ``onnx/`` or in the directory itself, as the hub's exports have it."""

_SHOWN_NAMES = 20


def local_model(directory: Path, variant: str | None = None) -> ModelFiles:
    """Find a model in `directory` and check what can be checked without a network.

    Without `variant` the only graph is taken, or the first of fp32, fp16, int8. A directory with
    a record of `fetch --dir` is verified against it. The head weights are optional: a graph may
    carry its heads itself.

    Raises:
        ModelError: no graph or no tokenizer is there; the message lists what is.
        CorruptFileError: a file differs from the record, or external weights are missing or short.
    """
    precision, graph_path = _graph(directory, variant)
    tokenizer_path = directory / TOKENIZER
    if not tokenizer_path.is_file():
        raise ModelError(
            f"{directory} has no {TOKENIZER}, which must lie there; {_found(directory)}"
        )
    records = _verify_recorded(directory)
    check_external_data(graph_path)
    return ModelFiles(
        model_id=MODEL_ID,
        graph_path=graph_path,
        tokenizer_path=tokenizer_path,
        sparse_path=_optional(directory / SPARSE_HEAD),
        colbert_path=_optional(directory / COLBERT_HEAD),
        # A file called model.onnx may hold weights of any type: the graph tells.
        precision=None if precision == "fp32" else precision,
        is_published=str(graph_path.relative_to(directory)) in records
        and all(record.source in PUBLISHED for record in records.values()),
    )


def _graph(directory: Path, variant: str | None) -> tuple[str, Path]:
    if variant is not None and variant not in GRAPH_NAMES:
        raise ModelError(
            f"no directory holds the variant {variant!r}: choose one of {', '.join(GRAPH_NAMES)}, "
            "or none to take what is there"
        )
    wanted = GRAPH_NAMES if variant is None else {variant: GRAPH_NAMES[variant]}
    for precision, name in wanted.items():
        for path in (directory / "onnx" / name, directory / name):
            if path.is_file():
                return precision, path
    expected = ", ".join(f"onnx/{name} or {name}" for name in wanted.values())
    raise ModelError(f"{directory} has no model: expected {expected}; {_found(directory)}")


def _verify_recorded(directory: Path) -> Mapping[str, FileRecord]:
    old = read_record(directory)
    for name in old:
        if not (directory / name).is_file():
            raise CorruptFileError(
                f"{directory / name} is missing, though {RECORD_NAME} lists it: fetch it again, or "
                "delete that list if the file is not wanted"
            )
    new = {name: verify_file(directory / name, known) for name, known in old.items()}
    if new != old:
        write_record(directory, new)
    return new


def _optional(path: Path) -> Path | None:
    return path if path.is_file() else None


def _found(directory: Path) -> str:
    """What is there, for a message."""
    if not directory.is_dir():
        return "that is not a directory"
    names = sorted(
        str(path.relative_to(directory))
        for pattern in ("*", "onnx/*")
        for path in directory.glob(pattern)
        if path.is_file()
    )
    return f"it holds {', '.join(names[:_SHOWN_NAMES]) or 'no files'}"
