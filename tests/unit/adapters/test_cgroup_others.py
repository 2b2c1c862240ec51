"""What other processes of a group leave of its limit."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from bge_m3_server.adapters.memory.cgroup import CgroupV1Probe, CgroupV2Probe

MIB = 1024**2
GIB = 1024**3
V1_MEMORY = Path("/sys/fs/cgroup/memory")


def plant(root, files):
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
    return root


def own(mib):
    """A status file of a process with so much memory of its own."""
    return f"VmRSS: 1 kB\nRssAnon:\t{mib * 1024} kB\nRssFile:\t 900 kB\nRssShmem:\t0 kB"


def test_a_sidecar_leaves_less(tmp_path):
    """What this process holds itself does not count against it, what others hold does."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod",
            "proc/self/status": own(300),
            "sys/fs/cgroup/pod/memory.max": 2 * GIB,
            "sys/fs/cgroup/pod/memory.stat": f"anon {700 * MIB}\nfile {900 * MIB}\n"
            f"shmem {20 * MIB}\nslab_unreclaimable {5 * MIB}\nslab_reclaimable {99 * MIB}",
        },
    )
    assert CgroupV2Probe(tmp_path).limit().limit_bytes == 2 * GIB - 425 * MIB


def test_each_level_has_its_own_others(tmp_path):
    """A roomy outer group that is full binds more than the tight empty one inside it."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/outer/inner",
            "proc/self/status": own(100),
            "sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes": 4 * GIB,
            "sys/fs/cgroup/memory/outer/inner/memory.stat": f"total_rss {100 * MIB}",
            "sys/fs/cgroup/memory/outer/memory.limit_in_bytes": 6 * GIB,
            "sys/fs/cgroup/memory/outer/memory.stat": f"rss 5\ntotal_rss {5 * GIB + 100 * MIB}",
        },
    )
    assert CgroupV1Probe(tmp_path).limit().limit_bytes == 1 * GIB


def test_figures_that_lag_behind(tmp_path):
    """A group that seems to hold less than this process alone leaves the whole limit, not more."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/status": own(300),
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.stat": f"anon {100 * MIB}\nbroken\nshmem x",
        },
    )
    assert CgroupV2Probe(tmp_path).limit().limit_bytes == GIB


@pytest.mark.parametrize("figure", ["9" * 5000, "-5", "12x", "٣"])
def test_figures_that_cannot_be_read(tmp_path, figure):
    """What is no figure counts as nothing, in the group's account and in the process's own."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/status": f"RssAnon:\t{figure} kB\n{own(100)}",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.stat": f"anon {figure}\nshmem {150 * MIB}",
        },
    )
    assert CgroupV2Probe(tmp_path).limit().limit_bytes == GIB - 50 * MIB


def test_a_full_group(tmp_path):
    """Others that hold all of it leave nothing, which is an answer."""
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.stat": f"anon {2 * GIB}",
        },
    )
    assert CgroupV2Probe(tmp_path).limit().limit_bytes == 0


def test_a_real_group_with_a_neighbour():
    """The kernel's own figures: a neighbour's 64 MiB are missing from what this process may use."""
    group = V1_MEMORY / f"bge-m3-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(400 * MIB))
    except OSError as error:
        pytest.skip(f"cgroup v1 memory groups cannot be made here: {error}")
    join = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
    neighbour = subprocess.Popen(
        [sys.executable, "-c", join + "held = b'x' * (64 << 20); print('ready', flush=True);"
         "sys.stdin.read()", str(group / "cgroup.procs")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert neighbour.stdout.readline() == "ready\n"
        program = (
            join + "from bge_m3_server.adapters.memory.cgroup import CgroupV1Probe;"
            "print(CgroupV1Probe().limit().limit_bytes)"
        )
        finished = subprocess.run(
            [sys.executable, "-c", program, str(group / "cgroup.procs")],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        missing = 400 * MIB - int(finished.stdout)
        # Pages stay charged to the group in which they were touched, so a little is off.
        assert 50 * MIB < missing < 100 * MIB
    finally:
        neighbour.communicate("", timeout=60)
        group.rmdir()
