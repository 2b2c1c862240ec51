"""From any exception to the one error envelope: the only place that knows both sides."""

import contextlib
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import attrs
import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import Scope, Send

from ...domain.errors import (
    DeadlineExceededError,
    InferenceError,
    InvalidInputError,
    NonFiniteOutputError,
    NotReadyError,
    QueueFullError,
    RequestTooLargeError,
    UnavailableError,
)
from .request_id import request_id
from .schemas import ErrorDetail, ErrorResponse

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 1000

NOT_READY_RETRY_SECONDS = 5.0
"""A guess, for a server that is loading or stopping: by then another one may have taken over."""

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this answer; the number is the one that proxies log for a client that left."""


_DO_NOT_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
"""OpenAI's clients repeat a 5xx unless they are told not to; the text would fail again."""


@attrs.frozen
class Failure:
    """What the caller is told. `code` defaults to the HTTP status."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)


def failure_of(error: Exception, method: str, path: str) -> Failure:
    """The caller's view of `error`; what is not meant for callers becomes a generic 500."""
    match error:
        case InvalidInputError():
            status = 413 if isinstance(error, RequestTooLargeError) else 400
            return Failure(status, "invalid_request_error", str(error), error.param)
        case UnavailableError():
            return _unavailable(error)
        case InferenceError() if error.index is not None or isinstance(error, NonFiniteOutputError):
            return _failing_text(error)
        case HTTPException() if error.status_code < 500:  # noqa: PLR2004  the 5xx class begins here
            return _refused_by_framework(error, method, path)
        case _:
            return Failure(500, "internal_error", "internal server error")


def _unavailable(error: UnavailableError) -> Failure:
    if isinstance(error, QueueFullError):
        headers = retry_after(error.retry_after_seconds)
        return Failure(429, "rate_limit_error", str(error), headers=headers)
    if isinstance(error, DeadlineExceededError):  # a second try would take as long
        return Failure(504, "timeout_error", str(error), headers=_DO_NOT_RETRY)
    headers = {}
    if isinstance(error, NotReadyError):
        headers = retry_after(error.retry_after_seconds or NOT_READY_RETRY_SECONDS)
    return Failure(503, "service_unavailable", str(error), headers=headers)


def _failing_text(error: InferenceError) -> Failure:
    place = "a text" if error.index is None else f"input[{error.index}]"
    if isinstance(error, NonFiniteOutputError):
        message = f"the model returned a non-finite embedding for {place}"
        return Failure(500, "numerical_error", message, headers=_DO_NOT_RETRY)
    message = f"the engine failed on {place}, again when it was alone"
    return Failure(500, "internal_error", message, headers=_DO_NOT_RETRY)


def retry_after(seconds: float) -> dict[str, str]:
    """For HTTP clients in whole seconds, for OpenAI's in milliseconds."""
    return {
        "retry-after": str(math.ceil(seconds)),
        "retry-after-ms": str(math.ceil(seconds * 1e3)),
    }


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorResponse]:
    """Litestar's exception handler for every exception; details of a 500 go to the log only."""
    path = request.scope["path"]
    failure = failure_of(error, request.method, path)
    if failure.status >= 500 and not isinstance(error, UnavailableError):  # noqa: PLR2004
        logger.error(
            "Internal error",
            exc_info=error,
            extra={"fields": {"request_id": request_id(request.scope), "path": path}},
        )
    else:
        logger.info(
            "request refused",
            extra={
                "fields": {
                    "request_id": request_id(request.scope),
                    "method": request.method,
                    "path": path,
                    "status": failure.status,
                    "type": failure.type,
                    "param": failure.param,
                }
            },
        )
    return Response(
        _envelope(failure),
        status_code=failure.status,
        media_type=MediaType.JSON,
        headers=dict(failure.headers),
    )


def raw_answer(failure: Failure, answered_id: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of a refusal that closes its connection, without the framework."""
    body = msgspec.json.encode(_envelope(failure))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": answered_id,
        "connection": "close",
        **failure.headers,
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()], body


def _envelope(failure: Failure) -> ErrorResponse:
    message = _shortened(failure.message)
    code = failure.code or failure.status
    return ErrorResponse(ErrorDetail(message, failure.type, failure.param, code))


async def refuse_at_the_end(scope: Scope, send: Send) -> None:
    """A 503 for a request that the server stops before it could be read or answered.

    Where an answer has begun there is nothing left to say, and the server refuses to.
    """
    headers, body = raw_answer(STOPPING, request_id(scope))
    with contextlib.suppress(RuntimeError):
        await send({"type": "http.response.start", "status": STOPPING.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


STOPPING = Failure(
    503,
    "service_unavailable",
    "the server is stopping",
    headers=retry_after(NOT_READY_RETRY_SECONDS),
)
"""What a request gets that the server stops before it could be read or answered."""


def _shortened(message: str) -> str:
    """Messages quote what was sent, which may be megabytes."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{message[:half]} … {message[-half:]}"


def _refused_by_framework(error: HTTPException, method: str, path: str) -> Failure:
    message = error.detail
    headers = error.headers or {}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{method} is not allowed on {path}; allowed: {headers.get('allow')}"
    elif message == HTTPStatus.NOT_FOUND.phrase:  # no route said more
        message = f"unknown path: {method} {path}"
    extra = error.extra if isinstance(error.extra, dict) else {}
    return Failure(
        error.status_code,
        "invalid_request_error",
        message,
        param=extra.get("param"),
        code=extra.get("code"),
        headers=headers,
    )
