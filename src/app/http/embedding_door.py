"""What all embedding routes share: readiness → validation → engine → answer → log line."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import attrs
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException

from ...domain.errors import InvalidInputError, NotReadyError, NoWorkersError
from ...domain.ports import Clock, Telemetry
from ...domain.types import Heads
from ...domain.validation import replace_lone_surrogates, validate_texts
from ..service import EmbeddingService, JobResult, ModelInfo
from .encoding import number_count
from .errors import CLIENT_CLOSED_REQUEST
from .request_id import request_id
from .request_log import log_completion, log_truncation

T = TypeVar("T")

TIMEOUT_HEADER = "x-request-timeout-ms"
TIMEOUT_DIGITS = 10

INLINE_ANSWER_NUMBERS = 8192
"""Answers of up to so many numbers are written on the event loop, in about 0.2 ms."""


class Answer(Response[T]):
    """An answer of shape `T` that is already JSON."""

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        # Litestar passes bytes through; `T` is there for the OpenAPI document.
        super().__init__(body, media_type=MediaType.JSON, headers=headers)  # type: ignore[arg-type]


@attrs.frozen
class EmbeddingDoor:
    """The way from a decoded request to the engine and back."""

    service: EmbeddingService
    max_batch: int
    telemetry: Telemetry
    clock: Clock

    def ready_model(self) -> ModelInfo:
        """The model that will answer.

        Raises:
            UnavailableError: there is none, or nobody to run it.
        """
        status = self.service.status()
        if not status.ready or status.model is None:
            raise NotReadyError("the server is stopping" if status.draining else "model not ready")
        if status.live_workers == 0:
            raise NoWorkersError("no workers available")
        return status.model

    async def answer(
        self,
        request: Request[Any, Any, Any],
        *,
        route: str,
        texts: str | list[str],
        heads: Heads,
        write: Callable[[JobResult], bytes],
    ) -> Answer[Any]:
        """Embed `texts` in one pass over the model and write the answer.

        Raises:
            InvalidInputError: the texts break a rule, or the model lacks one of `heads`.
            UnavailableError, InferenceError: as the engine says.
        """
        started = self.clock()
        texts = [texts] if isinstance(texts, str) else texts
        validate_texts(texts, self.max_batch)
        timeout_seconds = _timeout_seconds(request)
        attributes: dict[str, str | int] = {
            "batch_size": len(texts),
            "request_id": request_id(request.scope),
        }
        with self.telemetry.request(route, attributes):
            harmless = [replace_lone_surrogates(text) for text in texts]
            job = self.service.embed(harmless, heads, timeout_seconds=timeout_seconds)
            result = await _unless_client_leaves(request, job)
            embedded = self.clock()
            if number_count(result) > INLINE_ANSWER_NUMBERS:
                body = await asyncio.to_thread(write, result)
            else:
                body = write(result)
        finished = self.clock()
        log_completion(
            request,
            route,
            result,
            total_ms=(finished - started) * 1e3,
            serialize_ms=(finished - embedded) * 1e3,
        )
        headers: dict[str, str] = {}
        if result.truncated_indices:
            log_truncation(request, route, result)
            headers["x-truncated-inputs"] = ",".join(map(str, result.truncated_indices))
        return Answer(body, headers)


def _timeout_seconds(request: Request[Any, Any, Any]) -> float | None:
    """How long the client says that it waits."""
    raw = request.headers.get(TIMEOUT_HEADER)
    if raw is None:
        return None
    is_number = raw.isascii() and raw.isdigit() and len(raw) <= TIMEOUT_DIGITS
    if not is_number or int(raw) == 0:
        raise InvalidInputError(
            f"{TIMEOUT_HEADER}: {raw[:20]!r} is not a whole number of milliseconds between 1 and "
            f"{10**TIMEOUT_DIGITS - 1}",
            param=TIMEOUT_HEADER,
        )
    return int(raw) / 1e3


async def _unless_client_leaves(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client closes its connection first."""
    task = asyncio.create_task(work)
    departure = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait({task, departure}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(
                "the client closed the connection", status_code=CLIENT_CLOSED_REQUEST
            )
        return task.result()
    finally:
        task.cancel()
        departure.cancel()
        await asyncio.gather(task, departure, return_exceptions=True)


async def _departure(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
