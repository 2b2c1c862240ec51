"""The thread that watches the workers, the model and the time."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError

import attrs

from ..domain.cost_model import CostModel
from ..domain.errors import (
    NonFiniteOutputError,
    NotReadyError,
    NoWorkersError,
    UnavailableError,
)
from ..domain.ports import Clock
from .canary import canary_job
from .heartbeat import Heartbeat
from .jobs import Job
from .loading import LoadedModel, ProcessMemory, close
from .reload import Reload
from .service import ProbeStatus, Tuning
from .worker import PoolStatus
from .workers import WorkerPool

logger = logging.getLogger(__name__)

FAILURE_LIMIT = 5
"""So many failed chunks in a row raise the question whether the model works at all."""

TRIM_AFTER_SECONDS = 1.0
"""After so long without work the allocator gives back what it keeps: freed by many threads, in
pieces of many sizes, it came to two thirds of a small process."""

NON_FINITE_LIMIT = 3
"""So many texts in a row without one finite result raise it, too."""

BREAK_LIMIT = 3
BREAK_WINDOW_SECONDS = 600.0
"""A model that broke so often within this time is given up when it breaks again."""

QUICK_LOAD_SECONDS = 2.0
SLOW_LOAD_SECONDS = 30.0
"""An idle model that comes back within the first is never reported; beyond the second it always is,
however long the start has taken, which may have included a download."""


@attrs.frozen
class SupervisorSettings:
    """Seconds; 0 turns idle unload and heartbeat off.

    `reload_pause_seconds`: before the second try to load a model again; before the third, twice as
    long. What keeps a file or a device for a moment is not the end of the service.
    """

    idle_timeout_seconds: float = 0.0
    heartbeat_seconds: float = 0.0
    tick_seconds: float = 0.25
    reload_pause_seconds: float = 1.0


@attrs.frozen
class _Trial:
    """A harmless text that is being tried; `number`: its job's in the pool."""

    number: int
    job: Job
    is_last: bool


