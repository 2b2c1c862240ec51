"""Spans of requests and chunks, and the choice of an exporter."""

import contextvars
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from bge_m3_server.adapters.telemetry.otel import OtelTelemetry, build_telemetry, shut_down
from bge_m3_server.domain.embedder import NoTelemetry
from bge_m3_server.domain.errors import ConfigError, InferenceError
from bge_m3_server.domain.types import ChunkStats
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

STATS = ChunkStats(batch=4, max_tokens=10, total_tokens=30, estimated_bytes=4096)


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter):
    """Telemetry with a clock that moves 0.25 s at each reading."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    ticks = iter(range(1000))
    return OtelTelemetry(provider, clock=lambda: next(ticks) / 4)


def test_request_span(telemetry, exporter):
    """A request is a server span with its route and the given attributes."""
    with telemetry.request("/v1/embeddings", {"batch_size": 3, "request_id": "r1"}):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.name == "/v1/embeddings"
    assert span.kind is SpanKind.SERVER
    assert dict(span.attributes) == {
        "route": "/v1/embeddings",
        "batch_size": 3,
        "request_id": "r1",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_chunk_span(telemetry, exporter):
    """A chunk tells its shape, padding, estimate and the time it took in milliseconds."""
    with telemetry.chunk(STATS):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.name == "chunk"
    assert dict(span.attributes) == {
        "batch": 4,
        "max_tokens": 10,
        "padding_ratio": 0.25,
        "estimated_bytes": 4096,
        "inference_ms": 250.0,
    }


def test_chunk_without_estimate(telemetry, exporter):
    """An estimate that nobody made is left out."""
    with telemetry.chunk(ChunkStats(1, 3, 3)):
        pass
    (span,) = exporter.get_finished_spans()
    assert "estimated_bytes" not in span.attributes


def test_failure_marks_chunk_and_request(telemetry, exporter):
    """An exception passes through, and both spans that it leaves are failed."""
    with (
        pytest.raises(InferenceError),
        telemetry.request("dense", {}),
        telemetry.chunk(STATS),
    ):
        raise InferenceError("the engine failed")
    chunk, request = exporter.get_finished_spans()
    for span in (chunk, request):
        assert span.status.status_code is StatusCode.ERROR
        assert "the engine failed" in span.status.description
        assert [event.name for event in span.events] == ["exception"]
    assert chunk.attributes["inference_ms"] == 250.0


def test_chunk_in_another_thread_is_a_child(telemetry, exporter):
    """A chunk opened in a copy of the request's context belongs to the request, in any thread."""

    def run_chunk():
        with telemetry.chunk(STATS):
            return threading.get_ident()

    with ThreadPoolExecutor(1) as worker:
        with telemetry.request("dense", {}):
            context = contextvars.copy_context()
            thread = worker.submit(context.run, run_chunk).result()
        worker.submit(run_chunk).result()
    assert thread != threading.get_ident()
    child, request, stranger = exporter.get_finished_spans()
    assert child.parent.span_id == request.context.span_id
    assert child.context.trace_id == request.context.trace_id
    assert stranger.parent is None


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": ""},
        {"OTEL_SERVICE_NAME": "embeddings"},
        {"OTEL_SDK_DISABLED": "True", "OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"},
    ],
)
def test_nothing_asked_for(environment):
    """Without an exporter there is no tracing at all, and shutting it down is fine."""
    telemetry = build_telemetry(environment, "1.0")
    assert isinstance(telemetry, NoTelemetry)
    shut_down(telemetry)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            ["OTEL_TRACES_EXPORTER", "zipkin", "none, console, otlp"],
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ["OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"],
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
            ["OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "http://"],
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://"},
            ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"],
        ),
    ],
)
def test_what_cannot_be_obeyed(environment, words):
    """The message names the variable, its value and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        build_telemetry(environment, "1.0")
    for word in words:
        assert word in str(caught.value)


def test_missing_exporter_package(monkeypatch):
    """Without the extra, the message is the line that installs it."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'bge-m3-server\[otlp\]'"):
        build_telemetry({"OTEL_TRACES_EXPORTER": "otlp"}, "1.0")


def test_console_exporter(capsys):
    """Spans are printed one a line, with the service's name and version."""
    telemetry = build_telemetry({"OTEL_TRACES_EXPORTER": "console"}, "1.2.3")
    with telemetry.request("dense", {}):
        pass
    shut_down(telemetry)
    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    assert printed["name"] == "dense"
    assert printed["resource"]["attributes"]["service.name"] == "bge-m3-server"
    assert printed["resource"]["attributes"]["service.version"] == "1.2.3"


@pytest.fixture
def collector():
    """A stand-in for an OTLP collector: its URL, and what was posted as (path, type, body)."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["content-type"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("variable", "suffix", "path"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "", "/v1/traces"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/tenant/", "/tenant/v1/traces"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "/ingest", "/ingest"),
    ],
)
def test_otlp_exporter(collector, variable, suffix, path):
    """Shutting down sends every span to the endpoint that the variables name."""
    url, received = collector
    telemetry = build_telemetry(
        {variable: url + suffix, "OTEL_SERVICE_NAME": "embeddings-eu"}, "1.2.3"
    )
    with telemetry.request("dense", {}), telemetry.chunk(STATS):
        pass
    shut_down(telemetry)
    ((posted_path, content_type, body),) = received
    assert posted_path == path
    assert content_type == "application/x-protobuf"
    for word in (b"embeddings-eu", b"1.2.3", b"dense", b"chunk", b"padding_ratio"):
        assert word in body
