"""Installed memory of a Mac."""

import subprocess
from collections.abc import Callable, Sequence

import attrs

from ...domain.types import MemoryLimit
from .figure import parse_figure

RunCommand = Callable[[Sequence[str]], str]
"""Runs a program and returns what it printed; raises `OSError` or `SubprocessError`."""

_COMMAND = ("/usr/sbin/sysctl", "-n", "hw.memsize")


def run_command(arguments: Sequence[str]) -> str:
    """A `RunCommand` that starts a real process and gives it five seconds."""
    finished = subprocess.run(  # noqa: S603  # a fixed program without any outside input
        arguments, check=True, capture_output=True, text=True, timeout=5
    )
    return finished.stdout


@attrs.frozen
class SysctlProbe:
    """A `MemoryProbe` that asks ``sysctl hw.memsize``; other systems have no such program."""

    run: RunCommand = run_command

    def limit(self) -> MemoryLimit | None:
        """Installed memory, not what is free of it."""
        try:
            text = self.run(_COMMAND)
        except (OSError, subprocess.SubprocessError):
            return None
        installed_bytes = parse_memsize_bytes(text)
        return None if installed_bytes is None else MemoryLimit(installed_bytes, "host_ram")


def parse_memsize_bytes(text: str) -> int | None:
    """The one figure that ``sysctl -n hw.memsize`` prints; None for anything else."""
    return parse_figure(text)
