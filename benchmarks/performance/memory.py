"""Memory of a contender, read from outside, the same way for all."""

import contextlib
from pathlib import Path

import attrs


@attrs.define
class Memory:
    """Resident memory of a process and all that it started."""

    pid: int

    def reset_peak(self) -> None:
        """Let the kernel forget the highest mark."""
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Since the reset."""
        return self._sum_bytes("VmHWM")

    def resident_bytes(self) -> int:
        """Now."""
        return self._sum_bytes("VmRSS")

    def _pids(self) -> list[int]:
        found, waiting = [], [self.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):  # a thread that ended meanwhile
                    waiting += map(int, children.read_text().split())
        return found

    def _sum_bytes(self, field: str) -> int:
        total = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith(f"{field}:"):
                        total += int(line.split()[1]) * 1024
        return total
