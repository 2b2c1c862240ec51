"""A crowd of requests is taken in turns, so that whoever comes in between is not held up by it."""

import asyncio
from collections import deque

import attrs

STARTS_PER_TURN = 8
"""Requests begun in one turn of the event loop. Each takes about half a millisecond before it waits
for something, and a probe waits for one turn."""


@attrs.define
class Turns:
    """Lets `STARTS_PER_TURN` callers go on in one turn of the event loop, in their order."""

    _left: int = attrs.field(default=STARTS_PER_TURN, init=False)
    _waiting: deque[asyncio.Future[None]] = attrs.field(factory=deque, init=False)

    async def wait(self) -> None:
        """Until it is the caller's turn, which is at once where there is no crowd."""
        loop = asyncio.get_running_loop()
        if self._left == STARTS_PER_TURN:
            loop.call_soon(self._next_turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._left = STARTS_PER_TURN
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                self._left -= 1
        if self._left < STARTS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._next_turn)
