"""Peak memory of this process, from the kernel's own figures."""

import mmap
import resource
from pathlib import Path

import pytest
from bge_m3_server.adapters.memory.peak import (
    ProcPeakMemory,
    parse_status_bytes,
    peak_memory,
)
from bge_m3_server.domain.types import ResidentMemory

MIB = 1024**2

STATUS = """Name:\tpython
VmPeak:\t 9000000 kB
VmHWM:\t    1500 kB
VmRSS:\t    1000 kB
RssAnon:\t     700 kB
RssFile:\t     250 kB
RssShmem:\t      50 kB
Threads:\t4
"""


def descriptor_count():
    return len(list(Path("/proc/self/fd").iterdir()))


def plant(root, status=STATUS):
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "status").write_text(status)
    (process / "clear_refs").write_text("")
    return root


def test_figures_of_a_status_file(tmp_path):
    """Shared memory counts with what cannot be dropped."""
    memory = peak_memory(plant(tmp_path))

    assert memory.resident() == ResidentMemory(750 * 1024, 250 * 1024)
    assert memory.resident().total_bytes == 1000 * 1024
    assert memory.peak_bytes() == 1500 * 1024


def test_reset_asks_the_kernel(tmp_path):
    """Five is the kernel's word for resetting the high-water mark."""
    ProcPeakMemory(plant(tmp_path)).reset_peak()

    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


def test_no_descriptor_is_needed_to_ask_again(tmp_path):
    """Clients may hold all that there are; and none is lost with a model that goes."""
    memory = peak_memory(plant(tmp_path))
    open_before = descriptor_count()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        memory.reset_peak()
        assert memory.peak_bytes() == 1500 * 1024
        assert memory.resident().file_bytes == 250 * 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del memory
    assert descriptor_count() == open_before - 2


def test_a_system_without_proc(tmp_path):
    """No such files: the answer says so instead of a figure."""
    assert "cannot be measured here" in peak_memory(tmp_path)


def test_a_sandbox_that_hides_the_high_water_mark(tmp_path):
    """Some sandboxes emulate the file without this line."""
    reason = peak_memory(plant(tmp_path, STATUS.replace("VmHWM", "VmXXX")))

    assert reason.endswith("has no VmHWM")


def test_only_whole_fields_are_read():
    """Names are matched from the start of a line, figures in kB."""
    status = f"xVmHWM:\t1 kB\nVmHWM:\tmany kB\nRssAnon:\t2 kB\nRssFile:\t{'9' * 5000} kB\n"

    assert parse_status_bytes(status) == {"RssAnon": 2048}


def test_a_real_peak_is_seen_after_it_has_passed():
    """Memory that is gone again shows in the peak, and no longer after a reset."""
    memory = peak_memory()
    if isinstance(memory, str):
        pytest.skip(memory)
    memory.reset_peak()
    before = memory.peak_bytes()
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert memory.resident().anonymous_bytes >= 64 * MIB
    risen = memory.peak_bytes() - before
    memory.reset_peak()

    assert 60 * MIB < risen < 80 * MIB
    assert memory.peak_bytes() - before < 16 * MIB
