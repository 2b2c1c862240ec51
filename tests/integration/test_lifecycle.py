"""A server process from its first second to its exit, seen by load balancers and clients."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from tests.support.preview_fixture import preview_cache_dir
from tests.support.server_process import post, running_server

LONG_WORK = {"input": [f"{number} " + "many words " * 400 for number in range(256)]}


@pytest.fixture(scope="module")
def preview():
    """Settings of a server with the preview model and one worker."""
    return {
        "BGE_M3_MODEL": "preview",
        "BGE_M3_CACHE_DIR": str(preview_cache_dir()),
        "BGE_M3_LOG_FORMAT": "json",
        "BGE_M3_WORKERS": "1",
    }


def until(condition, timeout_seconds=30):
    """Wait for what another process does."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def status_of(server, path):
    return httpx.get(server.url + path).status_code


def is_busy(server):
    health = httpx.get(f"{server.url}/health").json()
    return health["workers"]["busy"] and health["queue"]["waiting_texts"]


def test_readiness_falls_before_the_listener_closes(preview):
    """During the grace period load balancers are told to look elsewhere, and nobody is refused."""
    with running_server({**preview, "BGE_M3_SHUTDOWN_GRACE_SECS": "2"}) as server:
        assert (status_of(server, "/ready"), status_of(server, "/health")) == (200, 200)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: status_of(server, "/ready") == 503)

        assert httpx.get(f"{server.url}/ready").json()["reason"] == "the server is stopping"
        assert status_of(server, "/health") == 503
        assert status_of(server, "/live") == 200
        assert post(server, "/v1/embeddings", {"input": "still served"}).status_code == 200
        assert server.process.wait(timeout=30) == 0


@pytest.mark.parametrize("way", ["second signal", "drain limit"])
def test_a_stop_cut_short_answers_everybody(preview, way):
    """Work that cannot be finished gets 503 instead of a reset, and the exit code tells."""
    limit = "60" if way == "second signal" else "1"
    with (
        running_server({**preview, "BGE_M3_DRAIN_TIMEOUT_SECS": limit}) as server,
        ThreadPoolExecutor() as threads,
    ):
        waiting = [
            threads.submit(post, server, "/v1/embeddings", body)
            for body in (LONG_WORK, {"input": "short " * 300})
        ]
        until(lambda: is_busy(server))
        server.process.send_signal(signal.SIGTERM)
        if way == "second signal":
            server.wait_for_log("Stopping: not ready any more")
            time.sleep(0.5)  # a second signal at once would count as the first
            server.process.send_signal(signal.SIGTERM)

        answers = [answer.result(timeout=30) for answer in waiting]
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "the server is stopping"
        assert answers[1].status_code in {200, 503}
        assert server.process.wait(timeout=30) == 3


def test_the_same_signal_twice_at_once_is_one(preview):
    """A signal to a process group reaches the server twice where a parent passes it on."""
    with running_server({**preview, "BGE_M3_SHUTDOWN_GRACE_SECS": "1"}) as server:
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)

        assert server.process.wait(timeout=30) == 0


def request_bytes(body, length=None):
    return (
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (length or len(body)) + body
    )


