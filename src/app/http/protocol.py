"""HTTP/1.1 below the application: what is no whole request still gets this project's envelope."""

import asyncio
import re
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from litestar.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from .errors import STOPPING, Failure, raw_answer
from .request_id import request_id

READ_TIMEOUT_SECONDS = 30.0

LAST_READ_SECONDS = 0.5
"""When the server stops accepting, so long may a request take that is under way or about to come,
on a connection that has only just been made or that was kept."""

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. The same goes for whatever else of a request is not its body: an
extension of a chunk, the trailers after the last one."""

PIECE_BYTES = 4096
"""So much is parsed at a time: what follows a request in the same piece, up to 150 of the shortest
requests, is taken in before its answer, and a head may be longer than allowed by two pieces."""

_UPGRADE = re.compile(rb"^upgrade(?=:)", re.IGNORECASE | re.MULTILINE)

TOO_MUCH_HEAD = Failure(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "invalid_request_error",
    f"request line and headers exceed {MAX_HEAD_BYTES} bytes, or as much came before the next "
    "piece of the body; send fewer or shorter headers",
)


class EnvelopeProtocol(HttpToolsProtocol):
    """uvicorn's parser; a request that cannot be parsed, or does not end, is refused in JSON.

    Of a client that does not wait for its answers no more is read than is about to be answered.

    `read_timeout_seconds`: a client that has sent part of a request and then nothing for so long
    gets a 408; one that has sent nothing at all is disconnected.
    """

    read_timeout_seconds = READ_TIMEOUT_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  uvicorn's own
        super().__init__(*args, **kwargs)
        self._is_reading = self._is_in_head = False
        self._unparsed = memoryview(b"")
        self._bytes_without_body = 0
        self._heard_at = 0.0
        self._silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Expect a request from now on."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._is_ahead)
        self._listen()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing will come any more."""
        self._stop_listening()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; the time begins anew with every piece of a request."""
        self._unparsed = memoryview(self._unparsed.tobytes() + data if self._unparsed else data)
        self._parse()

    def on_message_begin(self) -> None:
        """The first bytes of a request."""
        super().on_message_begin()
        self._is_reading = self._is_in_head = True
        self._bytes_without_body = -PIECE_BYTES  # of which the request may have little

    def on_header(self, name: bytes, value: bytes) -> None:
        """White space around a value is not part of it (RFC 9110, 5.5)."""
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        """The body follows."""
        super().on_headers_complete()
        self._is_in_head = False

    def on_body(self, body: bytes) -> None:
        """A piece of a body, whose length the application bounds."""
        super().on_body(body)
        self._bytes_without_body = -PIECE_BYTES

    def on_message_complete(self) -> None:
        """The last ones."""
        super().on_message_complete()
        self._is_reading = False

    def on_response_complete(self) -> None:
        """Begin with the next request, and go on reading when there is none that waits."""
        super().on_response_complete()
        self._parse()
        self.flow.resume_reading()

    def end_with_answer(self) -> None:
        """Let the answer that is under way be the last one on this connection."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None:
            cycle.keep_alive = False

    def shutdown(self) -> None:
        """Close the connection after the answer; what has not come soon will not be read."""
        self.end_with_answer()
        self.loop.call_later(LAST_READ_SECONDS, self._end_reading)

    def send_400_response(self, msg: str) -> None:
        """Answer and close: after bytes like these nothing on the connection can be trusted."""
        self._refuse(Failure(HTTPStatus.BAD_REQUEST, "invalid_request_error", msg))

    def _parse(self) -> None:
        """Take in what has come, as far as it is not ahead of an answer."""
        while self._unparsed and not self._owes_answer() and not self.transport.is_closing():
            piece, self._unparsed = self._unparsed[:PIECE_BYTES], self._unparsed[PIECE_BYTES:]
            data = piece.tobytes()
            is_body = self._is_reading and not self._is_in_head
            super().data_received(data if is_body else _without_upgrade(data))
            if self._is_reading:
                self._bytes_without_body += len(piece)
                if self._bytes_without_body > MAX_HEAD_BYTES:
                    self._refuse(TOO_MUCH_HEAD)
        if self.transport.is_closing():
            self._unparsed = memoryview(b"")
        elif self._is_ahead():
            self.flow.pause_reading()
        if self._is_reading and not self.transport.is_closing():
            self._listen()
        else:
            self._stop_listening()

    def _is_ahead(self) -> bool:
        """Whether the client has sent more than can be begun with."""
        return self._owes_answer() or bool(self._unparsed)

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
        """Half a request gets a 503; a client that asks nothing gets nothing."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._is_reading and not self._owes_answer():
            self._refuse(STOPPING)
        elif cycle is None or cycle.response_complete:
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


class _Flow(FlowControl):
    """uvicorn's, which would go on reading after every answer, and whenever a body is asked for.

    `is_ahead`: whether the client is ahead of the server, which must not read on then. A client
    that does not read its answers is, too: the one that cannot be written holds up all others.
    """

    def __init__(self, transport: asyncio.Transport, is_ahead: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_ahead = is_ahead

    def resume_reading(self) -> None:
        """Read on, unless there is enough to do, or nothing will come."""
        if not self._is_ahead() and not self._transport.is_closing():
            super().resume_reading()


def _without_upgrade(request: bytes) -> bytes:
    """A piece of a request's head, as if it asked for no other protocol.

    Java's `HttpClient` asks for HTTP/2 with every first request. The parser would take what follows
    the headers for that protocol, and the body would be lost.
    """
    head, end, rest = request.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"x-upgrade", head) + end + rest


def envelope_protocol(read_timeout_seconds: float) -> type[EnvelopeProtocol]:
    """The protocol with this time; uvicorn makes its instances itself."""
    return type(
        "EnvelopeProtocol", (EnvelopeProtocol,), {"read_timeout_seconds": read_timeout_seconds}
    )