class Supervisor:
    """Replaces hung workers, reloads a broken model, unloads an idle one, logs the heartbeat."""

    def __init__(
        self,
        pool: WorkerPool,
        load_model: Callable[[], LoadedModel],
        settings: SupervisorSettings,
        clock: Clock,
        memory: ProcessMemory,
    ) -> None:
        self._pool = pool
        self._load_model = load_model
        self._settings = settings
        self._clock = clock
        self._memory = memory
        self._lock = threading.Lock()
        self._model: LoadedModel | None = None
        self._tuning: Tuning | None = None
        self._next_model: Future[LoadedModel] = Future()
        self._is_wanted = False
        self._failure: str | None = None
        self._trouble: str | None = None
        self._trial: _Trial | None = None
        self._reload: Reload | None = None
        self._usual_load_seconds = SLOW_LOAD_SECONDS
        self._breaks: deque[float] = deque()
        self._heartbeat = Heartbeat(settings.heartbeat_seconds, clock, memory)
        self._trimmed_after: float | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    @property
    def model(self) -> LoadedModel | None:
        """The model, unless it is unloaded or on its way."""
        return self._model

    @property
    def tuning(self) -> Tuning | None:
        """Where the present cost model comes from; None before the first load."""
        return self._tuning

    def set_cost_model(self, cost_model: CostModel, tuning: Tuning) -> None:
        """Use it from the next chunk on; later loads of the model keep it."""
        self._pool.set_cost_model(cost_model, tuning.total_workspace_bytes)
        self._tuning = tuning

    @property
    def failure(self) -> str | None:
        """Why the engine was given up."""
        return self._failure

    @property
    def trouble(self) -> str | None:
        """Why nothing is answered at present; requests wait, unless it is a `failure`."""
        return self._failure or self._trouble

    @property
    def delay(self) -> str | None:
        """Why an unloaded model that is wanted again is longer away than usual."""
        reload = self._reload
        return reload.delay(self._usual_load_seconds) if reload else None

    def report_in_heartbeat(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Log these figures with every heartbeat, too."""
        self._heartbeat.report(figures)

    def start(self) -> None:
        """Load the model and let the workers start. Blocks.

        Raises:
            ModelError: the model cannot be obtained, or fails its self-test.
        """
        started = self._clock()
        model = self._load_model()
        self._learn_usual(self._clock() - started)
        self.set_cost_model(model.cost_model, model.tuning)
        self._attach(model)
        self._heartbeat.start()
        self._thread.start()

    def want_model(self) -> Future[LoadedModel]:
        """The model, as soon as it is there; it is loaded once for all who want it.

        The future fails with `NoWorkersError` when loading fails for good.
        """
        with self._lock:
            self._is_wanted = True
            self._wake.set()
            return self._next_model

    def stop(self) -> None:
        """End the thread; whoever waits for a model is turned away."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._refuse(NotReadyError("the server is stopping"))
        if self._reload:
            self._reload.stop()
            self._model, self._reload = self._reload.model, None
        if self._model:
            self._pool.detach()
            close(self._model, self._memory)
            self._model = None

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._settings.tick_seconds)
            self._wake.clear()
            try:
                self._look_around()
            except Exception:
                logger.exception("the supervisor failed and goes on")

    def _look_around(self) -> None:
        self._pool.look_after_workers()
        status = self._pool.status()
        if self._reload is not None:
            if self._reload.has_ended:
                self._finish_reload(self._reload)
        elif self._model is None:
            if self._failure is None and (self._is_wanted or status.has_work):
                self._begin_reload()
        elif self._has_failed(self._model, status):
            self._replace_broken()
        elif self._is_idle(status):
            self._unload()
            logger.info("Unloaded the model after idle timeout")
        self._trim(status)
        self._heartbeat.beat(status, self._tuning, is_loaded=self._model is not None)

    def _has_failed(self, model: LoadedModel, status: PoolStatus) -> bool:
        """Whether the model itself is at fault, not the texts: a harmless text tells.

        Its failure is that of two passes: the workers try again what raises, and what is not
        finite is tried again here.
        """
        trial = self._trial
        if trial is None:
            if (
                status.failures_in_a_row >= FAILURE_LIMIT
                or status.non_finite_in_a_row >= NON_FINITE_LIMIT
            ):
                self._trial = self._try_harmless_text(model, is_last=False)
            return False
        if not trial.job.is_over:
            return False
        self._trial = None
        self._pool.forget(trial.number)
        error = None if trial.job.done.cancelled() else trial.job.done.exception()
        if isinstance(error, NonFiniteOutputError) and not trial.is_last:
            self._trial = self._try_harmless_text(model, is_last=True)
            return False
        return error is not None

    def _try_harmless_text(self, model: LoadedModel, *, is_last: bool) -> _Trial | None:
        job = canary_job(model.tokenizer, model.info.heads, self._clock)
        with contextlib.suppress(UnavailableError):  # the workers have ended
            return _Trial(self._pool.submit(job), job, is_last)
        return None

    def _replace_broken(self) -> None:
        now = self._clock()
        while self._breaks and self._breaks[0] < now - BREAK_WINDOW_SECONDS:
            self._breaks.popleft()
        if len(self._breaks) >= BREAK_LIMIT:
            minutes = BREAK_WINDOW_SECONDS / 60
            self._give_up(
                f"the engine kept failing after {BREAK_LIMIT} reloads within {minutes:g} minutes"
            )
            return
        logger.error("circuit_breaker_tripped: the engine fails on a harmless text, reloading")
        self._breaks.append(now)
        self._trouble = "the model failed on a harmless text and is being loaded again"
        self._unload()
        self._begin_reload()

    def _unload(self) -> None:
        model = self._model
        if model is None:
            return
        with self._lock:
            self._next_model = Future()
            self._is_wanted = False
            self._model = None
        self._pool.detach()
        close(model, self._memory)

    def _begin_reload(self) -> None:
        pause_seconds = self._settings.reload_pause_seconds
        self._reload = Reload(self._load_model, pause_seconds, self._clock, self._wake.set)
        self._reload.start()

    def _finish_reload(self, reload: Reload) -> None:
        if reload.model is None:
            self._give_up("the model could not be loaded again")
        else:
            self._learn_usual(reload.load_seconds)
            self._attach(reload.model)
            elapsed_ms = round((self._clock() - reload.started_at) * 1e3)
            logger.info("Reloaded the model", extra={"fields": {"elapsed_ms": elapsed_ms}})
        self._reload = None

    def _learn_usual(self, load_seconds: float) -> None:
        known = min(self._usual_load_seconds, load_seconds)
        self._usual_load_seconds = max(known, QUICK_LOAD_SECONDS)

    def _attach(self, model: LoadedModel) -> None:
        self._pool.attach(model)
        with self._lock:
            self._model = model
            self._trouble = None
            self._next_model.set_result(model)

    def _give_up(self, reason: str) -> None:
        logger.error("All embedding workers have been given up", extra={"fields": {"why": reason}})
        self._failure = reason
        self._pool.abort(NoWorkersError("no workers available"))
        self._refuse(NoWorkersError("no workers available"))

    def _refuse(self, error: UnavailableError) -> None:
        with self._lock, contextlib.suppress(InvalidStateError):
            self._next_model.set_exception(error)

    def _trim(self, status: PoolStatus) -> None:
        """Once after each spell of work."""
        since = status.idle_since
        if since is None or since == self._trimmed_after:
            return
        if self._clock() - since >= TRIM_AFTER_SECONDS:
            if self._model:
                self._model.rest()
            self._memory.trim()
            self._trimmed_after = since

    def _is_idle(self, status: PoolStatus) -> bool:
        timeout = self._settings.idle_timeout_seconds
        if not timeout or status.idle_since is None or self._is_probing():
            return False
        return self._clock() - status.idle_since >= timeout

    def _is_probing(self) -> bool:
        return self._tuning is not None and self._tuning.probe_status is ProbeStatus.RUNNING
