"""The files of one model, and the record that spares hashing gigabytes at every start."""

import contextlib
import hashlib
import json
import logging
import os
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ...domain.errors import CorruptFileError

logger = logging.getLogger(__name__)

MODEL_ID = "bge-m3"
"""Name under which BGE-M3 is served, wherever its files come from."""

TOKENIZER = "tokenizer.json"
SPARSE_HEAD = "sparse_linear.pt"
COLBERT_HEAD = "colbert_linear.pt"

RECORD_NAME = "bge-m3-server.files.json"
DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError),
    *(OverflowError, RecursionError, zipfile.BadZipFile),
)
"""What reading a damaged JSON or ``.npz`` file can raise."""

_READ_BYTES = 1 << 20
_GIT_HASH_DIGITS = 40


@attrs.frozen
class ModelFiles:
    """Where a model lies, all of it checked as far as its source allows.

    `precision`: what the source calls it (``fp32``, ``fp16``, ``int8``); None: the graph tells.
    `is_published`: all of it comes from the pinned revisions of the published repositories.
    """

    model_id: str
    graph_path: Path
    tokenizer_path: Path
    sparse_path: Path | None = None
    colbert_path: Path | None = None
    precision: str | None = None
    is_published: bool = False


@attrs.frozen
class FileRecord:
    """What a file was when it was last hashed.

    `ctime_ns`: when it was changed or put there, which nobody can set; 0 if unknown.
    `source`: repository and revision it came from; empty if unknown.
    """

    size_bytes: int
    mtime_ns: int
    sha256: str
    source: str = ""
    ctime_ns: int = 0


def verify_file(
    path: Path, known: FileRecord | None = None, expected_hash: str | None = None
) -> FileRecord:
    """Check a file and return its up-to-date record.

    A file of the size and time of `known` is not read again. Any other is hashed, and must match
    `known` and `expected_hash` (sha256, or git's sha1, in hex), as far as they are given.

    Raises:
        CorruptFileError: the file is truncated or its hash differs.
    """
    status = path.stat()
    if known is not None:
        if known.size_bytes != status.st_size:
            raise CorruptFileError(
                f"{path} is truncated or was changed: it has {status.st_size} bytes, expected "
                f"{known.size_bytes}; {REMEDY}"
            )
        if known.mtime_ns == status.st_mtime_ns:
            return known
    sha256, git_sha1 = _hashes(path, status.st_size)
    is_git = expected_hash is not None and len(expected_hash) == _GIT_HASH_DIGITS
    pairs = (
        (git_sha1 if is_git else sha256, expected_hash),
        (sha256, known.sha256 if known is not None else None),
    )
    for actual, expected in pairs:
        if expected is not None and actual != expected:
            raise CorruptFileError(
                f"{path} is truncated or corrupt: its hash is {actual}, expected {expected}; "
                f"{REMEDY}"
            )
    source = known.source if known is not None else ""
    return FileRecord(status.st_size, status.st_mtime_ns, sha256, source, status.st_ctime_ns)


def is_whole(directory: Path) -> bool:
    """Whether all files that `directory` has a record of are there as they were written."""
    records = read_record(directory)
    try:
        verified = {name: verify_file(directory / name, records[name]) for name in records}
    except (CorruptFileError, OSError) as error:
        logger.warning("%s has to be built again: %s", directory, error)
        return False
    if verified != records:
        write_record(directory, verified)
    return bool(records)


REMEDY = "it was not loaded; delete it, or run `bge-m3-server fetch` to get it again"


def _hashes(path: Path, size_bytes: int) -> tuple[str, str]:
    """The sha256 of a file and its git blob sha1, both in hex."""
    sha256 = hashlib.sha256()
    # The hub names files that are small enough for git by git's own hash.
    git = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            sha256.update(block)
            git.update(block)
    return sha256.hexdigest(), git.hexdigest()


def read_record(directory: Path) -> dict[str, FileRecord]:
    """File name → record, as written into `directory`; empty if there is none or it is damaged."""
    try:
        entries = json.loads((directory / RECORD_NAME).read_bytes())["files"]
        return {str(name): _record(entry) for name, entry in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, *DAMAGE) as error:
        logger.warning("%s is unreadable (%r)", directory / RECORD_NAME, error)
        return {}


def _record(entry: Mapping[str, Any]) -> FileRecord:
    return FileRecord(
        size_bytes=int(entry["size_bytes"]),
        mtime_ns=int(entry["mtime_ns"]),
        sha256=str(entry["sha256"]),
        source=str(entry["source"]),
        ctime_ns=int(entry.get("ctime_ns", 0)),
    )


def write_record(directory: Path, records: Mapping[str, FileRecord]) -> None:
    """Replace the record in `directory`; where it cannot be written, later starts hash again."""
    path = directory / RECORD_NAME
    files = {name: attrs.asdict(records[name]) for name in sorted(records)}
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        partial.write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105 (the name says that an old file is replaced)
    except OSError as error:
        logger.warning("cannot write %s (%s): the files will be hashed again", path, error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
