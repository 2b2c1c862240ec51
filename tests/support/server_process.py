"""`bge-m3-server serve` as a real process on a real socket."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import attrs
import httpx

START_TIMEOUT_SECONDS = 120
READY_LINE = "Models ready — accepting requests"
_BASE_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "COVERAGE_PROCESS_START")


def clean_environment(**variables: str) -> dict[str, str]:
    """The few variables a process needs, plus `variables`: nothing leaks in from outside."""
    kept = {name: os.environ[name] for name in _BASE_ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONWARNINGS": "error::ResourceWarning", **variables}


def run_cli(*arguments: str, timeout: float = 120, **variables: str):
    """One short-lived command; returns the completed process with its text output."""
    return subprocess.run(
        [sys.executable, "-m", "bge_m3_server.app.cli", *arguments],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(script: str, **variables: str) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def cli(*arguments: str, **variables: str) -> Iterator[subprocess.Popen]:
    """A command that is at work, with its output in pipes; ended at the end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so in a shell's background: inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-m", "bge_m3_server.app.cli", *arguments],
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@attrs.define
class ServerProcess:
    """A running server; `log` grows as it writes."""

    process: subprocess.Popen
    log: list[str] = attrs.field(factory=list)
    url: str = ""

    def wait_for_log(self, text: str, timeout_seconds: float = START_TIMEOUT_SECONDS) -> str:
        """The first log line that contains `text`."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            for line in list(self.log):
                if text in line:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} in the log:\n" + "".join(self.log))

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def running_server(
    environment: Mapping[str, str],
    *,
    wait_until_ready: bool = True,
    prefix: Sequence[str] = (),
) -> Iterator[ServerProcess]:
    """Start a server on a free port and stop it at the end.

    It measures nothing, so that no test shares the processor with a probe: tests of the probe set
    `BGE_M3_DISABLE_AUTO_BUDGET` to nothing. `prefix` is a command that runs the one
    behind it.
    """
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "bge_m3_server.app.cli", "serve"],
        env=clean_environment(
            **{
                "BGE_M3_BIND": "127.0.0.1:0",
                "BGE_M3_SHUTDOWN_GRACE_SECS": "0",
                "BGE_M3_DISABLE_AUTO_BUDGET": "1",
                **environment,
            }
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = ServerProcess(process)
    reader = threading.Thread(target=lambda: server.log.extend(process.stdout), daemon=True)
    reader.start()
    try:
        line = server.wait_for_log("Uvicorn running on")
        server.url = re.search(r"http://[\d.:]+\d", line)[0]
        if wait_until_ready:
            server.wait_for_log(READY_LINE)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(timeout=10)
        process.stdout.close()


def post(server: ServerProcess, path: str, body: object, **options) -> httpx.Response:
    """POST JSON."""
    return httpx.post(server.url + path, json=body, timeout=60, **options)
