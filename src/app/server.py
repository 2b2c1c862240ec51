"""From a wired container to a process that answers requests and stops cleanly."""

import logging
import os
import platform
import signal
import threading
import time

import uvicorn

from .. import __version__
from ..domain.errors import ModelError
from .config import Config
from .container import Container
from .engine import Engine

logger = logging.getLogger(__name__)

GRACEFUL_SHUTDOWN_SECONDS = 30


def serve(config: Config, container: Container) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code.

    The listener is open, and `/health` answers ``loading``, while the model loads.
    """
    container.set_up_logging()
    _log_start(config)
    engine: Engine = container.engine()
    server = uvicorn.Server(
        uvicorn.Config(
            container.application(),
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
        )
    )
    failures: list[BaseException] = []

    def load() -> None:
        try:
            _load(engine, config)
        except BaseException as error:  # noqa: BLE001  whatever it is, the start has failed
            failures.append(error)
            server.should_exit = True

    loader = threading.Thread(target=load, name="loader", daemon=True)
    loader.start()
    # uvicorn raises the signal again once it has drained; by then the work is done.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        server.run()
    except SystemExit:  # uvicorn has logged why it cannot listen
        failures.append(OSError(f"cannot listen on {config.host}:{config.port}"))
    for error in failures:
        is_explained = isinstance(error, ModelError | OSError)
        logger.error("start failed: %s", error, exc_info=None if is_explained else error)
    code = 1 if failures else 0
    if loader.is_alive():  # a download or a load cannot be interrupted: leave it behind
        logging.shutdown()
        os._exit(code)
    engine.stop()
    container.shut_down_telemetry()
    return code


def _load(engine: Engine, config: Config) -> None:
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
                "workers": config.workers,
                "intra_threads": config.intra_threads,
                "max_batch": config.max_batch,
                "max_seq_length": config.max_seq_length,
                "cache_dir": str(config.cache_dir),
            }
        },
    )
    for notice in config.notices:
        logger.warning(notice)
