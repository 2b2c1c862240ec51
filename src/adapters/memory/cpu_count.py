"""CPUs that this process may really keep busy, and what they are."""

import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ...domain.types import CpuCount
from .cgroup import V2_MOUNTS, group_levels, parse_membership, read_text
from .figure import parse_figure

_MODEL_NAME = re.compile(r"^(?:model name|Model|CPU part)\s*:\s*(.+)$", re.MULTILINE)


def cpu_count(
    root: Path = Path("/"), affine_cpus: Callable[[], int | None] | None = None
) -> CpuCount:
    """The smallest of affinity and the quotas of all groups this process is in.

    Half a CPU of quota left over does not make another thread: 2.5 CPUs count as 2, but never
    fewer than 1.

    Args:
        root: top of the file system.
        affine_cpus: CPUs that the scheduler may choose from; by default it is asked.
    """
    affine = (affine_cpus or _affine_cpus)()
    candidates = [CpuCount(affine, "affinity") if affine else CpuCount(os.cpu_count() or 1, "host")]
    membership = parse_membership(read_text(root / "proc/self/cgroup"))
    hierarchies = (
        *(("cgroup_v2", "", mount, _quota_v2) for mount in V2_MOUNTS),
        ("cgroup_v1", "cpu", "sys/fs/cgroup/cpu", _quota_v1),
        ("cgroup_v1", "cpu", "sys/fs/cgroup/cpu,cpuacct", _quota_v1),
    )
    for source, controller, mount, quota in hierarchies:
        for directory in group_levels(root / mount, membership.get(controller, "/")):
            candidates += [CpuCount(max(1, int(cpus)), source) for cpus in quota(directory)]
    return min(candidates, key=lambda candidate: candidate.count)


def parse_cpu_max(text: str) -> float | None:
    """CPUs that a ``cpu.max`` file (``quota period``) grants; None for no limit and nonsense."""
    quota, _, period = text.strip().partition(" ")
    return _cpus(quota, period or "100000")


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name as the kernel or the platform gives it."""
    found = _MODEL_NAME.search(read_text(root / "proc/cpuinfo"))
    return found[1].strip() if found else platform.processor() or platform.machine()


def _affine_cpus() -> int | None:
    # macOS and Windows have no such call.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _quota_v2(directory: Path) -> Iterator[float]:
    cpus = parse_cpu_max(read_text(directory / "cpu.max"))
    if cpus is not None:
        yield cpus


def _quota_v1(directory: Path) -> Iterator[float]:
    quota = read_text(directory / "cpu.cfs_quota_us")
    cpus = _cpus(quota, read_text(directory / "cpu.cfs_period_us"))
    if cpus is not None:
        yield cpus


def _cpus(quota: str, period: str) -> float | None:
    """Version 2 writes ``max`` and version 1 writes -1 where there is no quota."""
    quota_us, period_us = parse_figure(quota), parse_figure(period)
    return quota_us / period_us if quota_us and period_us else None