def address_of(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def test_half_a_request_does_not_keep_the_server_from_stopping(preview):
    """It was never accepted: it gets a 503 in the usual shape, and the stop is a success."""
    with (
        running_server(preview) as server,
        socket.create_connection(address_of(server), timeout=30) as half,
    ):
        half.sendall(request_bytes(b'{"input":', length=500))
        httpx.get(f"{server.url}/health")  # the loop has taken the half in
        server.process.send_signal(signal.SIGTERM)

        answer = b"".join(iter(lambda: half.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"x-request-id: " in head
        assert b"retry-after: 5" in head
        assert json.loads(body)["error"]["message"] == "the server is stopping"
        assert server.process.wait(timeout=30) == 0


def test_a_client_that_connects_at_the_last_moment_gets_an_answer(preview):
    """Its connection is not reset while its request is on the way, even after a second signal."""
    with running_server({**preview, "BGE_M3_SHUTDOWN_GRACE_SECS": "60"}) as server:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("Stopping: not ready any more")
        time.sleep(0.5)  # a second signal at once would count as the first
        with socket.create_connection(address_of(server), timeout=30) as late:
            httpx.get(f"{server.url}/health")  # the loop has taken it in
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("Shutting down")
            late.sendall(request_bytes(b'{"input":"a"}'))
            answer = b"".join(iter(lambda: late.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["message"] == "the server is stopping"
        assert server.process.wait(timeout=30) == 3


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_clients_that_come_until_the_end_are_answered_or_refused(preview, is_cut_short):
    """Those that the kernel has accepted, and those that ask again on a kept connection, too."""
    grace_seconds = "60" if is_cut_short else "1"
    with (
        running_server({**preview, "BGE_M3_SHUTDOWN_GRACE_SECS": grace_seconds}) as server,
        ThreadPoolExecutor(48) as threads,
    ):
        clients = [threads.submit(ask_until_refused, server) for _ in range(48)]
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        if is_cut_short:
            server.wait_for_log("Stopping: not ready any more")
            time.sleep(0.5)  # a second signal at once would count as the first
            server.process.send_signal(signal.SIGTERM)

        assert server.process.wait(timeout=60) == (3 if is_cut_short else 0)
        assert {status for client in clients for status in client.result()} <= {200, 503}
        assert any("has been answered" in line for line in server.log) != is_cut_short


def ask_until_refused(server):
    """Statuses, from as many connections as it takes; a connection that is reset raises."""
    statuses = []
    while True:
        connection = HTTPConnection(*address_of(server), timeout=30)
        try:
            connection.connect()
        except ConnectionRefusedError:
            return statuses
        while connection.sock:  # None once an answer has said that it was the last
            body = b'{"input":"a"}'
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/embeddings", body, headers)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)


def test_a_kept_connection_may_ask_once_more_when_the_listener_has_closed(preview):
    """Its client has not been told that the connection ends."""
    with running_server(preview) as server:
        connection = HTTPConnection(*address_of(server), timeout=30)
        connection.auto_open = False
        connection.connect()
        connection.request("GET", "/live")
        connection.getresponse().read()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("Shutting down")
        connection.request("GET", "/live")
        answer = connection.getresponse()
        answer.read()

        assert (answer.status, answer.getheader("connection")) == (200, "close")
        assert server.process.wait(timeout=30) == 0


def test_connections_outlive_their_idle_clients_and_end_with_the_grace_period(preview):
    """Nobody sends into one that closes: it is kept until an answer says that it was the last."""
    with running_server({**preview, "BGE_M3_SHUTDOWN_GRACE_SECS": "60"}) as server:
        connection = HTTPConnection(*address_of(server), timeout=30)
        connection.auto_open = False
        connection.connect()

        def ask():
            connection.request("GET", "/live")
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.getheader("connection")

        assert ask() == (200, None)
        time.sleep(6)  # uvicorn's own limit is 5 s
        assert ask() == (200, None)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("Stopping: not ready any more")
        assert ask() == (200, "close")
        time.sleep(0.5)  # a second signal at once would count as the first
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 3


def test_an_answer_under_way_says_that_its_connection_ends(preview):
    """Whoever asked before the server was told to stop must not ask on this connection again."""
    with (
        running_server({**preview, "BGE_M3_SHUTDOWN_GRACE_SECS": "60"}) as server,
        ThreadPoolExecutor() as threads,
    ):
        some_work = {"input": LONG_WORK["input"][:24]}
        waiting = threads.submit(post, server, "/v1/embeddings", some_work)
        until(lambda: is_busy(server))
        server.process.send_signal(signal.SIGTERM)
        answer = waiting.result(timeout=120)

        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        server.process.send_signal(signal.SIGTERM)


def test_an_answer_that_nobody_reads_does_not_keep_the_server_from_stopping(preview):
    """It is cut off, and the exit code tells."""
    settings = {**preview, "BGE_M3_DRAIN_TIMEOUT_SECS": "1"}
    with running_server(settings) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(address_of(server))
        deaf.sendall(request_bytes(json.dumps({"input": ["a"] * 256}).encode()) * 12)
        server.wait_for_log("embedding request complete")
        server.process.send_signal(signal.SIGTERM)

        assert server.process.wait(timeout=30) == 3


def test_a_client_that_closes_its_socket_frees_the_queue(preview):
    """What nobody waits for any more is not computed."""
    with running_server(preview) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/embeddings", json=LONG_WORK, timeout=1)
        until(lambda: not is_busy(server), timeout_seconds=10)

        queue = httpx.get(f"{server.url}/health").json()["queue"]
        assert (queue["waiting_texts"], queue["held_bytes"]) == (0, 0)


def test_a_deadline_is_a_504(preview):
    """A client that says how long it waits is told in time, with nothing left behind."""
    with running_server(preview) as server:
        answer = post(server, "/v1/embeddings", LONG_WORK, headers={"x-request-timeout-ms": "300"})

        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        assert httpx.get(f"{server.url}/health").json()["queue"]["waiting_texts"] == 0


def test_an_idle_server_gives_its_memory_back_and_answers_all_the_same(preview):
    """The model leaves the process's memory, health stays 200, and a burst reloads it once."""
    with running_server({**preview, "BGE_M3_IDLE_TIMEOUT_SECS": "2"}) as server:
        text = {"input": "before"}
        before = post(server, "/v1/embeddings", text).json()
        loaded_bytes = resident_bytes(server)
        until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "idle")

        assert status_of(server, "/ready") == 200
        assert httpx.get(f"{server.url}/health/deep").json()["status"] == "idle"
        assert loaded_bytes - resident_bytes(server) > 50 * 1024**2
        with ThreadPoolExecutor(8) as threads:
            burst = [threads.submit(post, server, "/v1/embeddings", text) for _ in range(8)]
            answers = [answer.result().json() for answer in burst]
        assert all(answer["usage"] == before["usage"] for answer in answers)
        assert sum("Reloaded the model" in line for line in server.log) == 1


def resident_bytes(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024
