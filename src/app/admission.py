"""How much work may wait, and when to come back if it is too much."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

import attrs

from ..domain.errors import QueueFullError, RequestTooLargeError
from ..domain.types import Heads
from .service import ModelInfo

MAX_RETRY_AFTER_SECONDS = 60.0
"""Clients ignore longer ones: https://github.com/openai/openai-python `_calculate_retry_timeout`"""

_UNMEASURED_RETRY_SECONDS = 1.0
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


@attrs.define
class Admission:
    """Bounds of the queue; not safe to share between threads.

    `held_bytes`: what all admitted requests hold.
    """

    limit_tokens: int
    limit_bytes: int
    held_bytes: int = attrs.field(default=0, init=False)

    @contextlib.contextmanager
    def hold(
        self, needed_bytes: int, waiting_tokens: int, tokens_per_second: float | None
    ) -> Iterator[None]:
        """Count a request's bytes while it is under way.

        Raises:
            RequestTooLargeError: it can never fit.
            QueueFullError: it does not fit now, or the queue is full already.
        """
        if needed_bytes > self.limit_bytes:
            raise _too_large(needed_bytes, self.limit_bytes, "bytes")
        self._require_room(waiting_tokens, 1, tokens_per_second)
        excess_bytes = self.held_bytes + needed_bytes - self.limit_bytes
        if excess_bytes > 0:
            excess_tokens = waiting_tokens * excess_bytes / self.held_bytes
            raise _full(
                self.held_bytes, self.limit_bytes, "bytes", excess_tokens, tokens_per_second
            )
        self.held_bytes += needed_bytes
        try:
            yield
        finally:
            self.held_bytes -= needed_bytes

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
        self._require_room(waiting_tokens, needed_tokens, tokens_per_second)

    def _require_room(
        self, waiting_tokens: int, needed_tokens: int, tokens_per_second: float | None
    ) -> None:
        excess = waiting_tokens + needed_tokens - self.limit_tokens
        if excess > 0:
            raise _full(waiting_tokens, self.limit_tokens, "tokens", excess, tokens_per_second)


def _too_large(needed: int, limit: int, unit: str) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the request needs {needed} {unit}, and the whole queue holds {limit}; "
        "send fewer texts per request",
        param="input",
    )


def _full(
    held: int, limit: int, unit: str, excess_tokens: float, tokens_per_second: float | None
) -> QueueFullError:
    seconds = excess_tokens / tokens_per_second if tokens_per_second else _UNMEASURED_RETRY_SECONDS
    seconds = min(max(seconds, 0.001), MAX_RETRY_AFTER_SECONDS)
    return QueueFullError(
        f"the queue is full: {held} of {limit} {unit} are taken; retry in {seconds:.3f} s",
        retry_after_seconds=seconds,
    )
