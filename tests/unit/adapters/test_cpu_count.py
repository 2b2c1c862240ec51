"""How many CPUs this process may keep busy."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from bge_m3_server.adapters.memory.cpu_count import cpu_count, cpu_model, parse_cpu_max
from bge_m3_server.domain.types import CpuCount

V1_CPU = Path("/sys/fs/cgroup/cpu")


def plant(root, files):
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
    return root


def count(root, affine=64):
    return cpu_count(root, lambda: affine)


def test_affinity_alone(tmp_path):
    """Without a quota the scheduler's mask counts."""
    assert count(tmp_path, 6) == CpuCount(6, "affinity")


def test_a_system_without_affinity(tmp_path):
    """Where no mask can be asked for, all CPUs of the machine count."""
    assert count(tmp_path, None) == CpuCount(os.cpu_count(), "host")


def test_quota_of_version_2(tmp_path):
    """Two CPUs' worth of time in each period is two CPUs."""
    plant(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"})

    assert count(tmp_path) == CpuCount(2, "cgroup_v2")
    assert count(tmp_path, 1) == CpuCount(1, "affinity")


def test_the_tightest_group_counts(tmp_path):
    """A pod's quota binds its containers."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container",
            "sys/fs/cgroup/pod/container/cpu.max": "800000 100000",
            "sys/fs/cgroup/pod/cpu.max": "350000 100000",
            "sys/fs/cgroup/cpu.max": "max 100000",
        },
    )
    assert count(tmp_path) == CpuCount(3, "cgroup_v2")


def test_quota_of_version_2_on_a_hybrid_host(tmp_path):
    """Version 2 is mounted beside the controllers of version 1."""
    plant(
        tmp_path,
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/unified/a/cpu.max": "300000 100000"},
    )
    assert count(tmp_path) == CpuCount(3, "cgroup_v2")


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(tmp_path, mount):
    """Version 1 keeps quota and period in two files, and mounts differ in name."""
    group = f"sys/fs/cgroup/{mount}/docker/ab"
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n5:memory:/docker/ab",
            f"{group}/cpu.cfs_quota_us": "150000",
            f"{group}/cpu.cfs_period_us": "50000",
            f"sys/fs/cgroup/{mount}/cpu.cfs_quota_us": "-1",
            f"sys/fs/cgroup/{mount}/cpu.cfs_period_us": "100000",
        },
    )
    assert count(tmp_path) == CpuCount(3, "cgroup_v1")


def test_less_than_one_cpu(tmp_path):
    """A tenth of a CPU still runs one thread."""
    plant(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "10000 100000"})

    assert count(tmp_path) == CpuCount(1, "cgroup_v2")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("200000 100000", 2.0),
        ("50000", 0.5),
        ("max 100000", None),
        ("", None),
        ("100000 0", None),
        ("0 100000", None),
        ("-1 100000", None),
        ("two halves", None),
        ("9" * 400 + " 1", None),
        ("9" * 5000 + " 100000", None),
        ("100000 " + "9" * 5000, None),
    ],
)
def test_cpu_max(text, cpus):
    """`max` and nonsense are no limit; a missing period is the kernel's default."""
    assert parse_cpu_max(text) == cpus


def test_cpu_model(tmp_path):
    """The kernel's name of the processor, or the platform's where there is none."""
    plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: a"})

    assert cpu_model(tmp_path) == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "nowhere")


def test_the_real_quota_of_a_group():
    """A process in a group of one CPU counts one, by the group's account."""
    group = V1_CPU / f"bge-m3-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        pytest.skip(f"cgroup v1 cpu groups cannot be made here: {error}")
    try:
        program = (
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
            "from bge_m3_server.adapters.memory.cpu_count import cpu_count; print(cpu_count())"
        )
        finished = subprocess.run(
            [sys.executable, "-c", program, str(group / "cgroup.procs")],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        expected = "affinity" if len(os.sched_getaffinity(0)) == 1 else "cgroup_v1"
        assert finished.stdout.strip() == f"CpuCount(count=1, source='{expected}')"
    finally:
        group.rmdir()
