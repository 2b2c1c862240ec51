"""Whether OpenVINO is the faster engine here: a rule, so that a log can tell the reason."""

import re
from collections.abc import Collection
from pathlib import Path

import attrs

INT8_FLAGS = ("amx_int8", "avx512_vnni", "avx_vnni")
"""Linux's names of the instructions that multiply int8 matrices, the widest first."""

ARITHMETIC_FLAGS = frozenset(
    (*INT8_FLAGS, "amx_bf16", "avx512_bf16", "avx512f", "avx2", "fma", "asimddp", "i8mm", "bf16")
)
"""Those that decide how engines round 8-bit and bfloat16 products, on x86-64 and on ARM."""

_X86_64 = ("x86_64", "amd64")
_FLAGS = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)


@attrs.frozen
class Preference:
    """Whether OpenVINO is preferred to ONNX Runtime on the CPU, and why, for the log."""

    is_preferred: bool
    reason: str


def prefers_openvino(
    *, is_installed: bool, architecture: str, cpu_flags: Collection[str]
) -> Preference:
    """OpenVINO, where it is installed, on x86-64 processors that multiply int8 matrices.

    `architecture`: as `platform.machine` gives it.
    `cpu_flags`: as `read_cpu_flags` gives them.
    """
    if architecture.lower() not in _X86_64:
        return Preference(is_preferred=False, reason=f"the processor is {architecture}, not x86-64")
    found = next((flag for flag in INT8_FLAGS if flag in cpu_flags), None)
    if found is None:
        return Preference(
            is_preferred=False, reason=f"the processor has none of {', '.join(INT8_FLAGS)}"
        )
    if not is_installed:
        return Preference(
            is_preferred=False,
            reason=f"the processor has {found}, but OpenVINO is not installed: "
            "`pip install 'bge-m3-server[openvino]'` makes this server faster",
        )
    return Preference(is_preferred=True, reason=f"the processor has {found}")


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the first processor, x86-64 or ARM; empty where the system does not tell."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = _FLAGS.search(text)
    return frozenset(found[1].split()) if found else frozenset()
