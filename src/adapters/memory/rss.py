"""Memory that this process holds at the moment."""

import os
from pathlib import Path


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Resident set size from ``/proc/self/statm``; None where there is no such file."""
    try:
        resident_pages = int((root / "proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return resident_pages * os.sysconf("SC_PAGE_SIZE")
