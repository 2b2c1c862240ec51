"""Finds the cost model that chunks are packed with: pinned, remembered, or measured in background.

The order of events: `prepare` when the model is loaded (never measures, returns at once), `start`
when requests are served, `stop` at shutdown. Whoever packs chunks gets every new cost model
through `publish`, and never has to ask.
"""

import logging
import threading
from collections.abc import Callable

import attrs

from ..domain.budget import Budget, longest_text, require_useful
from ..domain.budget_override import Pins, resolve
from ..domain.cost_model import CostModel
from ..domain.ports import Clock, CoefficientStore, InferenceBackend, PeakMemory
from ..domain.probe import Probe, ProbeLimits, ProbeOutcome, ProbeResult, probe_shapes
from ..domain.probe_fit import Coefficients, Fit, FitQuality, FitRefusal, fit_workspace
from ..domain.types import MemoryLimit, ProbeKey
from .metering import MeteredBackend, PassMeter, ProbeMeter
from .service import ProbeStatus, Tuning

logger = logging.getLogger(__name__)

EXCESS_RATIO = 1.2
"""A pass that needs this much more than estimated shows that the cost model is too low."""

LARGEST_RAISE = 2.0
"""Of one pass: what others did at the same time counts as well. A model that is worse is raised
again by the next pass."""

EXCESS_BYTES = 32 * 1024**2
"""Smaller excesses are noise of the allocator and of what else the process does."""

MEASURABLE_SOURCES = frozenset({"conservative", "probe", "cache"})
"""All others are settings, and what they pin is obeyed."""

Publish = Callable[[CostModel, Tuning], None]


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
class _State:
    coefficients: Coefficients
    ceiling_bytes: int
    status: ProbeStatus
    source: str
    reason: str
    quality: FitQuality | None = None
    probe: ProbeResult | None = None
    excess_passes: int = 0

    @property
    def cost_model(self) -> CostModel:
        return self.coefficients.cost_model(self.ceiling_bytes)

    def total_bytes(self, workers: int) -> int | None:
        """Workspace of all workers together; None where the ceiling is pinned."""
        return self.ceiling_bytes * workers if self.source in MEASURABLE_SOURCES else None


