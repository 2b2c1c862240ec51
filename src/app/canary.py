"""A few tokens through the real path, as proof that the engine answers."""

import asyncio
from collections.abc import Awaitable, Callable

from ..domain.errors import InferenceError
from ..domain.ports import Clock, Tokenizer
from ..domain.types import Heads
from .jobs import Job
from .service import CanaryReport

CANARY_TEXT = "What is BGE M3?"
CANARY_TIMEOUT_SECONDS = 10.0
CANARY_INTERVAL_SECONDS = 5.0
"""Askers within this time share one answer, so that no prober costs much."""


def canary_job(tokenizer: Tokenizer, heads: Heads, clock: Clock) -> Job:
    """The smallest harmless piece of work; one head is enough to tell whether the model answers."""
    wanted = Heads.DENSE if Heads.DENSE in heads else heads
    return Job(tokenizer.encode([CANARY_TEXT]), wanted, clock(), is_canary=True)


class Canary:
    """Runs `work` when asked and reports on it; belongs to one event loop.

    `is_busy` tells whether all workers are at work, none of them for too long.
    """

    def __init__(
        self, work: Callable[[], Awaitable[None]], is_busy: Callable[[], bool], clock: Clock
    ) -> None:
        self._work = work
        self._is_busy = is_busy
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
        try:
            async with asyncio.timeout(CANARY_TIMEOUT_SECONDS):
                await self._work()
        except TimeoutError:
            if self._is_busy():
                return CanaryReport(is_healthy=True, reason="all workers are at work")
            reason = f"no answer within {CANARY_TIMEOUT_SECONDS:g} s"
            return CanaryReport(is_healthy=False, reason=reason)
        except InferenceError:
            return CanaryReport(is_healthy=False, reason="the engine failed on a harmless text")
        elapsed_ms = (self._clock() - self._started_at) * 1e3
        return CanaryReport(is_healthy=True, elapsed_ms=round(elapsed_ms, 3))
