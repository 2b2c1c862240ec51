"""Worker threads: each takes the next chunk, runs it, and hands results or failure back."""

import logging
import math
import threading

from ..domain.cost_model import CostModel
from ..domain.embedder import embed_chunk
from ..domain.errors import (
    InferenceError,
    NonFiniteOutputError,
    NotReadyError,
    UnavailableError,
)
from ..domain.ports import Clock, InferenceBackend, Telemetry
from ..domain.types import Embedding
from .jobs import Job, Task
from .loading import LoadedModel
from .work_queue import WorkQueue
from .worker import Demand, PoolStatus, Worker
from .workspace_room import Room, room_beside

logger = logging.getLogger(__name__)

REST_SECONDS = 0.5
"""After a worker fell between two passes none starts for so long: the next would fall likewise."""


class WorkerPool:
    """A fixed number of threads over one queue; every method may be called from any thread."""

    def __init__(
        self, workers: int, hang_seconds: float, telemetry: Telemetry, clock: Clock
    ) -> None:
        self._size = workers
        self._hang_seconds = hang_seconds
        self._telemetry = telemetry
        self._clock = clock
        self._changed = threading.Condition()
        self._queue = WorkQueue(clock)
        self._workers: list[Worker] = []
        self._started = 0
        self._replaced = 0
        self._model: LoadedModel | None = None
        self._total_workspace_bytes: int | None = None
        self._resting_until = -math.inf
        self._is_draining = False
        self._refusal: UnavailableError | None = None

    def attach(self, model: LoadedModel) -> None:
        """Let the workers run on `model`; start those that are missing."""
        with self._changed:
            self._model = model
            self._queue.set_padding(model.padding)
            self._queue.pace.assume(model.seconds_per_position)
            self._queue.trust_again()
            self._resting_until = -math.inf
            self._start_missing()
            self._changed.notify_all()

    def detach(self) -> None:
        """Take the model away: chunks that run go on, all others wait."""
        with self._changed:
            self._model = None

    def set_cost_model(
        self, cost_model: CostModel, total_workspace_bytes: int | None = None
    ) -> None:
        """From the next chunk on, this decides what fits; needs no lock.

        `total_workspace_bytes` is for all chunks that run at the same time: one that is larger than
        its share waits until the others leave room. None lets each start at once.
        """
        self._queue.set_cost_model(cost_model)
        self._total_workspace_bytes = total_workspace_bytes

    def submit(self, job: Job, deadline: float | None = None) -> int:
        """Queue a job; returns the number by which `forget` knows it.

        Raises:
            UnavailableError: the workers have ended.
        """
        with self._changed:
            if self._refusal:
                raise self._refusal
            number = self._queue.submit(job, deadline)
            self._changed.notify_all()
            return number

    def forget(self, number: int) -> None:
        """Drop a job that is over or abandoned; what is queued of it is gone at once."""
        with self._changed:
            had_parked = self._queue.has_parked
            self._queue.forget(number)
            if had_parked or not self._queue.has_jobs:
                self._changed.notify_all()

    def status(self) -> PoolStatus:
        """The present state, at once."""
        with self._changed:
            queue, live = self._queue, len(self._workers)
            now = self._clock()
            are_all_busy = queue.is_making_room(self._room())
            return PoolStatus(
                live_workers=live,
                busy_workers=live if are_all_busy else live - self._free_workers(),
                suspect_workers=sum(worker.is_suspect(now) for worker in self._workers),
                replaced_workers=self._replaced,
                waiting_texts=queue.waiting_texts,
                waiting_tokens=queue.waiting_tokens,
                tokens_per_second=self._tokens_per_second(),
                failures_in_a_row=queue.failures_in_a_row,
                non_finite_in_a_row=queue.non_finite_in_a_row,
                idle_since=None if queue.has_jobs else queue.last_job_ended_at,
                has_work=queue.has_jobs,
                passed=queue.pace.passed,
            )

    def demand(self) -> Demand:
        """What every request asks for: two figures of `status`, and quickly."""
        with self._changed:
            return Demand(self._queue.waiting_tokens, self._tokens_per_second())

    def look_after_workers(self) -> None:
        """Replace those whose chunk takes far too long, and those that are missing."""
        with self._changed:
            now = self._clock()
            for worker in [worker for worker in self._workers if worker.is_hung(now)]:
                seconds = round(now - worker.started_at, 3)
                logger.error(
                    "worker hangs and is replaced",
                    extra={"fields": {"worker": worker.place, "seconds": seconds}},
                )
                self._lose(worker, InferenceError(f"no answer within {worker.hang_seconds:.3g} s"))
            if self._model:
                self._start_missing()
            if self._queue.has_parked:  # its room may be held by what is suspect by now
                self._changed.notify_all()

    def drain(self) -> None:
        """Let the workers finish what is queued, then end."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()

    def abort(self, error: UnavailableError) -> None:
        """Answer every job, present or to come, with `error` and let the workers end."""
        with self._changed:
            self._is_draining, self._refusal = True, error
            self._queue.fail_all(error)
            for worker in self._workers:
                worker.is_retired = True
            self._workers.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until no worker is left that has not been given up, and none is to come."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._workers and (self._refusal or not self._queue.has_jobs)
            )

    def _tokens_per_second(self) -> float | None:
        pace, live = self._queue.pace.seconds_per_token, len(self._workers)
        return live / pace if pace and live else None

    def _free_workers(self) -> int:
        return sum(worker.task is None for worker in self._workers)

    def _room(self) -> Room:
        return room_beside(self._workers, self._total_workspace_bytes, self._clock())

    def _start_missing(self) -> None:
        if self._refusal or self._clock() < self._resting_until:
            return
        taken = {worker.place for worker in self._workers}
        for place in set(range(self._size)) - taken:
            worker = Worker(place, self._started)
            worker.thread = threading.Thread(
                target=self._work, args=(worker,), name=f"worker-{place}", daemon=True
            )
            worker.thread.start()
            self._started += 1
            self._workers.append(worker)

    def _work(self, worker: Worker) -> None:
        try:
            while self._run_next(worker):
                pass
        except BaseException:
            logger.exception("worker died and is replaced")
            with self._changed:
                if not worker.is_retired:
                    self._lose(worker, InferenceError("the worker died"))

    def _run_next(self, worker: Worker) -> bool:
        """Wait for a chunk and run it; False when the worker shall end."""
        taken = self._take(worker)
        if taken is None:
            return False
        task, backend = taken
        context = task.rows[0][0].context.copy()  # one context cannot be entered twice at once
        arguments = task.texts, task.heads, backend, self._telemetry, task.estimated_bytes
        try:
            outcomes = context.run(embed_chunk, *arguments)
        except Exception as error:  # noqa: BLE001  whatever it is, the texts get another chance
            self._fail(worker, task, error)
        else:
            self._finish(worker, task, outcomes)
        return True

    def _take(self, worker: Worker) -> tuple[Task, InferenceBackend] | None:
        """Wait for the next chunk; None when the worker shall end."""
        with self._changed:
            while not worker.is_retired:
                if self._model and (
                    task := self._queue.next_task(worker.serial, self._free_workers(), self._room())
                ):
                    return self._begin(worker, task), self._backend(worker, self._model)
                if self._is_draining and not self._queue.has_jobs:
                    self._workers.remove(worker)
                    self._refusal = NotReadyError("the server is stopping")
                    self._changed.notify_all()
                    return None
                self._changed.wait()
            return None

    def _begin(self, worker: Worker, task: Task) -> Task:
        worker.begin(task, self._clock(), self._queue.pace, self._hang_seconds)
        if self._queue.has_parked:  # kept from a worker that is now the only free one
            self._changed.notify_all()
        return task

    def _backend(self, worker: Worker, model: LoadedModel) -> InferenceBackend:
        return model.backends[worker.place % len(model.backends)]

    def _finish(
        self, worker: Worker, task: Task, outcomes: list[Embedding | NonFiniteOutputError]
    ) -> None:
        with self._changed:
            if not worker.is_retired:
                self._queue.succeeded(task, outcomes, self._clock() - worker.started_at)
                worker.task = None
                if self._queue.has_parked:
                    self._changed.notify_all()

    def _fail(self, worker: Worker, task: Task, error: Exception) -> None:
        logger.error(
            "a chunk failed",
            exc_info=error,
            extra={
                "fields": {
                    "worker": worker.place,
                    "texts": len(task.rows),
                    "max_chunk_seq": task.max_tokens,
                    "failures": task.failures + 1,
                }
            },
        )
        with self._changed:
            if not worker.is_retired:
                worker.task = None
                self._queue.failed(task, error, worker.serial)
                self._changed.notify_all()

    def _lose(self, worker: Worker, error: InferenceError) -> None:
        """Retire a worker, save its chunk, and put another one in its place."""
        task, worker.task, worker.is_retired = worker.task, None, True
        self._workers.remove(worker)
        self._replaced += 1
        if task:
            self._queue.failed(task, error, worker.serial)
        else:
            self._resting_until = self._clock() + REST_SECONDS
            self._queue.broke(error)
        self._start_missing()
        self._changed.notify_all()
