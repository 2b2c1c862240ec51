"""`x-request-id`: kept when the client sent a harmless one, made otherwise, on every response."""

import re
import uuid

from litestar.types import Message, Scope

_HEADER = b"x-request-id"
_HARMLESS = re.compile(rb"[\x21-\x7e]{1,128}")
_STATE_KEY = "request_id"


def request_id(scope: Scope) -> str:
    """The id of this request, the same at every call."""
    state = scope["state"]
    if _STATE_KEY not in state:
        sent = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        state[_STATE_KEY] = sent.decode("ascii") if _HARMLESS.fullmatch(sent) else str(uuid.uuid4())
    known: str = state[_STATE_KEY]
    return known


async def send_request_id(message: Message, scope: Scope) -> None:
    """Litestar's before-send hook; it also sees what never reaches a route, such as a 404."""
    if message["type"] == "http.response.start":
        headers = [*message["headers"], (_HEADER, request_id(scope).encode("ascii"))]
        message["headers"] = headers
