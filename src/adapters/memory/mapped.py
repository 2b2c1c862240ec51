"""Pages of mapped files that need not stay in memory."""

import ctypes
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import attrs

_MADV_DONTNEED = 4
_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)")
_SIZE = re.compile(r"(\w+): +(\d+) kB")


@attrs.define
class _Mapping:
    """A span of addresses; `own_kib` is what would be lost with it, in memory or swapped out."""

    start: int
    end: int
    path: str
    own_kib: int = 0


def drop_mapped_pages(paths: Collection[Path]) -> None:
    """Let go of the resident pages of these files; whoever reads them again gets them back.

    The kernel maps files in pieces of up to 2 MiB: a few rows of a large table that were read at
    random leave most of it resident. An engine that keeps weights in a form of its own looks at
    little of their file again. Pages that were written to in a private mapping stay. Without effect
    but on Linux.
    """
    if not _SMAPS.is_file():
        return
    madvise = ctypes.CDLL(None).madvise
    wanted = {str(path.resolve()) for path in paths}
    for mapping in _mappings(_SMAPS.read_text(encoding="utf-8", errors="replace")):
        if mapping.path in wanted and not mapping.own_kib:
            size_bytes = ctypes.c_size_t(mapping.end - mapping.start)
            madvise(ctypes.c_void_p(mapping.start), size_bytes, _MADV_DONTNEED)


def _mappings(smaps: str) -> Iterator[_Mapping]:
    mapping = None
    for line in smaps.splitlines():
        if head := _MAPPING.fullmatch(line):
            if mapping:
                yield mapping
            start, end, path = head.groups()
            mapping = _Mapping(int(start, 16), int(end, 16), path)
        elif mapping and (size := _SIZE.fullmatch(line)) and size[1] in {"Anonymous", "Swap"}:
            mapping.own_kib += int(size[2])
    if mapping:
        yield mapping
