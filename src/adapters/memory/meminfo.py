"""Memory that a Linux host can still give without swapping."""

import re
from pathlib import Path

import attrs

from ...domain.types import MemoryLimit
from .figure import parse_figure

_MEM_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.ASCII | re.MULTILINE)


@attrs.frozen
class MeminfoProbe:
    """A `MemoryProbe` that reads ``MemAvailable`` of ``/proc/meminfo``."""

    root: Path = Path("/")

    def limit(self) -> MemoryLimit | None:
        """Memory available now, on a host without a tighter rule."""
        try:
            text = (self.root / "proc/meminfo").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        available_bytes = parse_available_bytes(text)
        return None if available_bytes is None else MemoryLimit(available_bytes, "host_ram")


def parse_available_bytes(meminfo: str) -> int | None:
    """``MemAvailable`` in bytes; None where the text has no such line with a figure."""
    found = _MEM_AVAILABLE.search(meminfo)
    available_kib = parse_figure(found[1]) if found else None
    return None if available_kib is None else available_kib * 1024
