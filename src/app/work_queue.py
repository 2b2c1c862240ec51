"""What there is to run: waiting jobs, chunks to try again, and what past chunks have taught."""

from collections.abc import Sequence

import attrs

from ..domain.cost_model import CostModel
from ..domain.errors import BgeM3Error, InferenceError, NonFiniteOutputError, OutOfMemoryError
from ..domain.padding import GPU_PADDING, PaddingRule
from ..domain.ports import Clock
from ..domain.scheduling import Scheduler
from ..domain.types import Embedding
from .jobs import Job, Task, after_failure, blame
from .pace import Pace
from .workspace_room import Room

MAX_BUDGET_HALVINGS = 4
"""Out of memory lowers the budget to a sixteenth at most: beyond that the cause lies elsewhere."""

_CANARY_GROUP = "canary"


class WorkQueue:
    """Jobs in, tasks out, outcomes back; not safe to share between threads by itself.

    `failures_in_a_row`: chunks that failed since the last one that did not.
    `non_finite_in_a_row`: texts without a finite result since the last one with it.
    `last_job_ended_at`: when the last job other than a canary was forgotten.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cost_model = CostModel.conservative()
        self._padding = GPU_PADDING
        self._halvings = 0
        # Chunks that wait apart: to be tried again, but not by the worker that failed; or for room.
        self._parked: list[tuple[Task, int | None]] = []
        self._jobs: dict[int, Job] = {}
        self.scheduler = Scheduler(clock)
        self.pace = Pace()
        self.failures_in_a_row = 0
        self.non_finite_in_a_row = 0
        self.last_job_ended_at = clock()

    @property
    def has_jobs(self) -> bool:
        """Somebody waits for an answer, or did until a moment ago."""
        return bool(self._jobs)

    @property
    def has_parked(self) -> bool:
        """Chunks wait to be tried again, or for room."""
        return bool(self._parked)

    @property
    def waiting_texts(self) -> int:
        """Texts that nobody has taken yet, or that wait for room."""
        return self.scheduler.waiting_texts + sum(len(task.rows) for task in self._waiting_for_room)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of these texts."""
        return self.scheduler.waiting_tokens + sum(task.tokens for task in self._waiting_for_room)

    @property
    def _waiting_for_room(self) -> list[Task]:
        return [task for task, failed_on in self._parked if failed_on is None]

    def is_making_room(self, room: Room) -> bool:
        """A chunk waits until others have ended; meanwhile none begins but a canary."""
        return any(room.is_to_come_for(task) for task, _ in self._parked)

    def set_cost_model(self, cost_model: CostModel) -> None:
        """From the next chunk on, this decides what fits; earlier out-of-memory is forgotten."""
        self._cost_model, self._halvings = cost_model, 0

    def set_padding(self, padding: PaddingRule) -> None:
        """From the next chunk on, this decides which lengths share one."""
        self._padding = padding

    def trust_again(self) -> None:
        """A new model is not to blame for what the old one did."""
        self.failures_in_a_row = self.non_finite_in_a_row = 0
        self.last_job_ended_at = self._clock()

    def submit(self, job: Job, deadline: float | None) -> int:
        """Queue a job; returns the number by which `forget` knows it."""
        number = self.scheduler.submit(
            [len(text) for text in job.texts],
            group=_CANARY_GROUP if job.is_canary else job.heads,
            deadline=deadline,
            urgent=job.is_canary,
        )
        self._jobs[number] = job
        return number

    def forget(self, number: int) -> None:
        """Drop a job that is over or abandoned; what is queued of it is gone at once."""
        self.scheduler.cancel(number)
        job = self._jobs.pop(number)
        job.done.cancel()
        self._drop_unwanted()
        if not job.is_canary:
            self.last_job_ended_at = self._clock()

    def fail_all(self, error: BgeM3Error) -> None:
        """Answer every job with `error`."""
        for number, job in self._jobs.items():
            self.scheduler.cancel(number)
            job.fail(error)
        self._drop_unwanted()

    def broke(self, error: InferenceError) -> None:
        """A worker fell between two passes: whatever waits might make the next one fall, too."""
        self.failures_in_a_row += 1
        self.fail_all(error)

    def next_task(self, worker: int, free_workers: int, room: Room) -> Task | None:
        """What to run next, without texts that nobody waits for; None where there is nothing.

        A chunk that failed on `worker` is kept for another one, as long as one is free. One that
        finds no room waits for it, and all others but canaries wait with it, or it would never get
        any; unless the room is held by what may hang: then all that fits goes on beside it.
        """
        self._drop_unwanted()
        if task := self._next_parked(worker, free_workers, room):
            return task
        while not self.is_making_room(room) or self.scheduler.has_urgent:
            task = self._next_chunk(free_workers, room)
            if task is None:
                return None
            if not (wanted := task.without_finished_jobs()):
                continue
            if room.is_for(wanted):
                return wanted
            self._park(wanted, None)
        return None

    def succeeded(
        self, task: Task, outcomes: Sequence[Embedding | NonFiniteOutputError], seconds: float
    ) -> None:
        """Hand the results of a pass to their jobs."""
        self.failures_in_a_row = 0
        self.pace.record(task, seconds)
        if any(isinstance(outcome, Embedding) for outcome in outcomes):
            self.non_finite_in_a_row = 0
        else:
            self.non_finite_in_a_row += len(outcomes)
        for job in task.jobs:
            job.chunks += 1
            job.max_chunk_tokens = max(job.max_chunk_tokens, task.max_tokens)
            job.inference_seconds += seconds
        for (job, index), outcome in zip(task.rows, outcomes, strict=True):
            if isinstance(outcome, Embedding):
                job.results[index] = outcome
            else:
                place = job.input_of(index)
                job.fail(NonFiniteOutputError(f"input[{place}]: {outcome}", index=place))
        for job in task.jobs:
            job.finish_if_complete()

    def failed(self, task: Task, error: Exception, worker: int) -> None:
        """Give the texts of a failed pass another chance, or the guilty one its error."""
        is_memory = isinstance(error, OutOfMemoryError | MemoryError)
        if not is_memory:
            self.failures_in_a_row += 1
        elif self._halvings < MAX_BUDGET_HALVINGS:
            self._halvings += 1
        again = after_failure(task, is_out_of_memory=is_memory)
        if not again:
            ((job, _),) = task.rows
            job.fail(blame(task, error))
        for part in again:
            self._park(part, worker)

    def _park(self, task: Task, failed_on: int | None) -> None:
        place = 0 if task.is_canary else len(self._parked)
        self._parked.insert(place, (task, failed_on))

    def _drop_unwanted(self) -> None:
        self._parked = [
            (wanted, failed_on)
            for task, failed_on in self._parked
            if (wanted := task.without_finished_jobs())
        ]

    def _next_parked(self, worker: int, free_workers: int, room: Room) -> Task | None:
        for position, (task, failed_on) in enumerate(self._parked):
            if room.is_to_come_for(task):
                return None
            if room.is_for(task) and (failed_on != worker or free_workers == 1):
                del self._parked[position]
                return task
        return None

    def _next_chunk(self, free_workers: int, room: Room) -> Task | None:
        ceiling_bytes = self._cost_model.max_workspace_bytes >> self._halvings
        # No more than there is room for, as long as one text fits.
        ceiling_bytes = int(min(ceiling_bytes, room.free_bytes))
        cost_model = attrs.evolve(self._cost_model, max_workspace_bytes=max(ceiling_bytes, 0))
        limit = self.pace.position_limit(self.scheduler.waiting_tokens, free_workers)
        chunk = self.scheduler.take(cost_model, limit, self.pace.top_up_positions(), self._padding)
        if chunk is None:
            return None
        rows = tuple((self._jobs[text.request], text.index) for text in chunk.texts)
        estimate = cost_model.chunk_cost_bytes(len(chunk), chunk.max_tokens)
        return Task(rows, rows[0][0].heads, estimate)
