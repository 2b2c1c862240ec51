"""Variables that are set in vain, and what to say about them."""

import difflib
from collections.abc import Collection, Mapping

WITHOUT_EFFECT_YET = {
    "BGE_M3_TRT_WARMUP_SHAPES": "engines are built on first use",
    "BGE_M3_WARMUP_ONLY": "the server starts as usual",
}
"""Variables that are checked but do nothing in this version, and what happens instead."""

_NVIDIA = ("cuda", "tensorrt")

ONLY_WITH: Mapping[str, Collection[str]] = {
    "BGE_M3_GPU_COUNT": _NVIDIA,
    "BGE_M3_GPU_VRAM_BUDGET_BYTES": _NVIDIA,
    "BGE_M3_GPU_MEM_LIMIT_BYTES": _NVIDIA,
    "BGE_M3_TRT_MAX_WORKSPACE_BYTES": ("tensorrt",),
    "BGE_M3_COREML_STRATEGY": ("coreml",),
}
"""Variables that count with some engines only, and the names of these in `BGE_M3_EP`."""


def of_other_engines(environment: Mapping[str, str], engine: str) -> list[str]:
    """One sentence for each variable that is set and does not count with `engine`."""
    return [
        f"{name} counts only with BGE_M3_EP={' or '.join(engines)} and is ignored with {engine}"
        for name, engines in ONLY_WITH.items()
        if environment.get(name) and engine not in engines
    ]


def without_effect(environment: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that is set and does nothing in this version."""
    return [
        f"{name} is set but has no effect yet in this version: {instead}"
        for name, instead in WITHOUT_EFFECT_YET.items()
        if environment.get(name)
    ]


def unknown(environment: Mapping[str, str], known: Collection[str]) -> list[str]:
    """One sentence for each variable that looks like one of this server's and is none."""
    notices = []
    for name in sorted(environment):
        if name.startswith("BGE_M3_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            notices.append(f"{name} is not a variable of this server and is ignored{hint}")
    return notices