class Tuner:
    """Safe to call from any thread; there is never more than one probe at a time."""

    def __init__(self, store: CoefficientStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._publish: Publish | None = None
        self._situation: Situation | None = None
        self._state: _State | None = None
        self._probe_meter: ProbeMeter | None = None

    def prepare(
        self, situation: Situation, backend: InferenceBackend
    ) -> tuple[CostModel, Tuning, InferenceBackend]:
        """What to serve with from the start: cost model, its account, and the backend to use.

        A model that is loaded again keeps what was found for it before.

        Raises:
            ConfigError: the memory does not suffice, or pinned coefficients are impossible.
        """
        with self._lock:
            self._situation = situation
            if self._state is None:
                self._state = self._first_state(situation)
            if not isinstance(situation.peaks, str) and not situation.pins.is_gpu:
                meter = PassMeter(situation.peaks)
                self._probe_meter = ProbeMeter(backend, meter, situation.trim)
                backend = MeteredBackend(backend, meter, self.observe)
            return self._state.cost_model, self._tuning(), backend

    def start(self, publish: Publish) -> None:
        """Measure in the background if nothing is known; `publish` gets what comes of it."""
        with self._lock:
            self._publish = publish
            is_probing = self._thread is not None and self._thread.is_alive()
            if is_probing or self._cancelled.is_set() or self._probe_meter is None:
                return
            if self._state is None or self._state.status is not ProbeStatus.RUNNING:
                return
            self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """Run no further pass of the probe; does not wait for the one that is running."""
        self._cancelled.set()

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """Cancel the probe and wait for the pass that is running, at most `timeout_seconds`.

        Returns whether it has ended.
        """
        self.cancel()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """`stop` was called."""
        return self._cancelled.is_set()

    def detail(self) -> TuningDetail | None:
        """How the present cost model came about; None before `prepare`."""
        with self._lock:
            state, situation = self._state, self._situation
            if state is None or situation is None:
                return None
            return TuningDetail(
                cost_model=state.cost_model,
                coefficients_source=state.source,
                reason=state.reason,
                longest_text_tokens=self._longest_text_tokens(state, situation),
                excess_passes=state.excess_passes,
                quality=state.quality,
                probe=state.probe,
            )

    def measure(self) -> TuningDetail:
        """Measure now, if `prepare` left anything to measure, and wait for the outcome."""
        self.start(lambda *_: None)
        if self._thread is not None:
            self._thread.join()
        detail = self.detail()
        assert detail is not None  # noqa: S101  callers have called `prepare`
        return detail

    def observe(self, batch: int, tokens: int, measured_bytes: int) -> None:
        """Compare a pass that was alone with its estimate; one far above it raises the model."""
        with self._lock:
            if self._state is None or self._situation is None:
                return
            state = self._state
            estimated = state.coefficients.cost_bytes(batch, tokens)
            if measured_bytes <= max(estimated * EXCESS_RATIO, estimated + EXCESS_BYTES):
                return
            is_pinned = state.status is ProbeStatus.DISABLED
            coefficients = (
                state.coefficients
                if is_pinned
                else state.coefficients.scaled(min(measured_bytes / estimated, LARGEST_RAISE))
            )
            self._state = attrs.evolve(
                state, coefficients=coefficients, excess_passes=state.excess_passes + 1
            )
            logger.warning(
                "a forward pass needed more memory than estimated",
                extra={
                    "fields": {
                        "batch": batch,
                        "max_seq": tokens,
                        "estimated_bytes": round(estimated),
                        "measured_bytes": measured_bytes,
                        "raises_cost_model": not is_pinned,
                    }
                },
            )
            self._remember()
        self._announce()

    def _first_state(self, situation: Situation) -> _State:
        share = situation.budget.workspace_bytes_per_worker
        conservative = situation.conservative
        resolution = resolve(situation.pins, conservative, situation.max_tokens, situation.budget)
        for warning in resolution.warnings:
            logger.warning(warning)
        if resolution.override:
            pinned = resolution.override.cost_model
            self._warn_about_pins(situation, pinned)
            return _State(
                Coefficients(pinned.a_bytes_per_token, pinned.b_bytes_per_token_sq),
                pinned.max_workspace_bytes,
                ProbeStatus.DISABLED,
                resolution.override.source,
                f"pinned by {resolution.override.source}",
            )
        require_useful(
            situation.budget, situation.memory.source, conservative, situation.max_tokens
        )
        known = (
            self._store.load(situation.key) if situation.use_cache else "a fresh probe is wanted"
        )
        if isinstance(known, Fit):
            logger.info("probe cache hit, nothing is measured")
            return _State(
                known.coefficients,
                share,
                ProbeStatus.CACHE_HIT,
                "cache",
                "measured at an earlier start",
                known.quality,
            )
        logger.info("probe cache miss", extra={"fields": {"reason": known}})
        if isinstance(situation.peaks, str):
            return _State(
                conservative, share, ProbeStatus.DISABLED, "conservative", situation.peaks
            )
        # The probe takes a share of its own, so the workers' shares are smaller until it ends.
        workers = situation.budget.workers
        return _State(
            conservative,
            situation.budget.workspace_bytes // (workers + 1),
            ProbeStatus.RUNNING,
            "conservative",
            "the probe has not ended",
        )

    def _warn_about_pins(self, situation: Situation, pinned: CostModel) -> None:
        share = situation.budget.workspace_bytes_per_worker
        if not situation.pins.is_gpu and pinned.max_workspace_bytes > share:
            logger.warning(
                "the pinned workspace is larger than this memory has room for",
                extra={"fields": {"pinned_bytes": pinned.max_workspace_bytes, "room_bytes": share}},
            )

    def _run(self) -> None:
        situation, meter = self._situation, self._probe_meter
        if situation is None or meter is None:
            return
        try:
            result = self._measure(situation, meter)
        except Exception:
            logger.exception("the probe failed")
            result = ProbeResult((), (), ProbeOutcome.ENGINE_FAILED, "see the log")
        fit = fit_workspace(result.peaks)
        self._conclude(situation, result, fit)
        self._announce()

    def _measure(self, situation: Situation, meter: ProbeMeter) -> ProbeResult:
        budget, conservative = situation.budget, situation.conservative
        return Probe(
            probe_shapes(situation.max_tokens, conservative),
            meter,
            conservative,
            ProbeLimits(
                memory_bytes=situation.memory.limit_bytes,
                workspace_bytes=budget.workspace_bytes // (budget.workers + 1),
            ),
            self._clock,
            self._cancelled.is_set,
            self._cancelled.wait,
        ).run()

    def _conclude(self, situation: Situation, result: ProbeResult, fit: Fit | FitRefusal) -> None:
        with self._lock:
            if self._state is None:
                return
            share = situation.budget.workspace_bytes_per_worker
            if isinstance(fit, FitRefusal) or result.outcome is ProbeOutcome.CANCELLED:
                why = result.reason if isinstance(fit, Fit) else f"{result.reason}; {fit.reason}"
                self._state = attrs.evolve(
                    self._state,
                    ceiling_bytes=share,
                    status=ProbeStatus.FAILED,
                    reason=why,
                    probe=result,
                )
                logger.warning(
                    "probe without a result, conservative coefficients stay",
                    extra={"fields": {"reason": why}},
                )
                return
            self._state = attrs.evolve(
                self._state,
                coefficients=fit.coefficients,
                ceiling_bytes=share,
                status=ProbeStatus.COMPLETE,
                source="probe",
                reason=result.reason,
                quality=fit.quality,
                probe=result,
            )
            logger.info(
                "probe complete",
                extra={"fields": attrs.asdict(fit.coefficients) | attrs.asdict(fit.quality)},
            )
            self._remember()

    def _remember(self) -> None:
        """Keep what was measured, with what was learnt since."""
        state, situation = self._state, self._situation
        if state is None or situation is None or state.quality is None:
            return
        problem = self._store.save(situation.key, Fit(state.coefficients, state.quality))
        if problem:
            logger.warning("coefficients are not remembered", extra={"fields": {"reason": problem}})

    def _announce(self) -> None:
        with self._lock:
            if self._publish is not None and self._state is not None:
                self._publish(self._state.cost_model, self._tuning())

    def _longest_text_tokens(self, state: _State, situation: Situation) -> int:
        total_bytes = state.total_bytes(situation.budget.workers)
        if total_bytes is None:
            return situation.max_tokens
        return longest_text(state.coefficients.cost_model(total_bytes), situation.max_tokens)

    def _tuning(self) -> Tuning:
        state, situation = self._state, self._situation
        assert state is not None  # noqa: S101  callers hold the lock after `prepare`
        assert situation is not None  # noqa: S101
        cost_model, budget, quality = state.cost_model, situation.budget, state.quality
        is_gpu = situation.pins.is_gpu
        return Tuning(
            a_bytes_per_token=cost_model.a_bytes_per_token,
            b_bytes_per_token_sq=cost_model.b_bytes_per_token_sq,
            max_workspace_bytes=cost_model.max_workspace_bytes,
            probe_status=state.status,
            memory_source=situation.memory.source,
            available_bytes=budget.available_bytes,
            model_rss_bytes_per_worker=budget.model_bytes_per_worker,
            worst_case_peak_bytes=None
            if is_gpu
            else budget.worst_case_peak_bytes(cost_model.max_workspace_bytes),
            utilization_pct=None
            if is_gpu
            else round(budget.utilization_pct(cost_model.max_workspace_bytes), 2),
            total_workspace_bytes=state.total_bytes(budget.workers),
            coefficients_source=state.source,
            reason=state.reason,
            longest_text_tokens=self._longest_text_tokens(state, situation),
            excess_passes=state.excess_passes,
            fit_r_squared=quality.r_squared if quality else None,
            fit_worst_relative_error=quality.worst_relative_error if quality else None,
            fit_margin=quality.margin if quality else None,
        )
