"""How fast chunks have run lately, and what follows from it."""

import math

import attrs

from ..domain.scheduling import EFFICIENT_POSITIONS
from .jobs import Task

MAX_CHUNK_SECONDS = 0.5
"""Longer chunks make short requests wait, and hardly raise the throughput of a busy engine."""

TOP_UP_SECONDS = 0.1
"""So long may short requests be held up by a long one that has had its share."""

_WEIGHT = 0.2
_SUSPICION = 3
_LEAST_SUSPECT_SECONDS = 1.0
"""A chunk that takes so many times as long as expected, and so long at all, may hang. One of
`MAX_CHUNK_SECONDS` is suspect within two seconds."""

_PATIENCE = 20
"""A chunk that takes so many times as long as expected hangs; most of it is room for a machine
that others keep busy."""

_ATTENTION_TOKENS = 6 * 1024
"""A text of so many tokens takes twice as long per token as a short one. Per token and layer the
weights cost 24 h² operations and attention to n tokens 4 h n; BGE-M3's h is 1024."""


@attrs.frozen
class Passed:
    """Totals over all chunks that succeeded."""

    chunks: int = 0
    texts: int = 0
    tokens: int = 0
    positions: int = 0
    seconds: float = 0.0


@attrs.define
class Pace:
    """Moving averages over successful chunks; not safe to share between threads."""

    seconds_per_position: float | None = attrs.field(default=None, init=False)
    seconds_per_token: float | None = attrs.field(default=None, init=False)
    passed: Passed = attrs.field(factory=Passed, init=False)

    def assume(self, seconds_per_position: float | None) -> None:
        """Expect this until a chunk has succeeded; None, or too little to measure, is nothing."""
        if self.seconds_per_token is None:
            self.seconds_per_position = seconds_per_position or None

    def record(self, task: Task, seconds: float) -> None:
        """Take one more chunk into account; the first one replaces what was assumed."""
        seconds = max(seconds, 1e-6)  # clocks have a resolution
        is_first = self.seconds_per_token is None
        average = None if is_first else self.seconds_per_position
        self.seconds_per_position = _moved(average, seconds / task.positions)
        self.seconds_per_token = _moved(self.seconds_per_token, seconds / task.tokens)
        self.passed = Passed(
            chunks=self.passed.chunks + 1,
            texts=self.passed.texts + len(task.rows),
            tokens=self.passed.tokens + task.tokens,
            positions=self.passed.positions + task.positions,
            seconds=self.passed.seconds + seconds,
        )

    def position_limit(self, waiting_tokens: int, free_workers: int) -> int | None:
        """Positions of the next chunk, so that it ends soon and leaves work for free workers."""
        limits = [] if free_workers <= 1 else [-(-waiting_tokens // free_workers)]
        if self.seconds_per_position is not None:
            limits.append(int(MAX_CHUNK_SECONDS / self.seconds_per_position))
        return max(min(limits), EFFICIENT_POSITIONS) if limits else None

    def top_up_positions(self) -> int:
        """Up to so many, a chunk may hold texts that are not due."""
        if self.seconds_per_position is None:
            return EFFICIENT_POSITIONS
        return max(int(TOP_UP_SECONDS / self.seconds_per_position), EFFICIENT_POSITIONS)

    def suspect_seconds(self, task: Task) -> float:
        """From then on a chunk that has not ended may hang; never, if nothing is known."""
        if self.seconds_per_position is None:
            return math.inf
        return max(_LEAST_SUSPECT_SECONDS, _SUSPICION * self._expected_seconds(task))

    def hang_seconds(self, task: Task, minimum: float) -> float:
        """From then on a chunk that has not ended is taken for hanging."""
        return max(minimum, _PATIENCE * self._expected_seconds(task))

    def _expected_seconds(self, task: Task) -> float:
        attention = 1 + task.max_tokens / _ATTENTION_TOKENS
        return attention * task.positions * (self.seconds_per_position or 0.0)


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
