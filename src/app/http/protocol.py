"""HTTP/1.1 below the application: what is no whole request still gets this project's envelope."""

import asyncio
import uuid
from http import HTTPStatus
from typing import Any, cast

from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from .errors import STOPPING, Failure, raw_answer
from .request_id import request_id

READ_TIMEOUT_SECONDS = 30.0

LAST_READ_SECONDS = 0.5
"""When the server stops accepting, so long may a request take that is under way, be it that its
connection has only just been made."""


class EnvelopeProtocol(HttpToolsProtocol):
    """uvicorn's parser; a request that cannot be parsed, or does not end, is refused in JSON.

    `read_timeout_seconds`: a client that has sent part of a request and then nothing for so long
    gets a 408; one that has sent nothing at all is disconnected.
    """

    read_timeout_seconds = READ_TIMEOUT_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  uvicorn's own
        super().__init__(*args, **kwargs)
        self._is_reading = False
        self._heard_at = 0.0
        self._silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Expect a request from now on."""
        super().connection_made(transport)
        self._listen()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing will come any more."""
        self._stop_listening()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; the time begins anew with every piece of a request."""
        super().data_received(data)
        if self._is_reading and not self.transport.is_closing():
            self._listen()
        else:
            self._stop_listening()

    def on_message_begin(self) -> None:
        """The first bytes of a request."""
        super().on_message_begin()
        self._is_reading = True

    def on_message_complete(self) -> None:
        """The last ones."""
        super().on_message_complete()
        self._is_reading = False

    def end_with_answer(self) -> None:
        """Let the answer that is under way be the last one on this connection."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None:
            cycle.keep_alive = False

    def shutdown(self) -> None:
        """Close the connection after the answer; what has not come soon will not be read."""
        if self.cycle is not None:
            super().shutdown()
        self.loop.call_later(LAST_READ_SECONDS, self._end_reading)

    def send_400_response(self, msg: str) -> None:
        """Answer and close: after bytes like these nothing on the connection can be trusted."""
        self._refuse(Failure(HTTPStatus.BAD_REQUEST, "invalid_request_error", msg))

    def _listen(self) -> None:
        self._heard_at = self.loop.time()
        if self._silence is None:
            self._silence = self.loop.call_later(self.read_timeout_seconds, self._miss)

    def _stop_listening(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _miss(self) -> None:
        """The time is over, unless something came meanwhile or the server itself is not ready."""
        self._silence = None
        remaining = self._heard_at + self.read_timeout_seconds - self.loop.time()
        if remaining > 0 or self._owes_answer():
            wait_seconds = remaining if remaining > 0 else self.read_timeout_seconds
            self._silence = self.loop.call_later(wait_seconds, self._miss)
        elif self._is_reading:
            seconds = f"{self.read_timeout_seconds:g} s"
            message = f"the rest of the request did not come within {seconds}; send it again"
            self._refuse(Failure(HTTPStatus.REQUEST_TIMEOUT, "timeout_error", message))
        else:
            self.transport.close()

    def _current(self) -> RequestResponseCycle | None:
        """The request that is being read, from the end of its headers on."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle if cycle is not None and cycle.scope is self.scope else None

    def _owes_answer(self) -> bool:
        """Whether an earlier request on this connection waits for the server."""
        cycle: RequestResponseCycle | None = self.cycle
        is_earlier = cycle is not None and cycle is not self._current()
        return bool(self.pipeline) or (is_earlier and not self.cycle.response_complete)

    def _end_reading(self) -> None:
        """Half a request gets a 503; a client that has never asked gets nothing."""
        if self._is_reading and not self._owes_answer():
            self._refuse(STOPPING)
        elif self.cycle is None:
            self.transport.close()

    def _refuse(self, failure: Failure) -> None:
        """Answer, if nothing was answered yet, and close; the application sees its client leave."""
        if self.transport.is_closing():
            return
        cycle = self._current()
        if cycle is None or not cycle.response_started:
            sent_id = request_id(cast("Scope", self.scope)) if self._is_reading else None
            headers, body = raw_answer(failure, sent_id or str(uuid.uuid4()))
            lines = [STATUS_LINE[failure.status], *(b"%s: %s\r\n" % pair for pair in headers)]
            self.transport.write(b"".join([*lines, b"\r\n", body]))
        self.transport.close()


def envelope_protocol(read_timeout_seconds: float) -> type[EnvelopeProtocol]:
    """The protocol with this time; uvicorn makes its instances itself."""
    return type(
        "EnvelopeProtocol", (EnvelopeProtocol,), {"read_timeout_seconds": read_timeout_seconds}
    )
