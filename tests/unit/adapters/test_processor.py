"""What the kernel tells of the processor, and what follows."""

import pytest
from bge_m3_server.adapters.processor import may_multiply_int8, read_cpu_flags


def test_processor_flags_are_read_from_the_kernel(tmp_path):
    """Those of the first processor; none where there is no such file or line."""
    cpuinfo = tmp_path / "cpuinfo"
    assert read_cpu_flags(cpuinfo) == frozenset()
    cpuinfo.write_text("processor\t: 0\nmodel name\t: X\n")
    assert read_cpu_flags(cpuinfo) == frozenset()
    cpuinfo.write_text("flags\t\t: fpu avx2\nvmx flags\t: ept\nflags\t\t: other\n")
    assert read_cpu_flags(cpuinfo) == {"fpu", "avx2"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd i8mm\n")
    assert read_cpu_flags(cpuinfo) == {"fp", "asimd", "i8mm"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2 avx512f avx512_vnni", True),
        ("avx2 avx_vnni", True),
        ("fp asimd asimddp", True),
        ("avx2 fma avx512f avx512_bf16", False),
        ("fp asimd", False),
        ("", True),
    ],
)
def test_int8_products_need_instructions_of_their_own(flags, expected):
    """Where nothing is known, the usual case is assumed."""
    assert may_multiply_int8(frozenset(flags.split())) is expected
