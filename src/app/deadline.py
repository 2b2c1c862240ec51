"""How long a caller waits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ..domain.errors import DeadlineExceededError


@contextlib.asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """Cancel the block when so much time has passed; None never does.

    Raises:
        DeadlineExceededError: it was cancelled.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceededError(
            f"the request was not finished within {seconds:g} s; send fewer texts per request, or "
            "allow more time with x-request-timeout-ms"
        ) from None
