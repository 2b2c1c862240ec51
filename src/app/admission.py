"""How much work may wait, and when to come back if it is too much."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import attrs

from ..domain.errors import QueueFullError, RequestTooLargeError
from ..domain.ports import Clock
from ..domain.types import Heads
from .service import ModelInfo

MAX_RETRY_AFTER_SECONDS = 60.0
"""Clients ignore longer ones: https://github.com/openai/openai-python `_calculate_retry_timeout`"""

MIN_RETRY_AFTER_SECONDS = 0.1
"""Sooner than that a client only costs another refusal."""

_JITTER = 0.2
"""Clients come back up to so much later than told otherwise, or those refused together would meet
again; never sooner, when there cannot be room."""

_UNMEASURED_RETRY_SECONDS = 1.0
_CHARACTERS_PER_TOKEN = 3
_ID_BYTES = 8
_SPARSE_BYTES_PER_TOKEN = 12
_FLOAT_BYTES = 4


def size_bytes(texts: Sequence[str], heads: Heads, model: ModelInfo) -> int:
    """An upper bound of what a request holds in memory: texts, ids and results."""
    total = 0
    for text in texts:
        tokens = min(len(text) + 2, model.max_tokens)
        total += sys.getsizeof(text) + _ID_BYTES * tokens
        if Heads.DENSE in heads:
            total += _FLOAT_BYTES * model.dimensions
        if Heads.SPARSE in heads:
            total += _SPARSE_BYTES_PER_TOKEN * tokens
        if Heads.COLBERT in heads:
            total += _FLOAT_BYTES * model.dimensions * tokens
    return total


