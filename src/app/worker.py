"""One worker of the pool, and what is to be seen of all."""

import threading

import attrs

from .jobs import Task
from .pace import Pace, Passed


@attrs.define(eq=False)
class Worker:
    """A thread and what it runs; once `is_retired`, nobody listens to it any more.

    Only the pool changes it, under its lock. `place` chooses the backend and is inherited by a
    replacement; `serial` is its own.
    """

    place: int
    serial: int
    thread: threading.Thread = attrs.field(init=False)
    task: Task | None = None
    started_at: float = 0.0
    suspect_seconds: float = 0.0
    hang_seconds: float = 0.0
    is_retired: bool = False

    def begin(self, task: Task, now: float, pace: Pace, least_hang_seconds: float) -> None:
        """Run `task` from now on."""
        self.task, self.started_at = task, now
        self.suspect_seconds = pace.suspect_seconds(task)
        self.hang_seconds = pace.hang_seconds(task, least_hang_seconds)
        for job in task.jobs:
            job.queue_wait_seconds = max(job.queue_wait_seconds, now - job.submitted_at)

    def is_suspect(self, now: float) -> bool:
        """Whether its chunk takes so much longer than expected that it may hang."""
        return self.task is not None and now - self.started_at > self.suspect_seconds

    def is_hung(self, now: float) -> bool:
        """Whether its chunk takes so long that nobody waits for it any more."""
        return self.task is not None and now - self.started_at > self.hang_seconds


@attrs.frozen
class Demand:
    """What waits, and how fast it is done; the speed is None where it is not known."""

    waiting_tokens: int
    tokens_per_second: float | None


@attrs.frozen
class PoolStatus:
    """A snapshot.

    `busy_workers`: run a chunk, or wait until others leave room for theirs; what may hang is not
    waited for.
    `suspect_workers`: busy ones whose chunk takes far longer than expected.
    `idle_since`: when the last request ended; None while there is work.
    """

    live_workers: int
    busy_workers: int
    suspect_workers: int
    replaced_workers: int
    waiting_texts: int
    waiting_tokens: int
    tokens_per_second: float | None
    failures_in_a_row: int
    non_finite_in_a_row: int
    idle_since: float | None
    has_work: bool
    passed: Passed
