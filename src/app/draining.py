"""The HTTP server, with an end that load balancers and clients can follow."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from .engine import Engine
from .http.protocol import EnvelopeProtocol
from .listeners import HANDSHAKE_SECONDS, accept_the_last, shared, turn_newcomers_away

logger = logging.getLogger(__name__)

EXIT_CUT_SHORT = 3
"""The stop was cut short: work that had been accepted was answered with 503."""

SAME_SIGNAL_SECONDS = 0.3
"""Signals that come so close together are one."""

LAST_RESETS_SECONDS = 0.5
"""So long may the last 503 take, before connections that nobody reads from are reset."""

LAST_RESORT_SECONDS = 2.0
"""The process ends so long after that, come what may."""

LAST_ANSWERS_SECONDS = 2.0
"""From the end of the drain limit, so long may clients take to read their 503."""


class DrainingServer(uvicorn.Server):
    """uvicorn, with a stop that load balancers and clients can follow.

    On SIGTERM: not ready, but serving, for `grace_seconds`; then no new connections, and
    `drain_seconds` to finish what was accepted. SIGINT comes from somebody at a terminal: no
    grace. A second signal, or the end of that time, answers everything that waits with 503.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, *, grace_seconds: float, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self.exit_code = 0
        self.on_listening: Callable[[], None] = lambda: None
        self.on_stopping: Callable[[], None] = lambda: None
        self._engine = engine
        self._grace_seconds = grace_seconds
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[socket.socket] = []
        self._is_draining = False
        self._stopping_since = 0.0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def main_loop(self) -> None:
        """Wait for the end; only from here on does uvicorn stop as it should when told to."""
        # Now, because at the end clients may hold all descriptors that there are.
        self._listeners = [
            shared(listener.fileno()) for server in self.servers for listener in server.sockets
        ]
        self.on_listening()
        await super().main_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, but not before every connection that was made is taken in."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            turn_newcomers_away(listener)
        await asyncio.sleep(HANDSHAKE_SECONDS)
        for server in self.servers:
            server.close()
        for connection in accept_the_last(self._listeners):
            await loop.connect_accepted_socket(self._protocol, connection)
        await asyncio.sleep(0)  # the loop introduces those that it has accepted itself
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def handle_exit(self, sig: int, _: FrameType | None) -> None:
        """Called by the signal, amid anything: the loop does the work."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._begin_stop, sig)

    def _begin_stop(self, sig: int) -> None:
        if self._loop is None:
            return
        now = self._loop.time()
        if self._is_draining:
            # A signal to a process group comes twice at once where a parent passes it on, too.
            if now - self._stopping_since > SAME_SIGNAL_SECONDS:
                self._cut_short("a second signal came")
            return
        self._is_draining = True
        self._stopping_since = now
        grace_seconds = self._grace_seconds if sig == signal.SIGTERM else 0
        if not self._engine.status().ready:
            grace_seconds = 0
        logger.info("Stopping: not ready any more", extra={"fields": {"signal": sig}})
        self.on_stopping()
        self._part_with_clients()
        self._engine.drain()
        self._loop.call_later(grace_seconds, self._stop_accepting)
        self._loop.call_later(
            grace_seconds + self._drain_seconds, self._cut_short, "the drain limit has passed"
        )

    def _part_with_clients(self) -> None:
        """Every answer is the last on its connection: nobody asks on one that is about to close."""
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        for connection in self.server_state.connections:
            if isinstance(connection, EnvelopeProtocol):
                connection.end_with_answer()

    def _stop_accepting(self) -> None:
        self.should_exit = True

    def _cut_short(self, reason: str) -> None:
        logger.error("Stop cut short: waiting requests get 503", extra={"fields": {"why": reason}})
        self.exit_code = EXIT_CUT_SHORT
        self._engine.abort()
        self.should_exit = True
        if self._loop:
            self._loop.call_later(LAST_ANSWERS_SECONDS, self._leave)

    def _leave(self) -> None:
        """Answer whoever is still being read, then close what nobody reads from."""
        for request in list(self.server_state.tasks):
            request.cancel()
        if self._loop:
            self._loop.call_later(LAST_RESETS_SECONDS, self._abandon)

    def _abandon(self) -> None:
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()  # wakes whoever waits for its client to read
        self.force_exit = True
        # Whatever still holds the loop now must not hold the process.
        last_resort = threading.Timer(LAST_RESORT_SECONDS, os._exit, [EXIT_CUT_SHORT])
        last_resort.daemon = True
        last_resort.start()
