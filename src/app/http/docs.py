"""The OpenAPI document: what the types of the routes cannot say by themselves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from litestar import Response, Router
from litestar.datastructures import ResponseHeader
from litestar.exceptions import NotFoundException
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.spec import Example, License, Operation, RequestBody, Tag

from .api_page import ApiPage
from .schemas import DeepHealthReport, ErrorResponse, HealthReport, ReadyReport

REQUEST_EXAMPLES: Mapping[str, Any] = {
    "one text": {"input": "What is BGE-M3?"},
    "several texts": {"input": ["What is BGE-M3?", "BM25 在哪里有用?"], "model": "bge-m3"},
}

_USAGE = {"prompt_tokens": 9, "total_tokens": 9}
_VECTOR = [-0.0125, 0.0381, -0.0447]
_WEIGHTS = {"indices": [83, 335, 4865], "values": [0.0814, 0.1296, 0.0836]}

DENSE_EXAMPLE: Mapping[str, Any] = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": _VECTOR}],
    "model": "bge-m3",
    "usage": _USAGE,
}
SPARSE_EXAMPLE: Mapping[str, Any] = {
    "data": [{"index": 0, "sparse_values": _WEIGHTS}],
    "model": "bge-m3",
    "usage": _USAGE,
}
BOTH_EXAMPLE: Mapping[str, Any] = {
    "object": "list",
    "model": "bge-m3",
    "data": [{"index": 0, "embedding": _VECTOR, "sparse_values": _WEIGHTS}],
    "usage": _USAGE,
}
MODEL_EXAMPLE: Mapping[str, Any] = {
    "id": "bge-m3",
    "object": "model",
    "created": 1767225600,
    "owned_by": "bge-m3-server",
    "type": "bge-m3",
    "dimensions": 1024,
    "max_tokens": 8192,
}
MODELS_EXAMPLE: Mapping[str, Any] = {"object": "list", "data": [MODEL_EXAMPLE]}
HEALTH_EXAMPLE: Mapping[str, Any] = {
    "status": "ok",
    "workers": {"live": 2, "total": 2, "busy": 1, "suspect": 0, "replaced": 0},
    "queue": {
        "waiting_texts": 3,
        "waiting_tokens": 540,
        "limit_tokens": 4194304,
        "held_bytes": 61440,
        "limit_bytes": 134217728,
        "drain_tokens_per_second": 2100.0,
    },
    "max_seq_length": 8192,
    "model": {"id": "bge-m3", "dimensions": 1024},
    "tuning": {
        "a_bytes_per_token": 88213.0,
        "b_bytes_per_token_sq": 204.6,
        "fixed_bytes": 0,
        "max_workspace_bytes": 4831838208,
        "probe_status": "complete",
        "memory_source": "cgroup_v2",
        "available_bytes": 17179869184,
        "model_rss_bytes_per_worker": 1288490188,
        "worst_case_peak_bytes": 12509092216,
        "utilization_pct": 72.81,
        "total_workspace_bytes": 9663676416,
        "coefficients_source": "probe",
        "reason": "10 of 10 shapes were measured",
        "longest_text_tokens": 6660,
        "excess_passes": 0,
        "fit_r_squared": 0.9991,
        "fit_worst_relative_error": 0.081,
        "fit_margin": 1.24,
    },
}

READY_EXAMPLE: Mapping[str, Any] = {"status": "ready"}
DEEP_HEALTH_EXAMPLE: Mapping[str, Any] = {"status": "ok", "elapsed_ms": 31.4}

TRUNCATION_HEADER = ResponseHeader(
    name="x-truncated-inputs",
    description="Places of texts that were cut to the model's limit; absent when none was.",
    documentation_only=True,
    value="0,3",
)


def _error(
    status: int, description: str, message: str, kind: str = "invalid_request_error", **more: str
) -> ResponseSpec:
    body: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": status} | more
    return ResponseSpec(
        ErrorResponse,
        generate_examples=False,
        description=description,
        examples=[Example(summary=description, value={"error": body})],
    )


ERRORS: Mapping[int, ResponseSpec] = {
    400: _error(
        400,
        "The body is not JSON, or the texts break a rule",
        "input[2] length 40000 exceeds maximum 32768 characters",
        param="input[2]",
    ),
    413: _error(
        413,
        "The body is too long, or the request would not fit an empty queue or the memory",
        "request body exceeds maximum 33554432 bytes",
    ),
    415: _error(415, "The body is not declared as JSON", "content-type 'text/plain'"),
    422: _error(
        422,
        "JSON of another shape",
        "Expected `str | array`, got `int` - at `$.input`",
        param="input",
    ),
    429: _error(
        429,
        "The queue is full; `retry-after` and `retry-after-ms` say when to come back",
        "the queue is full: 4194000 of 4194304 tokens are taken, and this request has 512; "
        "retry in 1.250 s",
        "rate_limit_error",
    ),
    500: _error(500, "The engine failed", "internal server error", "internal_error"),
    503: _error(503, "Not ready, or no worker is alive", "model not ready", "service_unavailable"),
    504: _error(
        504,
        "The time set by `x-request-timeout-ms` or by the server has passed",
        "the request was not finished within 2 s",
        "timeout_error",
    ),
}


def _down(report: type, description: str) -> Mapping[int, ResponseSpec]:
    return {503: ResponseSpec(report, generate_examples=False, description=description)}


NOT_READY = _down(ReadyReport, "`reason` says why")
UNHEALTHY = _down(HealthReport, "`loading` or `fail`")
DEEPLY_UNHEALTHY = _down(DeepHealthReport, "`loading` or `fail`")
MODEL_ERRORS: Mapping[int, ResponseSpec] = {
    404: _error(
        404,
        "No such model",
        "the model 'gpt' does not exist",
        param="model",
        code="model_not_found",
    )
}


def documented(
    *, requests: Mapping[str, Any] | None = None, answer: Mapping[str, Any]
) -> type[Operation]:
    """An operation class that carries examples: request bodies by name, and one answer."""

    @dataclasses.dataclass
    class DocumentedOperation(Operation):
        def __post_init__(self) -> None:
            if requests and isinstance(self.request_body, RequestBody):
                for media in self.request_body.content.values():
                    media.examples = {
                        name.replace(" ", "-"): Example(summary=name, value=value)
                        for name, value in requests.items()
                    }
            responses = self.responses or {}
            if self.request_body is None:
                # Litestar assumes one, in its own shape, wherever there is a parameter.
                responses.pop("400", None)
            for media in (getattr(responses.get("200"), "content", None) or {}).values():
                media.example = answer

    return DocumentedOperation


def openapi_config(version: str) -> OpenAPIConfig:
    """The document at ``/schema/openapi.json`` and its page at ``/schema``."""
    return OpenAPIConfig(
        title="bge-m3-server",
        version=version,
        description="Dense vectors and lexical weights of BGE-M3. Every response, errors "
        "included, carries `x-request-id`.",
        license=License(name="Apache-2.0", identifier="Apache-2.0"),
        tags=[Tag(name="embeddings"), Tag(name="models"), Tag(name="operations")],
        operation_id_creator=lambda handler, _method, _path: handler.handler_name,
        render_plugins=[ApiPage(path="/")],
        openapi_router=Router(
            "/schema", route_handlers=[], include_in_schema=False, after_request=_refuse_html_404
        ),
    )


def _refuse_html_404(response: Response[Any]) -> Response[Any]:
    # Litestar answers unknown pages below /schema with a page of its own.
    if response.status_code == 404:  # noqa: PLR2004
        raise NotFoundException
    return response
