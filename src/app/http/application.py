"""The HTTP application: routes, limits and error shape, put together around one service."""

import asyncio
import time
from typing import Any

import attrs
from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.enums import HttpMethod, ScopeType
from litestar.types import Receive, Scope, Send

from ...domain.ports import Clock, Telemetry
from ..service import EmbeddingService
from .bodies import BODY_ROOM, BodyRoom, Receiving, without_bound
from .docs import openapi_config
from .embedding_door import EmbeddingDoor
from .errors import answer_error, refuse_at_the_end
from .health import deep_health, health, live, ready
from .native import create_both_embeddings, create_sparse_embeddings
from .openai import create_embeddings, get_model, list_models
from .request_id import send_request_id
from .turns import Turns

PROBES = {"/live", "/ready", "/health"}
"""Routes that neither wait nor cause work."""


@attrs.frozen
class HttpLimits:
    """What one request may ask for, texts and bytes of its body; and how all bodies are counted."""

    max_batch: int
    max_body_bytes: int
    receiving: Receiving = without_bound


def create_app(
    service: EmbeddingService,
    limits: HttpLimits,
    telemetry: Telemetry,
    version: str,
    clock: Clock,
) -> Litestar:
    """The ASGI application that answers for `service`; it starts and stops nothing itself."""
    door = EmbeddingDoor(service, limits.max_batch, telemetry, clock)
    served_since = int(time.time())
    return _Application(
        route_handlers=[
            create_embeddings,
            create_sparse_embeddings,
            create_both_embeddings,
            list_models,
            get_model,
            health,
            deep_health,
            ready,
            live,
        ],
        dependencies={
            "door": Provide(lambda: door, sync_to_thread=False),
            "served_since": Provide(lambda: served_since, sync_to_thread=False),
        },
        exception_handlers={Exception: answer_error},
        before_send=[send_request_id],
        state=State({BODY_ROOM: BodyRoom(limits.receiving)}),
        request_max_body_size=limits.max_body_bytes,
        openapi_config=openapi_config(version),
        logging_config=None,  # the process decides how it logs
        debug=False,
    )


class _Application(Litestar):
    """Litestar, with three rules of its own.

    HEAD is answered with what GET would say; the HTTP server leaves the body out. All requests but
    probes begin in turns. What the server stops before it is answered gets a 503.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  Litestar's own
        super().__init__(**options)
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        if scope["type"] != ScopeType.HTTP:
            await super().__call__(scope, receive, send)
            return
        if scope["method"] == HttpMethod.HEAD:
            scope = {**scope, "method": HttpMethod.GET}
        try:
            if scope["path"] not in PROBES:
                await self._turns.wait()
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            await refuse_at_the_end(scope, send)
