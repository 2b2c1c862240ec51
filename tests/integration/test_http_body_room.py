"""Bodies that are under way at the same time: how many bytes of them a server takes."""

import contextlib
import json
import socket
import time

import httpx
import pytest
from bge_m3_server.app.admission import Admission
from bge_m3_server.app.http.application import HttpLimits, create_app
from bge_m3_server.domain import NoTelemetry

from tests.support.fake_service import FakeService
from tests.support.preview_fixture import preview_cache_dir
from tests.support.serve import serve
from tests.support.server_process import running_server

LIMIT_BYTES = 1_000_000
BODY = json.dumps({"input": "a"}).encode().ljust(600_000)
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ANNOUNCED = HEAD + b"Content-Length: 600000\r\n\r\n" + BODY[:100_000]
UNANNOUNCED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n927c0\r\n" + BODY[:-1]


@pytest.fixture
def room():
    """What counts the bodies, as it does in the engine."""
    return Admission(10**6, LIMIT_BYTES, time.monotonic, chance=lambda: 0.0)


@pytest.fixture
def address(room):
    limits = HttpLimits(8, 4 * LIMIT_BYTES, receiving=lambda: room.receiving(0, None))
    app = create_app(FakeService(), limits, NoTelemetry(), "0", time.monotonic)
    with serve(app) as address:
        yield address


def post(address, body):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{address.url}/v1/embeddings", content=body, headers=headers, timeout=20)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def half_a_body(address, room, sent):
    """A client that sends so much and stops, until the block ends."""
    with socket.create_connection((address.host, address.port), 10) as client:
        client.sendall(sent)
        until(lambda: room.held_bytes > 590_000)
        yield client


@pytest.mark.parametrize("sent", [ANNOUNCED, UNANNOUNCED], ids=["announced", "unannounced"])
def test_a_body_that_does_not_fit_beside_others_is_a_429(address, room, sent):
    """It says when to come back; once the other client has left there is room again."""
    with half_a_body(address, room, sent):
        answer = post(address, BODY)
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "of 1000000 bytes are taken" in answer.json()["error"]["message"]
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")
    until(lambda: room.held_bytes == 0)
    assert post(address, BODY).status_code == 200
    assert room.held_bytes == 0


def test_a_body_that_grows_beyond_the_room_is_a_429(address, room):
    """Its length was not announced, so it is counted as it comes."""
    with half_a_body(address, room, ANNOUNCED):
        assert post(address, iter([BODY[:300_000], BODY[300_000:]])).status_code == 429


def test_queries_are_taken_while_bulk_fills_the_room(address, room):
    """Small bodies are not counted: a connection has buffers of that size anyway."""
    with half_a_body(address, room, ANNOUNCED):
        assert [post(address, BODY[:60_000]).status_code for _ in range(20)] == [200] * 20


def test_a_body_alone_is_taken_whatever_its_size(address, room):
    """Up to the longest that is allowed, announced or not."""
    longest = BODY.ljust(4 * LIMIT_BYTES)
    assert post(address, longest).status_code == 200
    assert post(address, iter([longest])).status_code == 200
    assert room.held_bytes == 0


@pytest.mark.parametrize("body", [BODY[:-1] + b"x", BODY.replace(b'"a"', b"1.5")])
def test_a_body_that_is_refused_gives_its_room_back(address, room, body):
    """Whatever becomes of it, nothing of it is kept."""
    assert post(address, body).status_code in {400, 422}
    assert room.held_bytes == 0


def test_a_server_counts_bodies_with_everything_else():
    """`/health` shows them among the bytes of all requests, bounded by the same setting."""
    settings = {
        "BGE_M3_MODEL": "preview",
        "BGE_M3_CACHE_DIR": str(preview_cache_dir()),
        "BGE_M3_QUEUE_BYTES": str(LIMIT_BYTES),
    }
    with running_server(settings) as server:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port), 10) as client:
            client.sendall(ANNOUNCED)
            until(lambda: health(server)["held_bytes"] == len(BODY))
            assert post(server, BODY).status_code == 429
        until(lambda: health(server)["held_bytes"] == 0)


def health(server):
    return httpx.get(f"{server.url}/health").json()["queue"]
