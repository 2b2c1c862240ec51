"""Cost models that an operator pins, and which of several settings counts."""

import math

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
    """The first of: GPU, no auto-budget, token budget, coefficients; without any, measure.

    A GPU's memory is not the host's, so its ceiling is `vram_budget_bytes`. Pinned coefficients,
    and conservative ones without auto-budget, keep to the worker's share of the memory, and to
    2 GiB unless the memory was stated as well. A token budget t is what t tokens cost in texts of
    `max_tokens`. The deprecated batch size n is a token budget of n × 512, unless a token budget
    is set.

    Raises:
        ConfigError: coefficients that no cost model can have.
    """
    warnings: list[str] = []
    token_budget = pins.token_budget
    if pins.onnx_batch_size is not None:
        translated = pins.onnx_batch_size * min(LEGACY_TEXT_TOKENS, max_tokens)
        warnings.append(
            "BGE_M3_ONNX_BATCH_SIZE is deprecated; "
            + (
                f"BGE_M3_TOKEN_BUDGET={token_budget} is used instead"
                if token_budget is not None
                else f"it is taken for BGE_M3_TOKEN_BUDGET={translated}"
            )
        )
        token_budget = translated if token_budget is None else token_budget
    if (pins.cost_model_a is None) != (pins.cost_model_b is None):
        warnings.append(
            "BGE_M3_COST_MODEL_A and BGE_M3_COST_MODEL_B count only together; "
            "the one that is set is ignored"
        )
    override = _override(pins, token_budget, conservative, max_tokens, budget)
    return Resolution(override, tuple(warnings))


def _override(
    pins: Pins,
    token_budget: int | None,
    conservative: Coefficients,
    max_tokens: int,
    budget: Budget,
) -> Override | None:
    if pins.is_gpu:
        ceiling = pins.vram_budget_bytes or DEFAULT_VRAM_BUDGET_BYTES
        return Override(conservative.cost_model(ceiling), "BGE_M3_GPU_VRAM_BUDGET_BYTES")
    share = budget.workspace_bytes_per_worker
    if pins.available_memory_bytes is None:
        share = min(share, DEFAULT_MAX_WORKSPACE_BYTES)
    if pins.disable_auto_budget:
        return Override(conservative.cost_model(share), "BGE_M3_DISABLE_AUTO_BUDGET")
    if token_budget is not None:
        per_token = conservative.cost_bytes(1, max_tokens) / max_tokens
        ceiling = math.floor(token_budget * per_token)
        return Override(conservative.cost_model(ceiling), "BGE_M3_TOKEN_BUDGET")
    if pins.cost_model_a is not None and pins.cost_model_b is not None:
        pinned = Coefficients(pins.cost_model_a, pins.cost_model_b)
        try:
            return Override(pinned.cost_model(share), "BGE_M3_COST_MODEL_A and _B")
        except ValueError as error:
            raise ConfigError(f"BGE_M3_COST_MODEL_A and BGE_M3_COST_MODEL_B: {error}") from error
    return None
