"""Whether OpenVINO is the better engine here: a rule, so that a log can tell the reason."""

from collections.abc import Collection, Mapping

import attrs

_BEST_FIRST = ("amx_int8", "avx512_vnni", "avx_vnni", "avx2")
"""Linux's names of instructions: with the first three OpenVINO is faster than ONNX Runtime; with
the last it is as fast, and takes long texts in a fraction of the memory."""

_AMX = frozenset({"amx_int8", "amx_bf16"})
_INT8 = frozenset({"amx_int8", "avx512_vnni", "avx_vnni"})
_AVX512 = frozenset({"avx512f", "avx512_vnni", "avx512_bf16"})

_BEYOND: Mapping[str, frozenset[str]] = {
    "SSE41": _AMX | _INT8 | _AVX512 | {"avx2", "fma"},
    "AVX": _AMX | _INT8 | _AVX512 | {"avx2", "fma"},
    "AVX2": _AMX | _INT8 | _AVX512,
    "AVX2_VNNI": _AMX | _AVX512,
    "AVX2_VNNI_2": _AMX | _AVX512,
    "AVX512_CORE": _AMX | _INT8 | {"avx512_bf16"},
    "AVX512_CORE_VNNI": _AMX | {"avx512_bf16"},
    "AVX512_CORE_BF16": _AMX,
    "AVX512_CORE_FP16": _AMX,
    "AVX10_1_512": _AMX,
}
"""What each value of ``ONEDNN_MAX_CPU_ISA`` keeps from OpenVINO, whose kernels are oneDNN's; other
values keep nothing. From the table in oneDNN's "CPU Dispatcher Control"."""

_X86_64 = ("x86_64", "amd64")


@attrs.frozen
class Preference:
    """Whether OpenVINO is preferred to ONNX Runtime on the CPU, and why, for the log."""

    is_preferred: bool
    reason: str


def prefers_openvino(
    *, is_installed: bool, architecture: str, cpu_flags: Collection[str], max_isa: str = ""
) -> Preference:
    """OpenVINO, where it is installed, on x86-64 processors from AVX2 on.

    `architecture`: as `platform.machine` gives it.
    `cpu_flags`: as `read_cpu_flags` gives them.
    `max_isa`: ``ONEDNN_MAX_CPU_ISA``, beyond which OpenVINO uses nothing.
    """
    if architecture.lower() not in _X86_64:
        return Preference(is_preferred=False, reason=f"the processor is {architecture}, not x86-64")
    usable = usable_flags(cpu_flags, max_isa)
    found = next((flag for flag in _BEST_FIRST if flag in usable), None)
    if found is None:
        masked = f"with ONEDNN_MAX_CPU_ISA={max_isa} " if usable != frozenset(cpu_flags) else ""
        return Preference(
            is_preferred=False,
            reason=f"{masked}the processor has none of {', '.join(_BEST_FIRST)}",
        )
    if not is_installed:
        return Preference(
            is_preferred=False,
            reason=f"the processor has {found}, but OpenVINO is not installed: "
            "`pip install 'bge-m3-server[openvino]'` for the better engine here",
        )
    return Preference(is_preferred=True, reason=f"the processor has {found}")


def usable_flags(cpu_flags: Collection[str], max_isa: str) -> frozenset[str]:
    """Those of `cpu_flags` that ``ONEDNN_MAX_CPU_ISA`` leaves to OpenVINO."""
    return frozenset(cpu_flags) - _BEYOND.get(max_isa.upper(), frozenset())
