"""Memory probes, on file trees as real hosts show them."""

import mmap
import subprocess

import pytest
from bge_m3_server.adapters.memory.cgroup import (
    CgroupV1Probe,
    CgroupV2Probe,
    parse_limit_bytes,
    parse_membership,
)
from bge_m3_server.adapters.memory.meminfo import MeminfoProbe
from bge_m3_server.adapters.memory.rss import resident_bytes
from bge_m3_server.adapters.memory.sysctl import SysctlProbe, run_command
from bge_m3_server.domain.types import MemoryLimit

MIB = 1024**2
GIB = 1024**3
V1_NO_LIMIT = "9223372036854771712"


def plant(root, files):
    """Write {path: text} below root."""
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
    return root


def v2(root):
    return CgroupV2Probe(root).limit()


def v1(root):
    return CgroupV1Probe(root).limit()


def test_container_with_its_own_namespace(tmp_path):
    """A Docker container sees itself as the root of the hierarchy."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 2 * GIB,
            "sys/fs/cgroup/memory.high": "max",
        },
    )
    assert v2(tmp_path) == MemoryLimit(2 * GIB, "cgroup_v2")
    assert v1(tmp_path) is None


def test_kubernetes_pod_limit_below_the_container_limit(tmp_path):
    """The tighter limit of an outer group wins over the container's own."""
    pod = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1c2.slice"
    plant(
        tmp_path,
        {
            "proc/self/cgroup": f"0::/{pod}/cri-containerd-9f.scope",
            f"sys/fs/cgroup/{pod}/cri-containerd-9f.scope/memory.max": 8 * GIB,
            f"sys/fs/cgroup/{pod}/memory.max": 6 * GIB,
            "sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/memory.max": "max",
            "sys/fs/cgroup/kubepods.slice/memory.max": 60 * GIB,
        },
    )
    assert v2(tmp_path) == MemoryLimit(6 * GIB, "cgroup_v2")


def test_nested_container_whose_parent_is_unlimited(tmp_path):
    """The own group's limit counts where the outer groups have none."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/outer/docker/inner",
            "sys/fs/cgroup/docker/outer/docker/inner/memory.max": 512 * MIB,
            "sys/fs/cgroup/docker/outer/memory.max": "max",
        },
    )
    assert v2(tmp_path) == MemoryLimit(512 * MIB, "cgroup_v2")


def test_host_path_that_does_not_exist_in_the_container(tmp_path):
    """Without a namespace the path is the host's; the mount point is the container's group."""
    plant(
        tmp_path,
        {"proc/self/cgroup": "0::/docker/4be1", "sys/fs/cgroup/memory.max": 3 * GIB},
    )
    assert v2(tmp_path) == MemoryLimit(3 * GIB, "cgroup_v2")


def test_path_outside_the_namespace_root(tmp_path):
    """A path with `..` never leads out of the mounted hierarchy."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../escape",
            "sys/escape/memory.max": 1,
            "escape/memory.max": 1,
            "sys/fs/cgroup/memory.max": 4 * GIB,
        },
    )
    assert v2(tmp_path) == MemoryLimit(4 * GIB, "cgroup_v2")


def test_fargate_task(tmp_path):
    """A Fargate task on version 1 has its limit on the task, not on the container in it."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/ecs/7d3f/7d3f-21\n4:cpu,cpuacct:/ecs/7d3f/7d3f-21",
            "sys/fs/cgroup/memory/ecs/7d3f/7d3f-21/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/memory/ecs/7d3f/memory.limit_in_bytes": 16 * GIB,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
        },
    )
    assert v1(tmp_path) == MemoryLimit(16 * GIB, "cgroup_v1")
    assert v2(tmp_path) is None


def test_systemd_unit_with_memory_high(tmp_path):
    """`MemoryHigh=` throttles before `MemoryMax=` kills, so the lower of the two counts."""
    unit = "sys/fs/cgroup/system.slice/bge-m3.service"
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/bge-m3.service",
            f"{unit}/memory.max": 8 * GIB,
            f"{unit}/memory.high": 7 * GIB,
            "sys/fs/cgroup/system.slice/memory.max": "max",
            "sys/fs/cgroup/system.slice/memory.high": "max",
        },
    )
    assert v2(tmp_path) == MemoryLimit(7 * GIB, "cgroup_v2")


@pytest.mark.parametrize(
    "figure",
    [
        *("max", V1_NO_LIMIT, str((1 << 63) - 65536), str((1 << 63) - 1)),
        *("-1", "12.5", "1_024", "٣", "", "4k", "9" * 400, "9" * 5000),
    ],
)
def test_figures_that_are_no_limit(tmp_path, figure):
    """`max`, the last page below 2⁶³, and anything that is no whole number mean no limit."""
    assert parse_limit_bytes(figure) is None
    plant(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": figure})
    assert v2(tmp_path) is None


@pytest.mark.parametrize("limit_bytes", [0, 4096, 1 << 40, 3 << 39, 1 << 50])
def test_figures_that_are_limits(tmp_path, limit_bytes):
    """Also nothing at all, and the share of a host with several TiB."""
    assert parse_limit_bytes(f"{limit_bytes}\n") == limit_bytes
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/\n0::/",
            "sys/fs/cgroup/memory.max": limit_bytes,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": limit_bytes,
        },
    )
    assert v2(tmp_path).limit_bytes == v1(tmp_path).limit_bytes == limit_bytes


def test_nothing_may_be_held_at_all(tmp_path):
    """`memory.high` of nothing is obeyed like `memory.max`."""
    plant(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.high": 0})

    assert v2(tmp_path) == MemoryLimit(0, "cgroup_v2")


def test_version_1_only(tmp_path):
    """The process's own group is read, not only the top of the hierarchy."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "11:cpuset:/docker/ab\n5:memory,hugetlb:/docker/ab",
            "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": 1 * GIB,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
        },
    )
    assert v1(tmp_path) == MemoryLimit(1 * GIB, "cgroup_v1")
    assert v2(tmp_path) is None


