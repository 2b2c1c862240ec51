"""How much of the engine's rate is left over HTTP, on the very chunks that the server made.

A server notes the lengths in each forward pass. While it rests, a second process runs such passes
one after the other on the same engine and nothing else. The share is the time of the passes alone,
over the time in which the clients had all their answers; several rounds in turn, of which the
median counts.

    .venv/bin/python -m benchmarks.same_chunks .cache/bench/checkpoint-24-250002 --ep openvino
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import httpx
import numpy as np
from bge_m3_server.app.config import load_config
from bge_m3_server.app.container import build_container
from bge_m3_server.app.loading import LoadedModel
from bge_m3_server.app.server import serve
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.ports import InferenceBackend
from bge_m3_server.domain.types import Floats, Heads, TokenBatch, TokenizedText

from benchmarks.performance.workloads import TextMaker, Workload, text_maker, workloads

ROWS = ("1×16", "8×128", "32×~160", "64 mixed", "queries at 1", "queries at 8", "queries at 32")
BAR = 0.9
START_SECONDS = 120.0

Passes = Sequence[Sequence[int]]
"""Tokens of each row of each forward pass."""


class Noting:
    """A backend that tells the lengths in every pass."""

    def __init__(self, backend: InferenceBackend, tell: Connection) -> None:
        self.contract = backend.contract
        self.projections = backend.projections
        self.release = backend.release
        self.close = backend.close
        self._backend = backend
        self._tell = tell

    def run(self, batch: TokenBatch, outputs: Sequence[str]) -> Mapping[str, Floats]:
        """As the backend does."""
        self._tell.send(batch.lengths.tolist())
        return self._backend.run(batch, outputs)


def _serve(environment: Mapping[str, str], tell: Connection) -> None:
    config = load_config(environment, "linux")
    container = build_container(config)
    load = container.load_model

    def load_noting() -> LoadedModel:
        model = load()
        return attrs.evolve(model, backends=tuple(Noting(each, tell) for each in model.backends))

    container.engine(load_model=load_noting)
    serve(config, container)


def _replay(environment: Mapping[str, str], asked: Connection) -> None:
    backend = build_container(load_config(environment, "linux")).load_model().backends[0]
    outputs = backend.contract.outputs_for(Heads.DENSE)
    asked.send("ready")
    ids = np.random.default_rng(0).integers(4, 250_000, 8192)
    while passes := asked.recv():
        batches = [pad([TokenizedText(ids[:length]) for length in row]) for row in passes]
        started = time.perf_counter()
        for batch in batches:
            backend.run(batch, outputs)
        asked.send(time.perf_counter() - started)


@contextlib.contextmanager
def _process(target: object, environment: Mapping[str, str]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(environment, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.terminate()
        process.join(30)


def _received(tell: Connection) -> Passes:
    passes = []
    while tell.poll(0.2):
        passes.append(tell.recv())
    return passes


def _ask(port: int, maker: TextMaker, row: Workload, round_: int, seconds: float) -> float:
    """Closed-loop clients on kept connections; returns the seconds until the last answer."""
    clients = max(row.concurrency, 1)
    started = time.perf_counter()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        for body in bodies[number]:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == http.HTTPStatus.OK
            if time.perf_counter() - started > seconds:
                return
        connection.close()

    count = int(seconds * 40 / clients) + 1 if row.concurrency else 4
    bodies = [
        [
            json.dumps(
                {"input": maker.texts(row.name, (round_ * clients + n) * count + i, row.lengths)}
            )
            for i in range(count)
        ]
        for n in range(clients)
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, range(clients)))
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ep", default="openvino")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench/product"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each row and round")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "BGE_M3_MODEL_DIR": str(arguments.directory),
        "BGE_M3_CACHE_DIR": str(arguments.cache),
        "BGE_M3_EP": arguments.ep,
        "BGE_M3_MODEL": "w8",
        "BGE_M3_DISABLE_AUTO_BUDGET": "1",
        "RUST_LOG": "warn",
        "BGE_M3_BIND": f"127.0.0.1:{port}",
    }
    maker = text_maker(arguments.directory / "tokenizer.json")
    rows = {row.name: row for row in workloads()}
    shares: dict[str, list[float]] = {name: [] for name in ROWS}
    with _process(_serve, environment) as tell, _process(_replay, environment) as replay:
        replay.recv()
        _wait_until_ready(port)
        for round_ in range(arguments.rounds + 1):  # the first one warms up
            for name in ROWS:
                _received(tell)
                served_seconds = _ask(port, maker, rows[name], round_, arguments.seconds)
                passes = _received(tell)
                replay.send(passes)
                alone_seconds = replay.recv()
                if round_:
                    shares[name].append(alone_seconds / served_seconds)
                print(
                    f"{name}: {len(passes)} passes, alone {alone_seconds:.2f} s, "
                    f"over HTTP {served_seconds:.2f} s",
                    flush=True,
                )
    for name, found in shares.items():
        median = statistics.median(found)
        mark = "ok" if median >= BAR else "MISSED"
        print(f"{name:16} {median:.1%} ({min(found):.1%} to {max(found):.1%}) {mark}")


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/ready").is_success:
                return
        time.sleep(0.2)
    raise SystemExit("the server is not ready")


if __name__ == "__main__":
    main()
