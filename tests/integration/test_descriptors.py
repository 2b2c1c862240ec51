"""Clients that hold all the descriptors that the server may have."""

import contextlib
import json
import os
import resource
import signal
import socket
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.preview_fixture import preview_cache_dir
from tests.support.server_process import running_server

SPARE_DESCRIPTORS = 24
ASKING_CLIENTS = 8


@pytest.fixture
def server():
    """One that measures its passes, as servers do."""
    settings = {
        "BGE_M3_MODEL": "preview",
        "BGE_M3_CACHE_DIR": str(preview_cache_dir()),
        "BGE_M3_LOG_FORMAT": "json",
        "BGE_M3_EP": "cpu",
        "BGE_M3_DISABLE_AUTO_BUDGET": "",
        "BGE_M3_DISABLE_PROBE_CACHE": "1",
    }
    with running_server(settings) as started:
        started.wait_for_log("probe complete")
        yield started


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))  # noqa: PTH208  only their number


def ask(connection, text):
    """One text on a connection that stands; returns status and dimensions."""
    body = json.dumps({"input": text})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, len(json.loads(answer.read())["data"][0]["embedding"])


def test_idle_clients_in_any_number_break_nothing(server):
    """Who is connected is served, health is true, and who waits is served when others leave."""
    address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
    limit = descriptors(server) + SPARE_DESCRIPTORS
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as stack:
        asking = [HTTPConnection(*address, timeout=30) for _ in range(ASKING_CLIENTS)]
        for number, connection in enumerate(asking):
            stack.callback(connection.close)
            assert ask(connection, f"before {number}") == (200, 384)
        idle = [socket.create_connection(address, timeout=30) for _ in range(2 * SPARE_DESCRIPTORS)]
        deadline = time.monotonic() + 10
        while descriptors(server) < limit and time.monotonic() < deadline:
            time.sleep(0.02)

        for number, connection in enumerate(asking):
            assert ask(connection, f"meanwhile {number}") == (200, 384)
        asking[0].request("GET", "/health")
        health = json.loads(asking[0].getresponse().read())
        assert health["status"] == "ok"
        for connection in idle:
            connection.close()
        assert httpx.get(f"{server.url}/ready", timeout=30).status_code == 200
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "after"}, timeout=30)
        assert answer.status_code == 200
    assert not [line for line in server.log if "Internal error" in line]


def test_a_server_without_descriptors_stops_as_it_should(server):
    """With the exit code of a stop that lost nothing."""
    address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
    limit = descriptors(server) + SPARE_DESCRIPTORS
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    idle = [socket.create_connection(address, timeout=30) for _ in range(2 * SPARE_DESCRIPTORS)]
    with contextlib.ExitStack() as stack:
        for connection in idle:
            stack.callback(connection.close)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0
    assert any("Stopped: everything" in line for line in server.log)
