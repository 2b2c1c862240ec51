"""Pages of mapped files that nobody needs any more."""

import ctypes
from pathlib import Path

_MADV_DONTNEED = 4
_MAPS = Path("/proc/self/maps")


def drop_mapped_pages(path: Path) -> None:
    """Let go of the resident pages of `path`; whoever reads them again gets them from the file.

    A weights file was read from end to end once its model is loaded, but an engine that keeps
    weights in a form of its own looks at little of it again. Without effect but on Linux.
    """
    if not _MAPS.is_file():
        return
    madvise = ctypes.CDLL(None).madvise
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        span, permissions, *_ = line.split(maxsplit=5)
        # What may be written could be lost: such pages are not the file's alone.
        if line.endswith(str(path.resolve())) and permissions.startswith("r--"):
            start, end = (int(bound, 16) for bound in span.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
