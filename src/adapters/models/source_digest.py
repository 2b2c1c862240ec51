"""One hash over all that a prepared model is made of."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from .files import FileRecord, ModelFiles, read_record, verify_file, write_record
from .onnx_file import check_external_data, inspect_graph


def source_digest(files: ModelFiles, memory: Path) -> str:
    """Hash of the graph, its external weights, the tokenizer and the heads, in hex.

    Gigabytes are hashed once: `memory` is a directory that keeps what each file was. There another
    file may come to lie under the same path, and images are built with the same times everywhere:
    only one that was not put there since is known.

    Raises:
        CorruptFileError: a file is damaged, missing or too short.
    """
    check_external_data(files.graph_path)
    known = read_record(memory)
    records: dict[str, FileRecord] = {}
    digest = hashlib.sha256()
    for path in _parts(files):
        name = str(path.absolute())
        records[name] = _record(path, known.get(name))
        digest.update(records[name].sha256.encode())
    if any(known.get(name) != record for name, record in records.items()):
        memory.mkdir(parents=True, exist_ok=True)
        write_record(memory, {**known, **records})
    return digest.hexdigest()


def _parts(files: ModelFiles) -> Iterator[Path]:
    yield files.graph_path
    references = inspect_graph(files.graph_path).external
    for location in sorted({reference.location for reference in references}):
        yield files.graph_path.parent / location
    # What the prepared form was compared on depends on the tokenizer.
    for path in (files.tokenizer_path, files.sparse_path, files.colbert_path):
        if path is not None:
            yield path


def _record(path: Path, known: FileRecord | None) -> FileRecord:
    status = path.stat()
    is_same = (
        known is not None
        and known.size_bytes == status.st_size
        and known.mtime_ns == status.st_mtime_ns
        and known.ctime_ns == status.st_ctime_ns
    )
    return verify_file(path, known if is_same else None)
