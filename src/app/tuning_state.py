"""What is known of the cost model at a moment, and the account that is given of it."""

import logging
import math
from collections.abc import Callable

import attrs

from ..domain.budget import Budget, is_useful, longest_text, require_useful
from ..domain.budget_override import Override, Pins, resolve
from ..domain.cost_model import CostModel
from ..domain.ports import CoefficientStore, PeakMemory
from ..domain.probe import ProbeResult
from ..domain.probe_fit import Coefficients, Fit, FitQuality
from ..domain.types import MemoryLimit, ProbeKey
from .service import ProbeStatus, Tuning

logger = logging.getLogger(__name__)

MEASURABLE_SOURCES = frozenset({"conservative", "probe", "cache"})
"""All others are settings, and what they pin is obeyed."""


EIGHT_BIT_PRECISIONS = frozenset({"w8", "int8"})

MUCH_MORE_ROOM = 1.25
"""So many times the room that limited a probe is worth another one."""


@attrs.frozen(kw_only=True)
class Situation:
    """What is known when the model has been loaded.

    `memory`: what the process may use, and who says so.
    `peaks`: how peaks are measured, or why they cannot be. `trim` gives freed memory back.
    `use_cache`: a fit of an earlier start may be used; a new one is remembered in any case.
    """

    memory: MemoryLimit
    budget: Budget
    pins: Pins
    conservative: Coefficients
    max_tokens: int
    peaks: PeakMemory | str
    trim: Callable[[], None]
    key: ProbeKey
    use_cache: bool = True


@attrs.frozen
class TuningDetail:
    """The present cost model, and how far it can be trusted.

    `coefficients_source`: ``conservative``, ``probe``, ``cache`` or the setting that pins them.
    `reason`: why the coefficients are what they are; why the probe stopped.
    `excess_passes`: passes that needed over 20 % more than estimated.
    """

    cost_model: CostModel
    coefficients_source: str
    reason: str
    longest_text_tokens: int
    excess_passes: int
    quality: FitQuality | None
    probe: ProbeResult | None


@attrs.frozen
class TuningState:
    """Coefficients, the ceiling of one forward pass, and where both come from.

    `raised`: so many times what was measured or assumed, because passes needed more.
    """

    coefficients: Coefficients
    ceiling_bytes: int
    status: ProbeStatus
    source: str
    reason: str
    quality: FitQuality | None = None
    probe: ProbeResult | None = None
    excess_passes: int = 0
    raised: float = 1.0

    @property
    def cost_model(self) -> CostModel:
        """What chunks are packed with."""
        return self.coefficients.cost_model(self.ceiling_bytes)

    def total_bytes(self, situation: Situation) -> int | None:
        """Workspace of all workers together; None on a GPU, whose memory nobody knows.

        A pinned ceiling says how much goes into a pass, not how much memory there is.
        """
        total_bytes = self.ceiling_bytes * situation.budget.workers
        if self.source in MEASURABLE_SOURCES:
            return total_bytes
        return None if situation.pins.is_gpu else max(total_bytes, situation.budget.workspace_bytes)

    def worst_case_workspace_bytes(self, situation: Situation) -> int:
        """The most that passes may take at the same time: all workers', or one text's alone.

        A probe has a share like a worker's.
        """
        longest = self.coefficients.cost_bytes(1, longest_text_tokens(self, situation))
        probe_bytes = self.ceiling_bytes if self.status is ProbeStatus.RUNNING else 0
        workers_bytes = self.ceiling_bytes * situation.budget.workers
        return max(workers_bytes, math.floor(longest)) + probe_bytes


