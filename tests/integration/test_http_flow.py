"""Clients that send more than they should: heads without end, and requests before their turn."""

import json
import re
import socket
import time

import pytest

pytest_plugins = ["tests.support.http_fixtures"]

POST = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
MORE = 80 * 1024


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /".ljust(MORE, b"a"),
        b"GET /live HTTP/1.1\r\nx-a: ".ljust(MORE, b"a"),
        b"GET /live HTTP/1.1\r\n".ljust(MORE, b"a"),
        b"GET /live HTTP/1.1\r\n" + b"a:b\r\n" * (MORE // 5),
        CHUNKED + b"5;a=".ljust(MORE, b"a"),
        CHUNKED + b'd\r\n{"input":"a"}\r\n0\r\nx-a: '.ljust(MORE, b"a"),
    ],
    ids=["path", "value", "name", "lines", "chunk extension", "trailer"],
)
def test_a_head_without_end(address, endless):
    """What is not the body of a request is bounded; beyond, it is a 431 in the usual envelope."""
    head, _, body = address.exchange(endless).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 431)
    assert "65536 bytes" in error["message"]


def test_a_head_without_end_behind_a_request(address, service):
    """The answer that the server owes comes first."""
    whole = POST + b'content-length: 13\r\n\r\n{"input":"a"}'
    answers = address.exchange(whole + b"GET /live HTTP/1.1\r\nx-a: ".ljust(MORE, b"a"))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"431"]


def test_the_longest_head(address):
    """Up to the bound a head is read."""
    head = b"GET /live HTTP/1.1\r\nconnection: close\r\nx-a: ".ljust(64 * 1024 - 4, b"a")
    assert address.exchange(head + b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_long_body_in_small_chunks(address):
    """The bound is on what comes between two pieces of a body, not on their sum."""
    chunks = b"1;extension=none\r\n \r\n" * 20_000 + b'd\r\n{"input":"a"}\r\n0\r\n\r\n'
    head = CHUNKED.replace(b"host: x", b"connection: close")
    assert address.exchange(head + chunks).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("cut", [len(POST), 1])
def test_a_wish_for_another_protocol_costs_no_body(address, cut):
    """Java's client asks for HTTP/2 with every first request; it gets its answer in HTTP/1.1."""
    body = b'{"input":"Upgrade: h2c"}'
    wish = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAE\r\n"
    request = POST + wish + b"content-length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection((address.host, address.port)) as client:
        client.sendall(request[:cut])
        time.sleep(0.05)
        client.sendall(request[cut:])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_white_space_around_a_value_is_not_part_of_it(address, service):
    """A blank at the end of a header's line means nothing."""
    head = POST + b"connection: close\r\nx-request-timeout-ms: \t 700 \t\r\ncontent-length: 13\r\n"
    assert address.exchange(head + b'\r\n{"input":"a"}').startswith(b"HTTP/1.1 200 ")
    assert service.timeouts == [0.7]


def test_requests_before_their_turn_are_answered_in_order(address):
    """Many requests sent at once get one answer each, whatever their lengths."""
    sent = b"".join(
        b"GET /live HTTP/1.1\r\nhost: x\r\nx-request-id: %d\r\nx-a: %s\r\n\r\n" % (i, b"a" * i)
        for i in range(300)
    )
    last = b"GET /live HTTP/1.1\r\nhost: x\r\nx-request-id: 300\r\nconnection: close\r\n\r\n"
    answers = address.exchange(sent + last, timeout_seconds=30)
    assert re.findall(rb"x-request-id: (\d+)", answers) == [b"%d" % i for i in range(301)]


def test_a_client_may_leave_amid_requests_before_their_turn(address):
    """What it has sent is forgotten, and the server goes on."""
    with socket.create_connection((address.host, address.port), timeout=10) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000)
    assert address.exchange(
        b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    ).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_reads_nothing_is_not_read_from(address):
    """It can send no more than the kernel holds: the server does not collect its requests."""
    requests = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 3000
    with (
        socket.create_connection((address.host, address.port), timeout=4) as deaf,
        pytest.raises(TimeoutError),
    ):
        deaf.sendall(requests * (16 * 1024**2 // len(requests)))
