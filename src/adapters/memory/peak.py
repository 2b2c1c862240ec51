"""How much memory this process held at most, from Linux's own book-keeping."""

import re
from pathlib import Path

import attrs

from ...domain.types import ResidentMemory

_FIELD = re.compile(r"^(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d{1,20}) kB$", re.ASCII | re.MULTILINE)
_RESET_PEAK = "5"
"""What ``/proc/<pid>/clear_refs`` takes for "the high-water mark is what is resident now"."""


@attrs.frozen
class ProcPeakMemory:
    """A `PeakMemory` that reads ``/proc/self/status``; made by `peak_memory`."""

    root: Path = Path("/")

    def resident(self) -> ResidentMemory:
        """Shared memory counts as anonymous: neither can be dropped."""
        fields = parse_status_bytes(self._status())
        return ResidentMemory(fields["RssAnon"] + fields["RssShmem"], fields["RssFile"])

    def reset_peak(self) -> None:
        """Set the high-water mark back."""
        (self.root / "proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")

    def peak_bytes(self) -> int:
        """The high-water mark."""
        return parse_status_bytes(self._status())["VmHWM"]

    def _status(self) -> str:
        return (self.root / "proc/self/status").read_text(encoding="ascii", errors="replace")


def peak_memory(root: Path = Path("/")) -> ProcPeakMemory | str:
    """The adapter, or why this system cannot measure: no Linux, or a sandbox that forbids it."""
    memory = ProcPeakMemory(root)
    try:
        memory.reset_peak()
        memory.peak_bytes()
        memory.resident()
    except OSError as error:
        return f"peak memory cannot be measured here: {error}"
    except KeyError as error:
        return f"peak memory cannot be measured here: /proc/self/status has no {error.args[0]}"
    return memory


def parse_status_bytes(status: str) -> dict[str, int]:
    """The memory fields of a ``status`` file, in bytes."""
    return {name: int(figure) * 1024 for name, figure in _FIELD.findall(status)}
