"""Cost models that an operator pins, and which of several settings counts."""

import math
from collections.abc import Mapping

import attrs

from .budget import Budget
from .cost_model import DEFAULT_MAX_WORKSPACE_BYTES, CostModel
from .errors import ConfigError
from .probe_fit import Coefficients

DEFAULT_VRAM_BUDGET_BYTES = 10 * 1024**3
"""Leaves room for the model and the driver on a device of 16 GiB."""

LEGACY_TEXT_TOKENS = 512
"""Length of a text in the days of `BGE_M3_ONNX_BATCH_SIZE`."""


@attrs.frozen(kw_only=True)
class Pins:
    """What an operator has set; None is not set.

    `vram_budget_bytes` counts only where `is_gpu`.
    """

    is_gpu: bool = False
    vram_budget_bytes: int | None = None
    disable_auto_budget: bool = False
    token_budget: int | None = None
    onnx_batch_size: int | None = None
    cost_model_a: float | None = None
    cost_model_b: float | None = None
    available_memory_bytes: int | None = None


@attrs.frozen
class Override:
    """A pinned cost model; `source` names the setting that it comes from."""

    cost_model: CostModel
    source: str


@attrs.frozen
class Resolution:
    """The override that counts, or None: measure. `warnings` are for the log."""

    override: Override | None
    warnings: tuple[str, ...] = ()


def resolve(pins: Pins, conservative: Coefficients, max_tokens: int, budget: Budget) -> Resolution:
    """The first of: GPU, no auto-budget, token budget, batch size, coefficients; else, measure.

    A GPU's memory is not the host's, so its ceiling is `vram_budget_bytes`. Pinned coefficients,
    and conservative ones without auto-budget, keep to the worker's share of the memory, and to
    2 GiB unless the memory was stated as well. A token budget t is what t tokens cost in texts of
    `max_tokens`. The deprecated batch size n is a token budget of n × 512.

    Raises:
        ConfigError: coefficients that no cost model can have.
    """
    set_pins = [name for name, is_set in _by_strength(pins).items() if is_set]
    warnings = [f"{name} is overruled by {set_pins[0]}" for name in set_pins[1:]]
    if pins.onnx_batch_size is not None:
        equal = pins.onnx_batch_size * min(LEGACY_TEXT_TOKENS, max_tokens)
        warnings.append(
            f"BGE_M3_ONNX_BATCH_SIZE is deprecated: set BGE_M3_TOKEN_BUDGET={equal} instead"
        )
    if (pins.cost_model_a is None) != (pins.cost_model_b is None):
        warnings.append(
            "BGE_M3_COST_MODEL_A and BGE_M3_COST_MODEL_B count only together; "
            "the one that is set is ignored"
        )
    if not set_pins:
        return Resolution(None, tuple(warnings))
    cost_model = _pinned(set_pins[0], pins, conservative, max_tokens, budget)
    return Resolution(Override(cost_model, set_pins[0]), tuple(warnings))


_GPU = "BGE_M3_GPU_VRAM_BUDGET_BYTES"
_NO_AUTO_BUDGET = "BGE_M3_DISABLE_AUTO_BUDGET"
_TOKEN_BUDGET = "BGE_M3_TOKEN_BUDGET"  # noqa: S105  a number of tokens
_BATCH_SIZE = "BGE_M3_ONNX_BATCH_SIZE"
_COEFFICIENTS = "BGE_M3_COST_MODEL_A and _B"


def _by_strength(pins: Pins) -> Mapping[str, bool]:
    """Whether each is set, the strongest first."""
    return {
        _GPU: pins.is_gpu,
        _NO_AUTO_BUDGET: pins.disable_auto_budget,
        _TOKEN_BUDGET: pins.token_budget is not None,
        _BATCH_SIZE: pins.onnx_batch_size is not None,
        _COEFFICIENTS: pins.cost_model_a is not None and pins.cost_model_b is not None,
    }


def _pinned(
    name: str, pins: Pins, conservative: Coefficients, max_tokens: int, budget: Budget
) -> CostModel:
    if name == _GPU:
        return conservative.cost_model(pins.vram_budget_bytes or DEFAULT_VRAM_BUDGET_BYTES)
    share = budget.workspace_bytes_per_worker
    if pins.available_memory_bytes is None:
        share = min(share, DEFAULT_MAX_WORKSPACE_BYTES)
    if name == _NO_AUTO_BUDGET:
        return conservative.cost_model(share)
    if name == _COEFFICIENTS:
        pinned = Coefficients(pins.cost_model_a or 0.0, pins.cost_model_b or 0.0)
        try:
            return pinned.cost_model(share)
        except ValueError as error:
            raise ConfigError(f"BGE_M3_COST_MODEL_A and BGE_M3_COST_MODEL_B: {error}") from error
    tokens = pins.token_budget
    if tokens is None:
        tokens = (pins.onnx_batch_size or 0) * min(LEGACY_TEXT_TOKENS, max_tokens)
    per_token = conservative.cost_bytes(1, max_tokens) / max_tokens
    return conservative.cost_model(math.floor(tokens * per_token))
