"""Memory limits that a container or service manager puts on this process, in both cgroup versions.

A limit binds through the whole hierarchy, and at each level it binds all processes of the group
together: what this process may use is the smallest difference, on the way from its own group up to
the root, between a limit and what the others of that group hold.
"""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath

import attrs

from ...domain.types import MemoryLimit
from .figure import parse_figure

UNLIMITED_BYTES = 1 << 62
"""From here on a figure means "no limit": cgroup v1 writes the last whole page below 2⁶³."""

V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
"""Hosts with both versions have version 2 in the latter."""


@attrs.frozen
class _Version:
    """Where a version keeps its files and what they are called.

    `held`: the fields of ``memory.stat`` that add up to what the kernel cannot drop.
    """

    mounts: tuple[str, ...]
    controller: str
    limit_files: tuple[str, ...]
    held: frozenset[str]


_V2 = _Version(
    V2_MOUNTS,
    "",
    ("memory.max", "memory.high"),
    frozenset({"anon", "shmem", "kernel_stack", "pagetables", "slab_unreclaimable", "sock"}),
)
_V1 = _Version(
    ("sys/fs/cgroup/memory",),
    "memory",
    ("memory.limit_in_bytes",),
    frozenset({"total_rss", "total_shmem"}),
)

_OWN_FIELD = re.compile(r"^(?:RssAnon|RssShmem):\s+(\d+) kB$", re.ASCII | re.MULTILINE)


@attrs.frozen
class CgroupV2Probe:
    """A `MemoryProbe` for the unified hierarchy."""

    root: Path = Path("/")

    def limit(self) -> MemoryLimit | None:
        """The tighter of ``memory.max`` and ``memory.high`` over all levels."""
        # Without an entry for version 2 the process is in no group of it.
        is_member = _V2.controller in parse_membership(read_text(self.root / "proc/self/cgroup"))
        limit_bytes = _limit_bytes(self.root, _V2) if is_member else None
        return None if limit_bytes is None else MemoryLimit(limit_bytes, "cgroup_v2")


@attrs.frozen
class CgroupV1Probe:
    """A `MemoryProbe` for the memory controller of version 1, also on hybrid hosts."""

    root: Path = Path("/")

    def limit(self) -> MemoryLimit | None:
        """The tightest ``memory.limit_in_bytes`` over all levels."""
        limit_bytes = _limit_bytes(self.root, _V1)
        return None if limit_bytes is None else MemoryLimit(limit_bytes, "cgroup_v1")


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
    """A limit file's figure; None for ``max``, figures that mean no limit, and anything else.

    Nothing at all is a limit, too.
    """
    limit_bytes = parse_figure(text)
    return None if limit_bytes is None or limit_bytes >= UNLIMITED_BYTES else limit_bytes


def held_bytes(memory_stat: str, fields: frozenset[str]) -> int:
    """The sum of `fields` in a ``memory.stat`` file; what it does not have counts as nothing."""
    lines = (line.partition(" ") for line in memory_stat.splitlines())
    return sum(parse_figure(figure) or 0 for name, _, figure in lines if name in fields)


def group_levels(mount: Path, group: str) -> Iterator[Path]:
    """The directories of a group and of all groups around it, up to the mount point.

    Inside a container the path may be the host's, whose lower levels do not exist here: the
    mount point then is the container's own group.
    """
    # A process outside its cgroup namespace's root has `..` in its path; nothing above is visible.
    levels = [part for part in PurePosixPath(group).parts if part not in {"/", ".."}]
    for depth in range(len(levels), -1, -1):
        yield mount.joinpath(*levels[:depth])


def read_text(path: Path) -> str:
    """What a kernel file says; nothing if it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def _limit_bytes(root: Path, version: _Version) -> int | None:
    """What this process may use below `root`, the top of the file system; None if unlimited."""
    membership = parse_membership(read_text(root / "proc/self/cgroup"))
    own_fields = _OWN_FIELD.findall(read_text(root / "proc/self/status"))
    own_bytes = sum((parse_figure(kib) or 0) * 1024 for kib in own_fields)
    group = membership.get(version.controller, "/")
    usable = []
    for directory in chain.from_iterable(
        group_levels(root / mount, group) for mount in version.mounts
    ):
        others_bytes = held_bytes(read_text(directory / "memory.stat"), version.held) - own_bytes
        for name in version.limit_files:
            limit_bytes = parse_limit_bytes(read_text(directory / name))
            if limit_bytes is not None:
                usable.append(max(0, limit_bytes - max(0, others_bytes)))
    return min(usable, default=None)
