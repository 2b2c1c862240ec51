"""The thread that watches the workers, the model and the time."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError

import attrs

from ..domain.cost_model import CostModel
from ..domain.errors import NotReadyError, NoWorkersError, UnavailableError
from ..domain.ports import Clock
from .canary import canary_job
from .jobs import Job
from .loading import LoadedModel, ProcessMemory, close
from .pace import Passed
from .service import ProbeStatus, Tuning
from .worker import PoolStatus
from .workers import WorkerPool

logger = logging.getLogger(__name__)

FAILURE_LIMIT = 5
"""So many failed chunks in a row raise the question whether the model works at all."""

TRIM_AFTER_SECONDS = 1.0
"""After so long without work the allocator gives back what it keeps: freed by many threads, in
pieces of many sizes, it came to two thirds of a small process."""

RELOAD_LIMIT = 3
RELOAD_WINDOW_SECONDS = 600.0
"""A model that had to be loaded again so often within this time is given up."""


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
        self._trial: tuple[int, Job] | None = None
        self._reloads: deque[float] = deque()
        self._beat_at = clock()
        self._trimmed_after: float | None = None
        self._more_figures: list[Callable[[], Mapping[str, int]]] = []
        self._passed = Passed()
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

    def report_in_heartbeat(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Log these figures with every heartbeat, too."""
        self._more_figures.append(figures)

    def start(self) -> None:
        """Load the model and let the workers start. Blocks.

        Raises:
            ModelError: the model cannot be obtained, or fails its self-test.
        """
        model = self._load_model()
        self.set_cost_model(model.cost_model, model.tuning)
        self._attach(model)
        self._beat_at = self._clock()
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
        if self._model is None:
            if self._failure is None and (self._is_wanted or status.has_work):
                self._load_again()
        elif self._has_failed(status):
            self._reload()
        elif self._is_idle(status):
            self._unload()
            logger.info("Unloaded the model after idle timeout")
        self._trim(status)
        self._beat(status)

    def _has_failed(self, status: PoolStatus) -> bool:
        """Whether the model itself is at fault, not the texts: a harmless text tells."""
        if self._trial is None:
            if status.failures_in_a_row >= FAILURE_LIMIT and self._model:
                job = canary_job(self._model.tokenizer, self._model.info.heads, self._clock)
                self._trial = self._pool.submit(job), job
            return False
        number, job = self._trial
        if not job.is_over:
            return False
        self._trial = None
        self._pool.forget(number)
        return not job.done.cancelled() and job.done.exception() is not None

    def _reload(self) -> None:
        now = self._clock()
        while self._reloads and self._reloads[0] < now - RELOAD_WINDOW_SECONDS:
            self._reloads.popleft()
        if len(self._reloads) >= RELOAD_LIMIT:
            minutes = RELOAD_WINDOW_SECONDS / 60
            self._give_up(
                f"the engine kept failing after {RELOAD_LIMIT} reloads within {minutes:g} minutes"
            )
            return
        logger.error("circuit_breaker_tripped: the engine fails on a harmless text, reloading")
        self._reloads.append(now)
        self._trouble = "the model failed on a harmless text and is being loaded again"
        self._unload()
        self._load_again()

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

    def _load_again(self) -> None:
        started = self._clock()
        for attempt in range(RELOAD_LIMIT):
            if self._stopping.wait(attempt * self._settings.reload_pause_seconds):
                return
            try:
                model = self._load_model()
            except Exception:
                logger.exception("the model could not be loaded again")
                continue
            self._attach(model)
            elapsed_ms = round((self._clock() - started) * 1e3)
            logger.info("Reloaded the model", extra={"fields": {"elapsed_ms": elapsed_ms}})
            return
        self._give_up("the model could not be loaded again")

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

    def _beat(self, status: PoolStatus) -> None:
        now, interval = self._clock(), self._settings.heartbeat_seconds
        if not interval or now - self._beat_at < interval:
            return
        self._beat_at = now
        before, self._passed = self._passed, status.passed
        positions = self._passed.positions - before.positions
        tokens = self._passed.tokens - before.tokens
        resident = self._memory.resident_bytes()
        fields = {
            "rss_mb": None if resident is None else resident // 1024**2,
            "live_workers": status.live_workers,
            "loaded_workers": status.live_workers if self._model else 0,
            "busy_workers": status.busy_workers,
            "suspect_workers": status.suspect_workers,
            "replaced_workers": status.replaced_workers,
            "queue_depth": status.waiting_texts,
            "queue_tokens": status.waiting_tokens,
            "available_permits": status.live_workers - status.busy_workers,
            "probe_status": self._tuning.probe_status.value if self._tuning else None,
            "chunks": self._passed.chunks - before.chunks,
            "chunk_texts": self._passed.texts - before.texts,
            "chunk_tokens": tokens,
            "padding_pct": round(100 * (1 - tokens / positions), 1) if positions else 0.0,
            "busy_seconds": round(self._passed.seconds - before.seconds, 3),
        }
        for figures in self._more_figures:
            fields |= figures()
        logger.info("heartbeat", extra={"fields": fields})
