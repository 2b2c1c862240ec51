"""Letting go of mapped pages."""

import mmap
import sys
from pathlib import Path

import pytest
from bge_m3_server.adapters.memory.mapped import drop_mapped_pages

SIZE_BYTES = 4 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are only dropped on Linux")


def resident_kib(path):
    resident, is_here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_here = line.endswith(str(path))
        elif is_here and line.startswith("Rss:"):
            resident += int(line.split()[1])
    return resident


def test_read_pages_leave_the_memory_and_come_back_from_the_file(tmp_path):
    """Nothing is resident afterwards, and the bytes are the same."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\7" * SIZE_BYTES)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert data[:] == b"\7" * SIZE_BYTES
        before = resident_kib(path)
        drop_mapped_pages([path])
        after = resident_kib(path)
        assert before >= SIZE_BYTES // 1024
        assert after == 0
        assert data[SIZE_BYTES - 1] == 7


def test_pages_that_could_be_written_but_were_not_leave_too(tmp_path):
    """ONNX Runtime maps weights so, and writes to none of them."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\7" * SIZE_BYTES)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        assert data[:] == b"\7" * SIZE_BYTES
        drop_mapped_pages([path])
        assert resident_kib(path) == 0
        assert data[SIZE_BYTES - 1] == 7


def test_what_was_written_stays(tmp_path):
    """A private mapping's changes exist nowhere else."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\7" * SIZE_BYTES)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        data[0] = 9
        drop_mapped_pages([path])
        assert data[0] == 9


def test_a_file_that_is_not_mapped_is_no_trouble(tmp_path):
    """There is nothing to do."""
    drop_mapped_pages([tmp_path / "nothing.bin"])
