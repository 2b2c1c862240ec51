"""Finds the cost model that chunks are packed with: pinned, remembered, or measured in background.

The order of events: `prepare` when the model is loaded (never measures, returns at once), `start`
when requests are served, `stop` at shutdown. Whoever packs chunks gets every new cost model
through `publish`, and never has to ask.
"""

import logging
import threading
from collections.abc import Callable

import attrs

from ..domain.cost_model import CostModel
from ..domain.ports import Clock, CoefficientStore, InferenceBackend
from ..domain.probe import Probe, ProbeLimits, ProbeOutcome, ProbeResult, probe_shapes
from ..domain.probe_fit import Fit, FitRefusal, fit_workspace
from .metering import MeteredBackend, PassMeter, ProbeMeter
from .service import ProbeStatus, Tuning
from .tuning_state import (
    Situation,
    TuningDetail,
    TuningState,
    account,
    first_state,
    longest_text_tokens,
)

logger = logging.getLogger(__name__)

EXCESS_RATIO = 1.2
"""A pass that needs this much more than estimated shows that the cost model is too low."""

LARGEST_RAISE = 2.0
"""Of what was measured or assumed at first, by all passes together: what else the process did at
the same time counts as well, such as reading the texts of a request."""

EXCESS_BYTES = 32 * 1024**2
"""Smaller excesses are noise of the allocator and of what else the process does."""

Publish = Callable[[CostModel, Tuning], None]


class Tuner:
    """Safe to call from any thread; there is never more than one probe at a time."""

    def __init__(self, store: CoefficientStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        # Not the thread's own word: a `join` that was interrupted makes it say that it has ended.
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._publish: Publish | None = None
        self._situation: Situation | None = None
        self._state: TuningState | None = None
        self._probe_meter: ProbeMeter | None = None
        self._is_serving = True

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
                self._state = first_state(situation, self._store)
            if not isinstance(situation.peaks, str) and not situation.pins.is_gpu:
                meter = PassMeter(situation.peaks)
                self._probe_meter = ProbeMeter(backend, meter, situation.trim)
                backend = MeteredBackend(backend, meter, self.observe)
            return self._state.cost_model, self._account(), backend

    def start(self, publish: Publish) -> None:
        """Measure in the background if nothing is known; `publish` gets what comes of it."""
        with self._lock:
            self._publish = publish
            is_probing = self._thread is not None and self._thread.is_alive()
            if is_probing or self._cancelled.is_set() or self._probe_meter is None:
                return
            if self._state is None or self._state.status is not ProbeStatus.RUNNING:
                return
            self._has_ended.clear()
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
        return self._has_ended.wait(timeout_seconds)

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
                longest_text_tokens=longest_text_tokens(state, situation),
                excess_passes=state.excess_passes,
                quality=state.quality,
                probe=state.probe,
            )

    def measure(self) -> TuningDetail:
        """Measure now, if `prepare` left anything to measure, and wait for the outcome.

        Nothing is served meanwhile, so a pass may have a worker's whole share.
        """
        self._is_serving = False
        self.start(lambda *_: None)
        if self._thread is not None:
            self._has_ended.wait()
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
            raised = 1.0
            if state.status is not ProbeStatus.DISABLED:
                raised = min(measured_bytes / estimated, LARGEST_RAISE / state.raised)
            self._state = attrs.evolve(
                state,
                coefficients=state.coefficients.scaled(raised),
                raised=state.raised * raised,
                excess_passes=state.excess_passes + 1,
            )
            logger.warning(
                "a forward pass needed more memory than estimated",
                extra={
                    "fields": {
                        "batch": batch,
                        "max_seq": tokens,
                        "estimated_bytes": round(estimated),
                        "measured_bytes": measured_bytes,
                        "raises_cost_model_by": round(raised, 2),
                    }
                },
            )
        self._announce()

    def _run(self) -> None:
        try:
            self._probe()
        finally:
            self._has_ended.set()

    def _probe(self) -> None:
        situation, meter = self._situation, self._probe_meter
        if situation is None or meter is None:
            return
        try:
            result = self._measure(situation, meter)
        except Exception:
            logger.exception("the probe failed")
            result = ProbeResult((), (), ProbeOutcome.ENGINE_FAILED, "see the log")
        if self._cancelled.is_set() and result.outcome is not ProbeOutcome.COMPLETE:
            # An engine that is closed meanwhile fails.
            result = attrs.evolve(
                result, outcome=ProbeOutcome.CANCELLED, reason="cancelled by shutdown"
            )
        meter.rest()
        fit = fit_workspace(result.peaks, situation.conservative, situation.max_tokens)
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
                workspace_bytes=budget.probe_workspace_bytes
                if self._is_serving
                else budget.workspace_bytes_per_worker,
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
            if result.outcome is ProbeOutcome.CANCELLED:
                self._give_up_probe(result, result.reason, share)
                logger.info("probe cancelled by shutdown")
                return
            if isinstance(fit, FitRefusal):
                self._give_up_probe(result, f"{result.reason}; {fit.reason}", share)
                logger.warning(
                    "probe without a result, conservative coefficients stay",
                    extra={"fields": {"reason": self._state.reason}},
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
                raised=1.0,
            )
            logger.info(
                "probe complete",
                extra={"fields": attrs.asdict(fit.coefficients) | attrs.asdict(fit.quality)},
            )
            self._remember(fit, result, situation)

    def _give_up_probe(self, result: ProbeResult, reason: str, share: int) -> None:
        if self._state is not None:
            self._state = attrs.evolve(
                self._state,
                ceiling_bytes=share,
                status=ProbeStatus.FAILED,
                reason=reason,
                probe=result,
            )

    def _remember(self, fit: Fit, result: ProbeResult, situation: Situation) -> None:
        """Keep what was measured; where work disturbed it, the next start may be quieter."""
        if result.was_disturbed:
            return
        if result.was_limited:
            fit = attrs.evolve(fit, limited_to_bytes=situation.budget.probe_workspace_bytes)
        problem = self._store.save(situation.key, fit)
        if problem:
            logger.warning("coefficients are not remembered", extra={"fields": {"reason": problem}})

    def _announce(self) -> None:
        with self._lock:
            if self._publish is not None and self._state is not None:
                self._publish(self._state.cost_model, self._account())

    def _account(self) -> Tuning:
        assert self._state is not None  # noqa: S101  callers hold the lock after `prepare`
        assert self._situation is not None  # noqa: S101
        return account(self._state, self._situation)
