"""A real HTTP server around an ASGI application, in a thread of the test process."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import uvicorn
from bge_m3_server.app.http.protocol import READ_TIMEOUT_SECONDS, envelope_protocol


@attrs.frozen
class Address:
    """Where a served application listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def exchange(self, request: bytes, timeout_seconds: float = 10) -> bytes:
        """Send bytes as they are; everything the server says until it closes the connection."""
        with socket.create_connection((self.host, self.port), timeout_seconds) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))


class _Server(uvicorn.Server):
    """Tells when it has started, so that nobody polls for it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.settled.set()


@contextlib.contextmanager
def serve(app: Any, read_timeout_seconds: float = READ_TIMEOUT_SECONDS) -> Iterator[Address]:
    """Run `app` under uvicorn on a free loopback port until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ws="none",
            http=envelope_protocol(read_timeout_seconds),
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert server.settled.wait(10)
        yield Address(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