def guessed_tokens(texts: Sequence[str], model: ModelInfo) -> int:
    """About how many tokens texts have that were not tokenised; for refusals, nothing else."""
    return sum(min(2 + len(text) // _CHARACTERS_PER_TOKEN, model.max_tokens) for text in texts)


@attrs.define
class Admission:
    """Bounds of the queue; not safe to share between threads.

    Who is refused is told to come back after all who were refused before, as if there were a
    second queue outside. Its length in tokens is kept here: it moves as fast as the real one.

    `chance`: a number from 0 to 1, another one at each call.
    `held_bytes`: what all admitted requests hold, and bodies that are not decoded yet.
    `arriving_tokens`: a guess for those whose texts are not tokenised yet.
    """

    limit_tokens: int
    limit_bytes: int
    clock: Clock
    chance: Callable[[], float]
    held_bytes: int = attrs.field(default=0, init=False)
    arriving_tokens: int = attrs.field(default=0, init=False)
    _refused_tokens: float = attrs.field(default=0.0, init=False)
    _refused_at: float = attrs.field(default=0.0, init=False)

    @contextlib.contextmanager
    def hold(
        self,
        needed_bytes: int,
        about_tokens: int,
        waiting_tokens: int,
        tokens_per_second: float | None,
    ) -> Iterator[None]:
        """Count a request's bytes while it is under way; `about_tokens` may be a guess.

        Raises:
            RequestTooLargeError: it can never fit.
            QueueFullError: it does not fit now.
        """
        if needed_bytes > self.limit_bytes:
            raise _too_large(needed_bytes, self.limit_bytes, "bytes")
        excess_bytes = self.held_bytes + needed_bytes - self.limit_bytes
        if excess_bytes > 0:
            taken = (
                f"{self.held_bytes} of {self.limit_bytes} bytes are taken, and this request needs "
                f"{needed_bytes}"
            )
            taken_tokens = waiting_tokens + self.arriving_tokens
            excess = taken_tokens * excess_bytes // self.held_bytes
            raise self._full(taken, excess, about_tokens, tokens_per_second)
        self.held_bytes += needed_bytes
        try:
            yield
        finally:
            self.held_bytes -= needed_bytes

    @contextlib.contextmanager
    def receiving(
        self, waiting_tokens: int, tokens_per_second: float | None
    ) -> Iterator[Callable[[int], None]]:
        """Count a body while it is received and decoded: the block is given what counts more of it.

        That raises `QueueFullError` when it does not fit. A body that has all room to itself always
        does: how long one may be is not decided here.
        """
        body_bytes = 0

        def grow(more_bytes: int) -> None:
            nonlocal body_bytes
            excess_bytes = self.held_bytes + more_bytes - self.limit_bytes
            if excess_bytes > 0 and self.held_bytes > body_bytes:
                taken_tokens = waiting_tokens + self.arriving_tokens
                excess = taken_tokens * excess_bytes // self.held_bytes
                speed = tokens_per_second if taken_tokens else None  # that of the clients, then
                about_tokens = more_bytes // _CHARACTERS_PER_TOKEN
                taken = (
                    f"{self.held_bytes} of {self.limit_bytes} bytes are taken, and this body needs "
                    f"{more_bytes} more"
                )
                raise self._full(taken, excess, about_tokens, speed)
            self.held_bytes += more_bytes
            body_bytes += more_bytes

        try:
            yield grow
        finally:
            self.held_bytes -= body_bytes

    @contextlib.contextmanager
    def arriving(
        self, about_tokens: int, waiting_tokens: int, tokens_per_second: float | None
    ) -> Iterator[None]:
        """Count a request's tokens by guess while its texts are not tokenised yet.

        Otherwise a crowd that comes at once would be tokenised only to be refused.

        Raises:
            QueueFullError: the queue is full already.
        """
        excess = waiting_tokens + self.arriving_tokens + about_tokens - self.limit_tokens
        if excess >= about_tokens:
            taken = (
                f"{waiting_tokens} of {self.limit_tokens} tokens are taken, about "
                f"{self.arriving_tokens} more are arriving, and this request has about "
                f"{about_tokens}"
            )
            raise self._full(taken, excess, about_tokens, tokens_per_second)
        self.arriving_tokens += about_tokens
        try:
            yield
        finally:
            self.arriving_tokens -= about_tokens

    def require_tokens(
        self, needed_tokens: int, waiting_tokens: int, tokens_per_second: float | None
    ) -> None:
        """Raise unless so many tokens may join those that wait.

        Raises:
            RequestTooLargeError: they can never fit.
            QueueFullError: they do not fit now.
        """
        if needed_tokens > self.limit_tokens:
            raise _too_large(needed_tokens, self.limit_tokens, "tokens")
        excess = waiting_tokens + needed_tokens - self.limit_tokens
        if excess > 0:
            taken = (
                f"{waiting_tokens} of {self.limit_tokens} tokens are taken, and this request has "
                f"{needed_tokens}"
            )
            raise self._full(taken, excess, needed_tokens, tokens_per_second)

    def _full(
        self,
        taken: str,
        excess_tokens: float,
        needed_tokens: int,
        tokens_per_second: float | None,
    ) -> QueueFullError:
        seconds = _UNMEASURED_RETRY_SECONDS
        if tokens_per_second:
            refused_tokens = self._still_refused(tokens_per_second)
            seconds = (excess_tokens + refused_tokens) / tokens_per_second
            # Nobody is told to stay away for longer.
            most_tokens = MAX_RETRY_AFTER_SECONDS * tokens_per_second
            self._refused_tokens = min(refused_tokens + needed_tokens, most_tokens)
        jitter = 1 + _JITTER * self.chance()
        most_seconds = MAX_RETRY_AFTER_SECONDS / (1 + _JITTER)
        seconds = jitter * min(max(seconds, MIN_RETRY_AFTER_SECONDS), most_seconds)
        return QueueFullError(
            f"the queue is full: {taken}; retry in {seconds:.3f} s",
            retry_after_seconds=seconds,
        )

    def _still_refused(self, tokens_per_second: float) -> float:
        now = self.clock()
        elapsed, self._refused_at = now - self._refused_at, now
        return max(self._refused_tokens - elapsed * tokens_per_second, 0.0)


def _too_large(needed: int, limit: int, unit: str) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the request needs {needed} {unit}, and the whole queue holds {limit}; "
        "send fewer texts per request",
        param="input",
    )
