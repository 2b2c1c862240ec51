"""Memory limits that a container or service manager puts on this process, in both cgroup versions.

A limit binds through the whole hierarchy: the smallest one on the way from the process's own
group up to the root is the one the kernel enforces.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import attrs

from ...domain.types import MemoryLimit

UNLIMITED_BYTES = 1 << 40
"""From 1 TiB on a figure means "no limit": cgroup v1 writes one near 2⁶³."""

_V2_CONTROLLER = ""
_V2_FILES = ("memory.max", "memory.high")
_V1_FILES = ("memory.limit_in_bytes",)


@attrs.frozen
class CgroupV2Probe:
    """A `MemoryProbe` for the unified hierarchy."""

    root: Path = Path("/")

    def limit(self) -> MemoryLimit | None:
        """The tighter of ``memory.max`` and ``memory.high`` over all levels."""
        limit_bytes = cgroup_v2_limit_bytes(self.root)
        return None if limit_bytes is None else MemoryLimit(limit_bytes, "cgroup_v2")


@attrs.frozen
class CgroupV1Probe:
    """A `MemoryProbe` for the memory controller of version 1, also on hybrid hosts."""

    root: Path = Path("/")

    def limit(self) -> MemoryLimit | None:
        """The tightest ``memory.limit_in_bytes`` over all levels."""
        limit_bytes = cgroup_v1_limit_bytes(self.root)
        return None if limit_bytes is None else MemoryLimit(limit_bytes, "cgroup_v1")


def cgroup_v2_limit_bytes(root: Path) -> int | None:
    """Limit of this process below `root`, the top of the file system; None if there is none."""
    path = parse_membership(_read(root / "proc/self/cgroup")).get(_V2_CONTROLLER)
    if path is None:
        return None
    return min(_limits_bytes(root / "sys/fs/cgroup", path, _V2_FILES), default=None)


def cgroup_v1_limit_bytes(root: Path) -> int | None:
    """Limit of this process below `root`, the top of the file system; None if there is none."""
    path = parse_membership(_read(root / "proc/self/cgroup")).get("memory", "/")
    return min(_limits_bytes(root / "sys/fs/cgroup/memory", path, _V1_FILES), default=None)


def parse_membership(text: str) -> Mapping[str, str]:
    """Controller → group of a process, from ``/proc/<pid>/cgroup``.

    Lines read ``hierarchy:controller,controller:path``; version 2 leaves the controllers empty.
    """
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator:
            groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def parse_limit_bytes(text: str) -> int | None:
    """A limit file's figure; None for ``max``, figures that mean no limit, and anything else."""
    figure = text.strip()
    if not (figure.isascii() and figure.isdecimal()):
        return None
    limit_bytes = int(figure)
    return limit_bytes if 0 < limit_bytes < UNLIMITED_BYTES else None


def _limits_bytes(mount: Path, group: str, files: tuple[str, ...]) -> Iterator[int]:
    """Every limit from the group up to and including the mount point.

    Inside a container the path may be the host's, whose lower levels do not exist here: the
    mount point then is the container's own group.
    """
    # A process outside its cgroup namespace's root has `..` in its path; nothing above is visible.
    levels = [part for part in PurePosixPath(group).parts if part not in {"/", ".."}]
    for depth in range(len(levels), -1, -1):
        for name in files:
            limit_bytes = parse_limit_bytes(_read(mount.joinpath(*levels[:depth], name)))
            if limit_bytes is not None:
                yield limit_bytes


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
