"""The machine that figures are from."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from bge_m3_server.adapters.memory.cpu_count import cpu_count, cpu_model

FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""What decides how fast low precision is on x86-64; names as in ``/proc/cpuinfo``."""

ARM_FLAGS = ("asimddp", "i8mm", "bf16", "sve")


@attrs.frozen
class Machine:
    """Named in every result."""

    cpu: str
    flags: Sequence[str]
    cpus: int
    memory_bytes: int
    system: str
    python: str

    def line(self) -> str:
        """One sentence for a table's foot."""
        flags = ", ".join(self.flags) or "none of the flags that matter here"
        return (
            f"{self.cpu} ({flags}), {self.cpus} CPUs, {self.memory_bytes / 2**30:.0f} GiB; "
            f"{self.system}, Python {self.python}"
        )


def this_machine() -> Machine:
    """As this process sees it."""
    return Machine(
        cpu=cpu_model(),
        flags=cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        cpus=cpu_count().count,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
    )


def cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    """Those of `FLAGS` and `ARM_FLAGS` that the first processor has."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    present = set(found[1].split()) if found else set()
    return tuple(flag for flag in (*FLAGS, *ARM_FLAGS) if flag in present)


def versions_line(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Environment by environment."""
    return "; ".join(
        f"{environment}: " + ", ".join(f"{name} {version}" for name, version in packages.items())
        for environment, packages in versions.items()
    )
