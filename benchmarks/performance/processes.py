"""Contenders as processes: started, asked, their memory read, stopped."""

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.performance.contenders import Contender, worker
from benchmarks.performance.environments import UnavailableError, last_line
from benchmarks.performance.memory import Memory

Vectors = NDArray[np.float32]
START_SECONDS = 1800
"""Loading, and what some prepare before they load."""

STOP_SECONDS = 20
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class GaveUpError(Exception):
    """A call took longer than is worth waiting for, or its process died."""


@attrs.frozen
class Place:
    """Where contenders run.

    `threads`: CPUs that each process may use, and threads that each is told to use.
    """

    python: Path
    directory: Path
    cache_dir: Path
    threads: int

    def command(self, contender: Contender, port: int) -> list[str]:
        """The interpreter and its arguments."""
        return [str(self.python), *(self._filled(part, port) for part in contender.command)]

    def variables(self, contender: Contender, port: int) -> dict[str, str]:
        """All of the environment: nothing leaks in."""
        return {
            **{name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
            **OFFLINE,
            **dict.fromkeys(THREAD_VARIABLES, str(self.threads)),
            **{name: self._filled(value, port) for name, value in contender.variables.items()},
        }

    def _filled(self, text: str, port: int) -> str:
        return text.format(
            directory=self.directory.resolve(),
            cache=self.cache_dir.resolve(),
            bin=self.python.parent,
            threads=self.threads,
            port=port,
        )


class Running(Protocol):
    """A contender that is loaded; `embed` raises `GaveUpError`."""

    memory: Memory

    def embed(self, texts: Sequence[str], client: int = 0) -> tuple[float, Vectors]:
        """Seconds of the call, and one vector per text."""
        ...


@attrs.define
class WorkerProcess:
    """Asked by lines; the seconds are the engine's own, without the pipe."""

    process: subprocess.Popen[bytes]
    memory: Memory
    limit_seconds: float

    def embed(self, texts: Sequence[str], client: int = 0) -> tuple[float, Vectors]:
        """One call of the library; `client` makes no difference."""
        del client
        with _watchdog(self.process, self.limit_seconds):
            answer = _ask(self.process, {"texts": list(texts)})
        raw = np.frombuffer(base64.b64decode(answer["vectors"]), dtype="<f4")
        return answer["seconds"], raw.reshape(-1, answer["dimensions"])


@attrs.define
class ServerProcess:
    """Asked over HTTP, floats as JSON, on one kept connection per client."""

    process: subprocess.Popen[bytes]
    memory: Memory
    limit_seconds: float
    port: int
    _connections: dict[int, http.client.HTTPConnection] = attrs.field(factory=dict)

    def embed(self, texts: Sequence[str], client: int = 0) -> tuple[float, Vectors]:
        """One request; the seconds end when the last byte is there."""
        if client not in self._connections:
            self._connections[client] = http.client.HTTPConnection(
                "127.0.0.1", self.port, timeout=self.limit_seconds
            )
        connection = self._connections[client]
        body = json.dumps({"model": "bge-m3", "input": list(texts)})
        started = time.perf_counter()
        try:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = (
                f"no answer within {self.limit_seconds:.0f} s"
                if isinstance(error, TimeoutError)
                else error
            )
            raise GaveUpError(str(reason)) from error
        seconds = time.perf_counter() - started
        if response.status != http.HTTPStatus.OK:
            raise GaveUpError(f"answered {response.status}: {last_line(content.decode())}")
        items = orjson.loads(content)["data"]
        return seconds, np.array([item["embedding"] for item in items], dtype=np.float32)


@contextlib.contextmanager
def running(contender: Contender, place: Place, limit_seconds: float) -> Iterator[Running]:
    """Start, wait until it serves, and stop at the end, with all that it started.

    Raises:
        UnavailableError: it ended before it served, or never served.
    """
    log_path = place.cache_dir / "logs" / f"{contender.name.replace('/', '-')}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            place.command(contender, port),
            env=place.variables(contender, port),
            stdin=subprocess.PIPE,
            stdout=log if contender.is_http else subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    os.sched_setaffinity(process.pid, _cpus(place.threads))  # inherited by all its threads
    memory = Memory(process.pid)
    try:
        try:
            if contender.ready_path is None:
                with _watchdog(process, START_SECONDS):
                    _read(process)
                yield WorkerProcess(process, memory, limit_seconds)
            else:
                _wait_until_ready(process, port, contender.ready_path)
                yield ServerProcess(process, memory, limit_seconds, port)
        except _NeverServedError:
            reason = last_line(log_path.read_text(errors="replace"))
            raise UnavailableError(f"does not load: {reason}") from None
    finally:
        _stop(process)


def prepare(contender: Contender, place: Place) -> None:
    """Make what a contender needs beside the checkpoint, once.

    Raises:
        UnavailableError: that cannot be made.
    """
    preparing = worker(contender.name, contender.environment, contender.engine)
    finished = subprocess.run(
        [*place.command(preparing, 0), "--prepare"],
        env=place.variables(contender, 0),
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise UnavailableError(f"cannot be prepared: {last_line(finished.stderr)}")


class _NeverServedError(Exception):
    """The log tells why."""


def _cpus(count: int) -> set[int]:
    return set(sorted(os.sched_getaffinity(0))[:count])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(process: subprocess.Popen[bytes], question: Mapping[str, object]) -> dict[str, Any]:
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        return _read(process)
    except (OSError, _NeverServedError):
        raise GaveUpError("the process ended, or took too long and was stopped") from None


def _read(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    line = process.stdout.readline()
    if not line:
        raise _NeverServedError
    return json.loads(line)


@contextlib.contextmanager
def _watchdog(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, path: str) -> None:
    """Until `path` answers 200 and, where there is a report of it, no start-up probe runs."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if _get(port, path) is not None and b'"running"' not in (_get(port, "/health") or b""):
            return
        time.sleep(0.2)
    raise _NeverServedError


def _get(port: int, path: str) -> bytes | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return content if response.status == http.HTTPStatus.OK else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its whole session, politely at first."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            break
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