def first_state(situation: Situation, store: CoefficientStore) -> TuningState:
    """Pinned by a setting, remembered from an earlier start, or conservative.

    Raises:
        ConfigError: the memory does not suffice, or pinned coefficients are impossible.
    """
    share = situation.budget.workspace_bytes_per_worker
    conservative = situation.conservative
    resolution = resolve(situation.pins, conservative, situation.max_tokens, situation.budget)
    for warning in resolution.warnings:
        logger.warning(warning)
    if resolution.override:
        pinned = resolution.override.cost_model
        _tell_of_pins(situation, resolution.override)
        return TuningState(
            Coefficients(pinned.a_bytes_per_token, pinned.b_bytes_per_token_sq),
            pinned.max_workspace_bytes,
            ProbeStatus.DISABLED,
            resolution.override.source,
            f"pinned by {resolution.override.source}",
        )
    require_useful(
        situation.budget,
        situation.memory.source,
        conservative,
        situation.max_tokens,
        is_8_bit=situation.key.precision in EIGHT_BIT_PRECISIONS,
    )
    known = store.load(situation.key) if situation.use_cache else "a fresh probe is wanted"
    if isinstance(known, Fit):
        known = _doubt(known, situation) or known
    if isinstance(known, Fit):
        logger.info("probe cache hit, nothing is measured")
        return TuningState(
            known.coefficients,
            share,
            ProbeStatus.CACHE_HIT,
            "cache",
            "measured at an earlier start",
            known.quality,
        )
    logger.info("probe cache miss", extra={"fields": {"reason": known}})
    if isinstance(situation.peaks, str):
        return TuningState(
            conservative, share, ProbeStatus.DISABLED, "conservative", situation.peaks
        )
    # The probe takes a share of its own, so the workers' shares are smaller until it ends.
    return TuningState(
        conservative,
        situation.budget.probe_workspace_bytes,
        ProbeStatus.RUNNING,
        "conservative",
        "the probe has not ended",
    )


def _doubt(known: Fit, situation: Situation) -> str | None:
    """Why a fit is not good enough here."""
    budget = situation.budget
    share = budget.workspace_bytes_per_worker
    if not is_useful(known.coefficients, share, situation.max_tokens):
        return "by the remembered figures hardly any text would fit"
    limit, room = known.limited_to_bytes, budget.probe_workspace_bytes
    if limit is not None and room > limit * MUCH_MORE_ROOM:
        return (
            f"it was measured with {limit / 2**20:.0f} MiB for a pass, where there are now "
            f"{room / 2**20:.0f}"
        )
    return None


def account(state: TuningState, situation: Situation) -> Tuning:
    """The tuning block of `/health`."""
    cost_model, budget, quality = state.cost_model, situation.budget, state.quality
    is_gpu = situation.pins.is_gpu
    worst = state.worst_case_workspace_bytes(situation)
    return Tuning(
        a_bytes_per_token=cost_model.a_bytes_per_token,
        b_bytes_per_token_sq=cost_model.b_bytes_per_token_sq,
        fixed_bytes=round(cost_model.fixed_bytes),
        max_workspace_bytes=cost_model.max_workspace_bytes,
        probe_status=state.status,
        memory_source=situation.memory.source,
        available_bytes=budget.available_bytes,
        model_rss_bytes_per_worker=budget.model_bytes_per_worker,
        worst_case_peak_bytes=None if is_gpu else budget.worst_case_peak_bytes(worst),
        utilization_pct=None if is_gpu else round(budget.utilization_pct(worst), 2),
        total_workspace_bytes=state.total_bytes(situation),
        coefficients_source=state.source,
        reason=state.reason,
        longest_text_tokens=longest_text_tokens(state, situation),
        excess_passes=state.excess_passes,
        fit_r_squared=quality.r_squared if quality else None,
        fit_worst_relative_error=quality.worst_relative_error if quality else None,
        fit_margin=quality.margin if quality else None,
    )


def longest_text_tokens(state: TuningState, situation: Situation) -> int:
    """Tokens of the longest text that is not refused."""
    total_bytes = state.total_bytes(situation)
    if total_bytes is None:
        return situation.max_tokens
    return longest_text(state.coefficients.cost_model(total_bytes), situation.max_tokens)


def _tell_of_pins(situation: Situation, override: Override) -> None:
    pinned, share = override.cost_model, situation.budget.workspace_bytes_per_worker
    fields = {"by": override.source, "pinned_bytes": pinned.max_workspace_bytes}
    logger.info("the cost model is pinned, nothing is measured", extra={"fields": fields})
    if not situation.pins.is_gpu and pinned.max_workspace_bytes > share:
        logger.warning(
            "the pinned workspace is larger than this memory has room for",
            extra={"fields": {**fields, "room_bytes": share}},
        )