def test_version_1_bind_mount(tmp_path):
    """A container without a namespace finds its limit at the mount point."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/ab",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 768 * MIB,
        },
    )
    assert v1(tmp_path) == MemoryLimit(768 * MIB, "cgroup_v1")


def test_hybrid_host(tmp_path):
    """A host with both hierarchies keeps memory in version 1; version 2 has nothing to say."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/user.slice\n0::/user.slice/session-1.scope",
            "sys/fs/cgroup/unified/user.slice/session-1.scope/cgroup.procs": "1",
            "sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes": 5 * GIB,
        },
    )
    assert v2(tmp_path) is None
    assert v1(tmp_path) == MemoryLimit(5 * GIB, "cgroup_v1")


def test_hybrid_host_that_keeps_memory_in_version_2(tmp_path):
    """Version 2 is mounted beside the controllers of version 1, memory not among these."""
    unified = "sys/fs/cgroup/unified"
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n0::/app.slice/bge-m3.service",
            f"{unified}/app.slice/bge-m3.service/memory.max": 3 * GIB,
            f"{unified}/app.slice/memory.max": 2 * GIB,
            f"{unified}/app.slice/memory.stat": f"anon {GIB}",
        },
    )
    assert v2(tmp_path) == MemoryLimit(GIB, "cgroup_v2")
    assert v1(tmp_path) is None


def test_no_limit_anywhere(tmp_path):
    """A bare host with `max` at every level has no limit."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/user-1000.slice",
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.max": "max",
            "sys/fs/cgroup/user.slice/memory.max": "max",
        },
    )
    assert v2(tmp_path) is None
    assert v1(tmp_path) is None


@pytest.mark.parametrize("text", [None, "", "garbage", "0:", "::", "\x00"])
def test_missing_or_broken_membership(tmp_path, text):
    """No such files, or nonsense in them, is no limit and no error."""
    if text is not None:
        plant(tmp_path, {"proc/self/cgroup": text})
    assert v2(tmp_path) is None
    assert v1(tmp_path) is None


def test_unreadable_limit_is_skipped(tmp_path):
    """A level that cannot be read does not hide the others."""
    plant(
        tmp_path,
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/memory.max": GIB},
    )
    (tmp_path / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)
    assert v2(tmp_path) == MemoryLimit(GIB, "cgroup_v2")


def test_group_names_may_hold_colons():
    """Everything after the second colon is the path."""
    assert parse_membership("3:cpu,memory:/a:b/c\n0::/x:y\n") == {
        "cpu": "/a:b/c",
        "memory": "/a:b/c",
        "": "/x:y",
    }


def test_meminfo_available(tmp_path):
    """`MemAvailable` in kB is what a host can give."""
    plant(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       16384256 kB\nMemFree:          201244 kB\n"
            "MemAvailable:    8123456 kB\nBuffers:          1024 kB"
        },
    )
    assert MeminfoProbe(tmp_path).limit() == MemoryLimit(8123456 * 1024, "host_ram")


@pytest.mark.parametrize(
    "text",
    [None, "", "MemTotal: 1 kB", "MemAvailable: many kB", f"MemAvailable: {'9' * 5000} kB"],
)
def test_meminfo_without_available(tmp_path, text):
    """Kernels before 3.14, and other systems, have no such figure."""
    if text is not None:
        plant(tmp_path, {"proc/meminfo": text})
    assert MeminfoProbe(tmp_path).limit() is None


def test_sysctl_memsize():
    """A Mac's installed memory comes from one sysctl."""
    asked = []

    def mac(arguments):
        asked.append(list(arguments)[1:])
        return "68719476736\n"

    assert SysctlProbe(mac).limit() == MemoryLimit(64 * GIB, "host_ram")
    assert asked == [["-n", "hw.memsize"]]


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("sysctl"),
        subprocess.CalledProcessError(1, "sysctl"),
        subprocess.TimeoutExpired("sysctl", 5),
    ],
)
def test_sysctl_that_fails(failure):
    """No sysctl, or one that knows no such name, is no limit and no error."""

    def broken(arguments):
        raise failure

    assert SysctlProbe(broken).limit() is None


@pytest.mark.parametrize("text", ["hw.memsize: 68719476736", "", "-1", "9" * 5000])
def test_sysctl_with_unexpected_output(text):
    """Only a plain figure is believed."""
    assert SysctlProbe(lambda _: text).limit() is None


def test_run_command_returns_what_was_printed():
    """The real runner gives standard output and raises on a failing program."""
    assert run_command(("/bin/sh", "-c", "echo 42")) == "42\n"
    with pytest.raises(subprocess.CalledProcessError):
        run_command(("/bin/sh", "-c", "exit 3"))


def test_resident_bytes_uses_the_real_page_size(tmp_path):
    """The second field of statm counts pages."""
    plant(tmp_path, {"proc/self/statm": "5124 700 301 2 0 480 0"})
    assert resident_bytes(tmp_path) == 700 * mmap.PAGESIZE


@pytest.mark.parametrize("text", [None, "", "12", "a b c"])
def test_resident_bytes_unknown(tmp_path, text):
    """Where the file is missing or odd, the figure is unknown."""
    if text is not None:
        plant(tmp_path, {"proc/self/statm": text})
    assert resident_bytes(tmp_path) is None
