"""Spans through the OpenTelemetry SDK, sent where the standard OTEL_* variables say.

Of these variables the ones that choose an exporter are read here. The rest (headers, timeouts,
sampling, batching, resource attributes) are read by the SDK itself, as its manual describes.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import attrs
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
)

from ...domain.embedder import NoTelemetry
from ...domain.errors import ConfigError
from ...domain.ports import Clock, Telemetry
from ...domain.types import ChunkStats

_SERVICE_NAME = "bge-m3-server"
_EXPORTERS = ("none", "console", "otlp")
_PROTOCOL = "http/protobuf"
_DEFAULT_ENDPOINT = "http://localhost:4318"
_TRACES_PATH = "/v1/traces"


@attrs.frozen
class OtelTelemetry:
    """A `Telemetry` that opens real spans; attributes bear the names of the log fields.

    A chunk is the child of the request whose context it is opened in, in any thread.
    """

    provider: TracerProvider
    clock: Clock = time.perf_counter
    _tracer: trace.Tracer = attrs.field(init=False)

    @_tracer.default
    def _make_tracer(self) -> trace.Tracer:
        return self.provider.get_tracer(_SERVICE_NAME)

    @contextlib.contextmanager
    def request(self, route: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
        """A server span; an exception that leaves it is recorded and marks it as failed."""
        with self._tracer.start_as_current_span(
            route, kind=trace.SpanKind.SERVER, attributes={"route": route, **attributes}
        ):
            yield

    @contextlib.contextmanager
    def chunk(self, stats: ChunkStats, /) -> Iterator[None]:
        """A span with what was estimated beforehand and the milliseconds it took."""
        attributes: dict[str, int | float] = {
            "batch": stats.batch,
            "max_tokens": stats.max_tokens,
            "padding_ratio": stats.padding_ratio,
        }
        if stats.estimated_bytes is not None:
            attributes["estimated_bytes"] = stats.estimated_bytes
        with self._tracer.start_as_current_span("chunk", attributes=attributes) as span:
            started = self.clock()
            try:
                yield
            finally:
                span.set_attribute("inference_ms", (self.clock() - started) * 1000)


def build_telemetry(
    environment: Mapping[str, str], service_version: str
) -> OtelTelemetry | NoTelemetry:
    """The telemetry that `environment` asks for; `NoTelemetry` where it asks for none.

    Naming an OTLP endpoint without naming an exporter is asking for ``otlp``.

    Raises:
        ConfigError: an exporter, protocol or endpoint that cannot be obeyed, or the ``otlp`` extra
            is not installed.
    """
    if _value(environment, "OTEL_SDK_DISABLED").lower() == "true":
        return NoTelemetry()
    processors = [_processor(name, environment) for name in _exporter_names(environment)]
    if not processors:
        return NoTelemetry()
    provider = TracerProvider(resource=_resource(environment, service_version))
    for processor in processors:
        provider.add_span_processor(processor)
    return OtelTelemetry(provider)


def shut_down(telemetry: Telemetry) -> None:
    """Send what is still waiting, then stop; spans opened later are dropped."""
    if isinstance(telemetry, OtelTelemetry):
        telemetry.provider.shutdown()


def _value(environment: Mapping[str, str], *names: str) -> str:
    """The first of the variables that is set; the standard takes an empty value as unset."""
    return next((value for name in names if (value := environment.get(name, "").strip())), "")


def _exporter_names(environment: Mapping[str, str]) -> list[str]:
    has_endpoint = _value(
        environment, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    asked = _value(environment, "OTEL_TRACES_EXPORTER") or ("otlp" if has_endpoint else "none")
    names = [name.strip() for name in asked.split(",")]
    unknown = [name for name in names if name not in _EXPORTERS]
    if unknown:
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER={asked!r}: unknown exporter {', '.join(unknown)!r}; "
            f"allowed are {', '.join(_EXPORTERS)}"
        )
    return [name for name in dict.fromkeys(names) if name != "none"]


def _processor(exporter: str, environment: Mapping[str, str]) -> SpanProcessor:
    if exporter == "console":
        return SimpleSpanProcessor(
            # The stream of now, not of import time; one line a span, as log collectors expect.
            ConsoleSpanExporter(
                out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n"
            )
        )
    _require_http_protobuf(environment)
    endpoint = _otlp_traces_endpoint(environment)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415  # an extra
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise ConfigError(
            "spans are to be exported by OTLP, but the exporter is not installed; install it with: "
            "pip install 'bge-m3-server[otlp]' (or set OTEL_TRACES_EXPORTER=none)"
        ) from error
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


def _require_http_protobuf(environment: Mapping[str, str]) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = _value(environment, name)
        if protocol == _PROTOCOL:
            return
        if protocol:
            raise ConfigError(f"{name}={protocol!r} is not supported; set it to {_PROTOCOL}")


def _otlp_traces_endpoint(environment: Mapping[str, str]) -> str:
    """The URL for traces: its own variable as it is, the general one with the path added."""
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    endpoint = url = _value(environment, name)
    if not endpoint:
        name = "OTEL_EXPORTER_OTLP_ENDPOINT"
        endpoint = _value(environment, name) or _DEFAULT_ENDPOINT
        url = endpoint.rstrip("/") + _TRACES_PATH
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ConfigError(
            f"{name}={endpoint!r} is not an http:// or https:// URL, such as {_DEFAULT_ENDPOINT}"
        )
    return url


def _resource(environment: Mapping[str, str], service_version: str) -> Resource:
    attributes = {"service.version": service_version}
    name = _value(environment, "OTEL_SERVICE_NAME")
    if name:
        attributes["service.name"] = name
    elif "service.name=" not in _value(environment, "OTEL_RESOURCE_ATTRIBUTES"):
        attributes["service.name"] = _SERVICE_NAME
    return Resource.create(attributes)
