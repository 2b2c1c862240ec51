"""Many clients connect at once to a server whose queue is full.

.venv/bin/python -m benchmarks.stampede
"""

import asyncio
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import attrs
from bge_m3_server.domain import CostModel

from benchmarks.harness import Client, ForgetfulBackend, served_engine
from tests.support.serve import Address

COST = CostModel(1.0, 0.0, 256)
QUEUE_TOKENS = 2000


@attrs.define
class StampedeReport:
    """Answers by status, clients that got none, answers without `retry-after-ms`, `/live`."""

    answers: Counter = attrs.field(factory=Counter)
    resets: int = 0
    hints_missing: int = 0
    slowest_live_seconds: float = 0.0
    largest_queue_tokens: int = 0


def run(clients: int) -> StampedeReport:
    """Let so many clients, in a process of their own, ask at the same moment."""
    backend = ForgetfulBackend(seconds_per_position=200e-6)
    settings = {"queue_tokens": QUEUE_TOKENS}
    largest = 0
    with (
        served_engine(backend, COST, **settings) as (engine, address),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        stampede = process.submit(rush, address, clients)
        while not stampede.done():
            largest = max(largest, engine.status().queue.waiting_tokens)
            time.sleep(0.005)
    report = stampede.result()
    report.largest_queue_tokens = largest
    return report


def rush(address: Address, clients: int) -> StampedeReport:
    """The clients, and a prober among them."""
    report = StampedeReport()

    async def ask() -> None:
        client = Client(address)
        try:
            status, headers, _ = await client.ask(
                "POST", "/v1/embeddings", {"input": ["word " * 30] * 4}
            )
        except (ConnectionError, asyncio.IncompleteReadError):
            report.resets += 1
            return
        report.answers[status] += 1
        report.hints_missing += status == 429 and "retry-after-ms" not in headers
        client.close()

    async def probe(stampede: asyncio.Future) -> None:
        client = Client(address)
        while not stampede.done():
            started = time.monotonic()
            await client.ask("GET", "/live")
            took = time.monotonic() - started
            report.slowest_live_seconds = max(report.slowest_live_seconds, took)
            await asyncio.sleep(0.01)
        client.close()

    async def stampede() -> None:
        everybody = asyncio.gather(*(ask() for _ in range(clients)))
        await asyncio.gather(everybody, probe(everybody))

    asyncio.run(stampede())
    return report


def main() -> None:
    """Print the figures."""
    report = run(1000)
    print(f"answers: {dict(report.answers)}, resets: {report.resets}")
    print(f"429 without a hint: {report.hints_missing}")
    print(f"slowest /live: {report.slowest_live_seconds * 1e3:.0f} ms")
    print(f"largest queue: {report.largest_queue_tokens} of {QUEUE_TOKENS} tokens")


if __name__ == "__main__":
    main()
