"""HTTP/1.1 below the application: what is no HTTP still gets this project's error envelope."""

import uuid

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .schemas import ErrorDetail, ErrorResponse


class EnvelopeProtocol(HttpToolsProtocol):
    """uvicorn's parser; a request that cannot be parsed is refused in JSON, with an id."""

    def send_400_response(self, msg: str) -> None:
        """Answer and close: after bytes like these nothing on the connection can be trusted."""
        detail = ErrorDetail(msg, "invalid_request_error", None, 400)
        body = msgspec.json.encode(ErrorResponse(detail))
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {uuid.uuid4()}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
