"""From any exception to the one error envelope: the only place that knows both sides."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import attrs
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException

from ...domain.errors import InvalidInputError, NonFiniteOutputError, UnavailableError
from .request_id import request_id
from .schemas import ErrorDetail, ErrorResponse

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this answer; the number is the one that proxies log for a client that left."""


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
            return Failure(400, "invalid_request_error", str(error), error.param)
        case UnavailableError():
            return Failure(503, "service_unavailable", str(error))
        case NonFiniteOutputError():
            place = "a text" if error.index is None else f"input[{error.index}]"
            message = f"the model returned a non-finite embedding for {place}"
            return Failure(500, "numerical_error", message)
        case HTTPException() if error.status_code < 500:  # noqa: PLR2004  the 5xx class begins here
            return _refused_by_framework(error, method, path)
        case _:
            return Failure(500, "internal_error", "internal server error")


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
    detail = ErrorDetail(
        failure.message, failure.type, failure.param, failure.code or failure.status
    )
    return Response(
        ErrorResponse(detail),
        status_code=failure.status,
        media_type=MediaType.JSON,
        headers=dict(failure.headers),
    )


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
