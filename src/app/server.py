"""From a wired container to a process that answers requests and stops cleanly."""

import gc
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence

import uvicorn

from .. import __version__
from ..domain.errors import BgeM3Error, ConfigError
from .config import Config
from .container import Container
from .draining import EXIT_CUT_SHORT, DrainingServer
from .engine import Engine
from .http.protocol import envelope_protocol
from .tuning import Tuner

logger = logging.getLogger(__name__)

EXIT_FAILED_START = 1
EXIT_BAD_CONFIGURATION = 2

KEEP_ALIVE_SECONDS = 75
"""An idle connection outlives the usual pools of clients and load balancers (5 s in httpx, 60 s in
AWS's): whoever closes second never sends into a closed connection."""

STOP_SECONDS = 10.0
"""All requests are answered by then: a worker still at work hangs, or nobody waits for it."""

PROBE_STOP_SECONDS = 1.0
"""A forward pass of the probe that takes longer is left behind."""


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

    def begin() -> None:
        keep_for_good()
        loader.start()

    server.on_listening = begin
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
        is_explained = isinstance(error, BgeM3Error | OSError)
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
    if code == 0:
        logger.info("Stopped: everything that was accepted has been answered")
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
