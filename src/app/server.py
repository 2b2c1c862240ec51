"""From a wired container to a process that answers requests and stops cleanly."""

import asyncio
import gc
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from .. import __version__
from ..domain.errors import ConfigError, ModelError
from .config import Config
from .container import Container
from .engine import Engine
from .http.protocol import EnvelopeProtocol, envelope_protocol
from .tuning import Tuner

logger = logging.getLogger(__name__)

EXIT_FAILED_START = 1
EXIT_BAD_CONFIGURATION = 2
EXIT_CUT_SHORT = 3
"""The stop was cut short: work that had been accepted was answered with 503."""

KEEP_ALIVE_SECONDS = 75
"""An idle connection outlives the usual pools of clients and load balancers (5 s in httpx, 60 s in
AWS's): whoever closes second never sends into a closed connection."""

STOP_SECONDS = 10.0
"""All requests are answered by then: a worker still at work hangs, or nobody waits for it."""

PROBE_STOP_SECONDS = 1.0
"""A forward pass of the probe that takes longer is left behind."""

SAME_SIGNAL_SECONDS = 0.3
"""Signals that come so close together are one."""

LAST_RESETS_SECONDS = 0.5
"""So long may the last 503 take, before connections that nobody reads from are reset."""

LAST_RESORT_SECONDS = 2.0
"""The process ends so long after that, come what may."""

LAST_ANSWERS_SECONDS = 2.0
"""From the end of the drain limit, so long may clients take to read their 503."""


def serve(config: Config, container: Container) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code.

    The listener is open, and `/health` answers ``loading``, while the model loads.
    """
    container.set_up_logging()
    _log_start(config)
    engine: Engine = container.engine()
    tuner: Tuner = container.tuner()
    server = DrainingServer(
        uvicorn.Config(
            container.application(),
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            server_header=False,
            http=envelope_protocol(config.read_timeout_seconds),
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ),
        engine,
        grace_seconds=config.shutdown_grace_seconds,
        drain_seconds=config.drain_timeout_seconds,
    )
    failures: list[BaseException] = []

    def load() -> None:
        try:
            _load(engine, tuner, config)
        except BaseException as error:  # noqa: BLE001  whatever it is, the start has failed
            failures.append(error)
            server.should_exit = True

    loader = threading.Thread(target=load, name="loader", daemon=True)
    server.on_listening = loader.start
    server.on_stopping = tuner.cancel
    try:
        server.run()
    except SystemExit:  # uvicorn has logged why it cannot listen
        failures.append(
            OSError(
                f"cannot listen on {config.host}:{config.port}; is another server there? "
                "Set BGE_M3_BIND to a free address"
            )
        )
    for error in failures:
        is_explained = isinstance(error, ConfigError | ModelError | OSError)
        logger.error("start failed: %s", error, exc_info=None if is_explained else error)
        if "\n" in str(error):  # which a log line cannot show as it is meant
            sys.stderr.write(f"bge-m3-server: {error}\n")
    code = exit_code_of(failures) or server.exit_code
    has_probe_ended = tuner.stop(PROBE_STOP_SECONDS)
    stopper = threading.Thread(target=engine.stop, name="stopper", daemon=True)
    if not loader.is_alive() and server.exit_code != EXIT_CUT_SHORT:
        stopper.start()
        stopper.join(STOP_SECONDS)
    container.shut_down_telemetry()
    # A download, a load or a forward pass cannot be interrupted: leave it behind.
    is_at_work = loader.is_alive() or stopper.is_alive() or not has_probe_ended
    if is_at_work or server.exit_code == EXIT_CUT_SHORT:
        logging.shutdown()
        os._exit(code)
    return code


def exit_code_of(failures: Sequence[BaseException]) -> int:
    """What a start that failed ends with; 0 if it did not."""
    if any(isinstance(error, ConfigError) for error in failures):
        return EXIT_BAD_CONFIGURATION
    return EXIT_FAILED_START if failures else 0


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
        self._is_draining = False
        self._stopping_since = 0.0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def main_loop(self) -> None:
        """Wait for the end; only from here on does uvicorn stop as it should when told to."""
        keep_for_good()
        self.on_listening()
        await super().main_loop()

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


def keep_for_good() -> None:
    """Let the garbage collector leave alone what is there now: code, routes, schemas.

    To look through it takes 35 to 120 ms, several times in every thousand requests, and nothing
    is answered meanwhile. The model comes later, so that an idle one can go.
    """
    gc.collect()
    gc.freeze()


def _load(engine: Engine, tuner: Tuner, config: Config) -> None:
    started = time.monotonic()
    engine.load()
    model = engine.status().model
    assert model is not None  # noqa: S101  load() returned
    logger.info(
        "Models ready — accepting requests",
        extra={
            "fields": {
                "model": model.model_id,
                "dimensions": model.dimensions,
                "max_tokens": model.max_tokens,
                "bind": f"{config.host}:{config.port}",
                "elapsed_ms": round((time.monotonic() - started) * 1e3),
            }
        },
    )
    tuner.start(engine.set_cost_model)
    if model.notice:
        logger.warning(model.notice)
    url = f"http://{local_host(config.host)}:{config.port}"
    logger.info(
        "Try it: curl -s %s/v1/embeddings -H 'Content-Type: application/json' "
        """-d '{"input": "Hello, world"}'""",
        url,
    )


def local_host(host: str) -> str:
    """The host part of a URL that reaches a server bound to `host` from the same machine."""
    if host == "0.0.0.0":  # noqa: S104  compared, not bound
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _log_start(config: Config) -> None:
    logger.info(
        "Starting bge-m3-server",
        extra={
            "fields": {
                "version": __version__,
                "python": platform.python_version(),
                "arch": platform.machine(),
                "bind": f"{config.host}:{config.port}",
                "model": str(config.model_dir or config.hub_variant.value),
                "execution_provider": config.execution_provider.value,
                "execution_provider_reason": config.execution_provider_reason,
                "workers": config.workers or "auto",
                "intra_threads": config.intra_threads or "auto",
                "max_batch": config.max_batch,
                "max_seq_length": config.max_seq_length,
                "cache_dir": str(config.cache_dir),
            }
        },
    )
    for notice in config.notices:
        logger.warning(notice)
