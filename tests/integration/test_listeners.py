"""Listeners that close while clients connect."""

import socket
import sys
import threading

import pytest
from bge_m3_server.app.listeners import accept_the_last, shared, turn_newcomers_away


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        created = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with created:
        yield created


def connected(listener):
    return socket.create_connection(listener.getsockname()[:2], timeout=10)


def test_who_has_connected_is_accepted_when_the_listener_closes(listener):
    """The kernel has told the client that the connection stands."""
    with connected(listener) as client:
        client.sendall(b"question")
        handle = shared(listener.fileno())
        turn_newcomers_away(handle)
        listener.close()
        (accepted,) = accept_the_last([handle])
        with accepted:
            accepted.settimeout(10)
            assert accepted.recv(8) == b"question"
            accepted.sendall(b"answer")
        assert client.recv(6) == b"answer"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters what a listener hears")
def test_nobody_connects_between_the_last_accept_and_the_close(listener):
    """The kernel would reset them; as it is, they ask again and are refused."""
    handle = shared(listener.fileno())
    turn_newcomers_away(handle)
    address = listener.getsockname()[:2]
    outcomes = []

    def connect():
        try:
            socket.create_connection(address, timeout=30).close()
        except OSError as error:
            outcomes.append(type(error))

    clients = [threading.Thread(target=connect) for _ in range(8)]
    for client in clients:
        client.start()
    clients[0].join(timeout=0.3)  # long enough to connect, if that could be
    assert outcomes == []
    listener.close()
    assert accept_the_last([handle]) == []
    for client in clients:
        client.join(timeout=30)
    assert outcomes == [ConnectionRefusedError] * 8
