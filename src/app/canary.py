"""A few tokens through the real path, as proof that the engine answers."""

import asyncio
from collections.abc import Callable, Coroutine

from ..domain.errors import InferenceError
from ..domain.ports import Clock, Tokenizer
from ..domain.types import Heads
from .jobs import Job
from .service import CanaryReport
from .worker import PoolStatus

CANARY_TEXT = "What is BGE M3?"
CANARY_TIMEOUT_SECONDS = 10.0
CANARY_LOOK_SECONDS = 0.25
"""So often the workers are looked at while the canary waits."""

CANARY_INTERVAL_SECONDS = 5.0
"""Askers within this time share one answer, so that no prober costs much."""


def canary_job(tokenizer: Tokenizer, heads: Heads, clock: Clock) -> Job:
    """The smallest harmless piece of work; one head is enough to tell whether the model answers."""
    wanted = Heads.DENSE if Heads.DENSE in heads else heads
    return Job(tokenizer.encode([CANARY_TEXT]), wanted, clock(), is_canary=True)


class Canary:
    """Runs `work` when asked and reports on it, and on `workers`; belongs to one event loop."""

    def __init__(
        self,
        work: Callable[[], Coroutine[None, None, None]],
        workers: Callable[[], PoolStatus],
        clock: Clock,
    ) -> None:
        self._work = work
        self._workers = workers
        self._clock = clock
        self._running: asyncio.Task[CanaryReport] | None = None
        self._started_at = 0.0

    async def report(self) -> CanaryReport:
        """The last report if it is recent, else a new one."""
        is_stale = self._clock() - self._started_at >= CANARY_INTERVAL_SECONDS
        if self._running is None or (self._running.done() and is_stale):
            self._started_at = self._clock()
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)  # whoever leaves does not end it for others

    async def _run(self) -> CanaryReport:
        work = asyncio.create_task(self._work())
        try:
            while not work.done():
                if report := self._verdict():
                    return report
                await asyncio.wait({work}, timeout=CANARY_LOOK_SECONDS)
            work.result()
        except InferenceError:
            return CanaryReport(is_healthy=False, reason="the engine failed on a harmless text")
        finally:
            work.cancel()
        return CanaryReport(is_healthy=True, elapsed_ms=round(self._elapsed_seconds() * 1e3, 3))

    def _verdict(self) -> CanaryReport | None:
        """What can be said while the canary waits."""
        pool = self._workers()
        if 0 < pool.live_workers == pool.suspect_workers:
            reason = "all workers take far longer than expected"
            return CanaryReport(is_healthy=False, reason=reason)
        if self._elapsed_seconds() < CANARY_TIMEOUT_SECONDS:
            return None
        if 0 < pool.live_workers == pool.busy_workers:
            return CanaryReport(is_healthy=True, reason="all workers are at work")
        reason = f"no answer within {CANARY_TIMEOUT_SECONDS:g} s"
        return CanaryReport(is_healthy=False, reason=reason)

    def _elapsed_seconds(self) -> float:
        return self._clock() - self._started_at
