"""Request bodies: media type, size, JSON syntax and shape, in this order.

The standard library's decoder is used on purpose. It is as fast as the compiled alternatives on
bodies that are mostly long strings, accepts the lone surrogates that real clients send, and lets
repeated keys and NaN be refused.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import attrs
import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.exceptions import ClientException, HTTPException, InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers import BaseRouteHandler

from ...domain.errors import InvalidInputError
from .errors import CLIENT_CLOSED_REQUEST

T = TypeVar("T", bound=msgspec.Struct)

INLINE_BODY_BYTES = 64 * 1024
"""Bodies up to this size are decoded on the event loop; a thread costs more than they do. Nor are
they counted: a connection has buffers of this size, and a query is not kept out by bulk uploads."""

MAX_WIDE_BYTES = 16 * 1024**2
"""Bodies up to this size are decoded exactly if a character of four bytes is in them: it makes all
characters of the document take as much, and then those of each text that has one."""

MAX_EXACT_VALUES = 100_000
"""Signs of structure up to which a body is decoded exactly; texts have some too, as commas."""

_VALUE_BYTES = (b",", b"[", b"{", b":")
_FOUR_BYTE_LEADS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")
_TOKEN_ID_SHAPE = re.compile(r"got `(int|array)` - at `\$\.input\[")
_JSON_MEDIA_TYPE = re.compile(r"application/(json|[^\s;/]+\+json)\s*(;.*)?", re.IGNORECASE)
_SHAPE_PATH = re.compile(r"`\$\.?(?P<path>[^`]*)`$|missing required field `(?P<missing>[^`]*)`")


async def require_json(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Litestar guard: 415 unless the body is declared as JSON."""
    declared = connection.headers.get("content-type")
    if declared is None or not _JSON_MEDIA_TYPE.fullmatch(declared.strip()):
        found = "no content-type" if declared is None else f"content-type {declared!r}"
        raise HTTPException(
            f"{found}; the body must be sent as content-type: application/json", status_code=415
        )
    encoding = connection.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HTTPException(
            f"content-encoding {encoding!r} is not supported; send the body uncompressed",
            status_code=415,
        )


Receiving = Callable[[], AbstractContextManager[Callable[[int], None]]]
"""Begins to count a body; what its block is given counts more bytes of it, or raises."""

BODY_ROOM = "body_room"
"""Where the application's state has its `BodyRoom`."""


@contextlib.contextmanager
def without_bound() -> Iterator[Callable[[int], None]]:
    """A `Receiving` that counts nothing."""
    yield lambda _: None


@attrs.frozen
class BodyRoom:
    """The memory that bodies of all requests take until they are decoded.

    `decoding`: whose turn it is. To decode a body takes several times its size, for a moment.
    """

    receiving: Receiving
    decoding: asyncio.Lock = attrs.field(factory=asyncio.Lock)


class JsonRequest(Request[Any, Any, Any]):
    """A request whose JSON body becomes the type that the route's `data` argument names."""

    async def body(self) -> bytes:
        """What Litestar looks at before it calls `json`, which reads the body: nothing keeps it."""
        return b"unread"

    async def json(self) -> Any:  # noqa: ANN401  the type is the route's
        """Read, decode and check the body; nothing of it is kept.

        Raises:
            QueueFullError: there is no room for it at the moment.
        """
        room: BodyRoom = self.app.state[BODY_ROOM]
        shape = self.route_handler.parsed_fn_signature.parameters["data"].annotation
        with room.receiving() as count:
            body = await self._read(count)
            if len(body) <= INLINE_BODY_BYTES:
                return decode_body(body, shape)
            async with room.decoding:
                return await asyncio.to_thread(decode_body, body, shape)

    async def _read(self, count: Callable[[int], None]) -> bytearray:
        """The whole body; reading stops as soon as it is too long."""
        limit = self.route_handler.resolve_request_max_body_size() or 0
        announced = self.content_length or 0
        body, counted = bytearray(), 0
        try:
            if INLINE_BODY_BYTES < announced <= limit:
                counted = announced
                count(counted)
            async for piece in self.stream():
                body += piece
                if len(body) > max(counted, INLINE_BODY_BYTES):
                    count(len(body) - counted)
                    counted = len(body)
        except RequestEntityTooLarge:
            message = f"request body exceeds maximum {limit} bytes; send fewer texts per request"
            raise RequestEntityTooLarge(message) from None
        except InternalServerException as error:
            raise HTTPException(error.detail, status_code=CLIENT_CLOSED_REQUEST) from None
        if not body:
            raise ClientException("request body is empty; a JSON object is expected")
        return body


def decode_body(body: bytes | bytearray, shape: type[T]) -> T:
    """Decode JSON into a msgspec struct.

    Raises:
        ClientException: 400, the body is not JSON.
        InvalidInputError: `input` holds token ids.
        HTTPException: 422, valid JSON of the wrong shape; the message names the field.
    """
    if sum(map(body.count, _VALUE_BYTES)) > MAX_EXACT_VALUES or (
        len(body) > MAX_WIDE_BYTES and any(lead in body for lead in _FOUR_BYTE_LEADS)
    ):
        return _decode_lean(body, shape)
    try:
        value = _DECODER.decode(body.decode("utf-8-sig"))
    except RecursionError:
        raise ClientException("invalid JSON: nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise ClientException(f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _wrong_shape("Expected `object`, got " + type(value).__name__, None)
    texts = value.get("input")
    if isinstance(texts, list) and texts and all(_is_token_ids(text) for text in texts):
        raise _token_ids()
    known = {name: item for name, item in value.items() if name in shape.__struct_fields__}
    try:
        return msgspec.convert(known, shape)
    except msgspec.ValidationError as error:
        raise _shape_error(error) from None


def _decode_lean(body: bytes | bytearray, shape: type[T]) -> T:
    """Decode without building what no field asks for, and only up to the first wrong value.

    The exact decoder would hold the interpreter for seconds over millions of values, and makes the
    whole document a string before it begins. This one takes the last of repeated keys, and refuses
    lone surrogates.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except RecursionError:
        raise ClientException("invalid JSON: nested too deeply") from None
    except msgspec.ValidationError as error:
        if _TOKEN_ID_SHAPE.search(str(error)):
            raise _token_ids() from None
        raise _shape_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientException(f"invalid JSON: {error}") from None


def _shape_error(error: msgspec.ValidationError) -> HTTPException:
    where = _SHAPE_PATH.search(str(error))
    return _wrong_shape(str(error), where and (where["path"] or where["missing"]))


def _wrong_shape(message: str, param: str | None) -> HTTPException:
    return HTTPException(message, status_code=422, extra={"param": param})


def _token_ids() -> InvalidInputError:
    return InvalidInputError(
        "input must be text: token ids of another tokenizer would give wrong vectors. "
        "With LangChain, set check_embedding_ctx_length=False on OpenAIEmbeddings",
        param="input",
    )


def _is_token_ids(value: object) -> bool:
    ids = value if isinstance(value, list) else [value]
    return bool(ids) and all(type(item) is int for item in ids)  # a bool is no id


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"the key {name!r} is repeated")
        members[name] = value
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
