"""What the processor can do, as far as it decides which engine and which weights are fast."""

import re
from collections.abc import Collection
from pathlib import Path

INT8_FLAGS = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "asimddp")
"""Linux's names of the instructions that multiply int8 matrices, on x86-64 and on ARM."""

ARITHMETIC_FLAGS = frozenset(
    (*INT8_FLAGS, "amx_bf16", "avx512_bf16", "avx512f", "avx2", "fma", "bf16")
)
"""Those that decide how engines round 8-bit and bfloat16 products."""

_FLAGS = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the first processor, x86-64 or ARM; empty where the system does not tell."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = _FLAGS.search(text)
    return frozenset(found[1].split()) if found else frozenset()


def has_int8_products(cpu_flags: Collection[str]) -> bool:
    """Whether the processor is known to multiply int8 matrices, in sums of 32 bits."""
    return not set(INT8_FLAGS).isdisjoint(cpu_flags)


def may_multiply_int8(cpu_flags: Collection[str]) -> bool:
    """Whether 8-bit weights are worth it; also where no flag is known.

    Without these instructions they have 0.7 to 1 times the speed of float32 on ONNX Runtime, and
    0.85 to 1.1 times on OpenVINO: `benchmarks/lesser_processor.py`.
    """
    return not cpu_flags or has_int8_products(cpu_flags)
