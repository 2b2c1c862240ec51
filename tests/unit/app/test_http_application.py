"""What the application does around the engine, without a socket."""

import asyncio
import contextlib
import json
import logging
from html.parser import HTMLParser

import pytest
from bge_m3_server.app.http.application import HttpLimits, create_app
from bge_m3_server.app.http.request_log import loggable_headers
from bge_m3_server.domain.embedder import NoTelemetry
from litestar.testing import TestClient

from tests.support.fake_service import FakeService, embedding


class SpanRecorder(NoTelemetry):
    """Remembers request spans and whether one is open."""

    def __init__(self):
        self.spans = []
        self.is_open = False

    @contextlib.contextmanager
    def request(self, route, attributes):
        self.spans.append((route, dict(attributes)))
        self.is_open = True
        yield
        self.is_open = False


def make_app(service, telemetry=None, clock=lambda: 0.0):
    return create_app(service, HttpLimits(8, 10_000), telemetry or NoTelemetry(), "1", clock)


def test_span_around_the_work():
    """The request's span is open while the engine works, and closed afterwards."""
    telemetry = SpanRecorder()
    open_during_work = []

    def watch(_index, _text):
        open_during_work.append(telemetry.is_open)
        return embedding()

    service = FakeService(result=watch)
    with TestClient(make_app(service, telemetry)) as client:
        headers = {"x-request-id": "id-1"}
        client.post("/v1/sparse-embeddings", json={"input": ["a", "b"]}, headers=headers)
    assert telemetry.spans == [("sparse", {"batch_size": 2, "request_id": "id-1"})]
    assert open_during_work == [True, True]
    assert not telemetry.is_open


def test_times_come_from_the_clock(caplog):
    """Logged times are differences of the given clock, in milliseconds."""
    ticks = iter([1.0, 3.5, 4.0])
    with (
        caplog.at_level(logging.INFO, "bge_m3_server"),
        TestClient(make_app(FakeService(), clock=lambda: next(ticks))) as client,
    ):
        client.post("/v1/embeddings", json={"input": "a"})
    (fields,) = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert (fields["total_ms"], fields["serialize_ms"]) == (3000.0, 500.0)


def test_upload_that_breaks_off(caplog):
    """A client that leaves while it sends its body is no error of the server."""
    events = iter(
        [
            {"type": "http.request", "body": b'{"inp', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )
    sent = []

    async def receive():
        return next(events)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    service = FakeService()
    asyncio.run(make_app(service)(scope, receive, send))
    assert sent[0]["status"] == 499
    assert service.calls == []
    assert caplog.records == []


@pytest.mark.parametrize(
    ("headers", "logged"),
    [
        ({}, None),
        ({"host": "a", "authorization": "b"}, None),
        ({"X-Team-Name": "search", "x-a": "1"}, {"x_a": "1", "x_team_name": "search"}),
        ({"x-empty": "", "x-odd": "caf\xe9", "x-tab": "a\tb"}, None),
        ({"x-api-key": "s", "x-auth-request-user": "s", "X-Amz-Security-Token": "s"}, None),
    ],
)
def test_loggable_headers(headers, logged):
    """Only harmless x-headers with visible values are logged, sorted, with underscores."""
    text = loggable_headers(headers)
    assert (json.loads(text) if text else None) == logged
    if logged:
        assert list(json.loads(text)) == sorted(logged)


def test_api_page_is_well_formed():
    """Every element of the page at /schema is closed, and its forms name real routes."""
    unclosed, forms = [], []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in {"meta", "link"}:
                unclosed.append(tag)
            if tag == "form":
                forms.append(dict(attrs)["data-path"])

        def handle_endtag(self, tag):
            assert unclosed.pop() == tag

    with TestClient(make_app(FakeService())) as client:
        Checker().feed(client.get("/schema").text)
        paths = client.get("/schema/openapi.json").json()["paths"]
    assert unclosed == []
    assert forms == list(paths)
