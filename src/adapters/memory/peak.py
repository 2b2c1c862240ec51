"""How much memory this process held at most, from Linux's own book-keeping."""

import os
import re
import weakref
from pathlib import Path

import attrs

from ...domain.types import ResidentMemory

_FIELD = re.compile(r"^(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d{1,20}) kB$", re.ASCII | re.MULTILINE)
_RESET_PEAK = b"5"
"""What ``/proc/<pid>/clear_refs`` takes for "the high-water mark is what is resident now"."""

_STATUS_BYTES = 1 << 14
"""Several times what a ``status`` file has."""


@attrs.frozen(eq=False)
class ProcPeakMemory:
    """A `PeakMemory` that reads ``/proc/self/status``; made by `peak_memory`.

    The files stay open: it is asked around every forward pass, also while clients hold all the
    descriptors that the process may have.
    """

    root: Path = Path("/")
    _status_fd: int = attrs.field(init=False)
    _clear_refs_fd: int = attrs.field(init=False)

    @_status_fd.default
    def _open_status(self) -> int:
        return _kept_open(self, self.root / "proc/self/status", os.O_RDONLY)

    @_clear_refs_fd.default
    def _open_clear_refs(self) -> int:
        return _kept_open(self, self.root / "proc/self/clear_refs", os.O_WRONLY)

    def resident(self) -> ResidentMemory:
        """Shared memory counts as anonymous: neither can be dropped."""
        fields = parse_status_bytes(self._status())
        return ResidentMemory(fields["RssAnon"] + fields["RssShmem"], fields["RssFile"])

    def reset_peak(self) -> None:
        """Set the high-water mark back."""
        os.pwrite(self._clear_refs_fd, _RESET_PEAK, 0)

    def peak_bytes(self) -> int:
        """The high-water mark."""
        return parse_status_bytes(self._status())["VmHWM"]

    def _status(self) -> str:
        return os.pread(self._status_fd, _STATUS_BYTES, 0).decode("ascii", errors="replace")


def peak_memory(root: Path = Path("/")) -> ProcPeakMemory | str:
    """The adapter, or why this system cannot measure: no Linux, or a sandbox that forbids it."""
    try:
        memory = ProcPeakMemory(root)
        memory.reset_peak()
        memory.peak_bytes()
        memory.resident()
    except OSError as error:
        return f"peak memory cannot be measured here: {error}"
    except KeyError as error:
        return f"peak memory cannot be measured here: /proc/self/status has no {error.args[0]}"
    return memory


def _kept_open(owner: object, path: Path, flags: int) -> int:
    """A descriptor that is closed when its owner goes."""
    descriptor = os.open(path, flags)
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def parse_status_bytes(status: str) -> dict[str, int]:
    """The memory fields of a ``status`` file, in bytes."""
    return {name: int(figure) * 1024 for name, figure in _FIELD.findall(status)}
