"""Clients that stop in the middle of a request."""

import asyncio
import json
import socket
import time

import attrs
import pytest
from bge_m3_server.app.http.application import HttpLimits, create_app
from bge_m3_server.domain import NoTelemetry

from tests.support.fake_service import FakeService
from tests.support.serve import serve

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b'Content-Length: 13\r\n\r\n{"input":"a"}'
HALVES = [
    HEAD[:20],
    HEAD,
    HEAD + b"Content-Length: 13\r\n\r\n",
    HEAD + b'Content-Length: 13\r\n\r\n{"input"',
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
]


@attrs.define
class SlowService(FakeService):
    """Answers after longer than a client may be silent."""

    async def embed(self, texts, heads, *, timeout_seconds=None):
        await asyncio.sleep(0.5)
        return await FakeService.embed(self, texts, heads, timeout_seconds=timeout_seconds)


@pytest.fixture(scope="module")
def address():
    """A server that grants a client a fifth of a second of silence."""
    app = create_app(SlowService(), HttpLimits(8, 4096), NoTelemetry(), "0", time.monotonic)
    with serve(app, read_timeout_seconds=0.2) as address:
        yield address


def answers(raw):
    """Status and error type of each answer in what a server has said."""
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:])
        assert headers[b"x-request-id"]
        length = int(headers[b"content-length"])
        error = json.loads(rest[:length]).get("error", {})
        found.append((int(head.split()[1]), error.get("type")))
        raw = rest[length:]
    return found


@pytest.mark.parametrize("half", HALVES)
def test_half_a_request_is_a_408(address, half):
    """In the usual envelope, whether headers or body do not end; then the connection is closed."""
    assert answers(address.exchange(half)) == [(408, "timeout_error")]


def test_a_client_that_says_nothing_is_disconnected(address):
    """There is no request to answer."""
    assert address.exchange(b"") == b""


@pytest.mark.parametrize("half", HALVES)
def test_half_a_request_after_a_whole_one_waits_for_its_answer(address, half):
    """A 408 never takes the place of an answer that the server owes."""
    assert answers(address.exchange(WHOLE + half)) == [(200, None), (408, "timeout_error")]


def test_a_slow_client_is_served(address):
    """Only silence counts, not the whole time, and not that of the server."""
    with socket.create_connection((address.host, address.port), 10) as connection:
        for start in range(0, len(WHOLE), 20):
            connection.sendall(WHOLE[start : start + 20])
            time.sleep(0.08)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_early_refusal_is_the_only_answer(address):
    """A body that is refused before its end gets no second answer when it does not come."""
    too_long = HEAD + b"Content-Length: 999999\r\n\r\n{"
    assert answers(address.exchange(too_long)) == [(413, "invalid_request_error")]
