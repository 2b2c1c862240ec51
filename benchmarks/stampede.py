"""Many clients connect at once to a server whose queue is full, and come back until it is not.

.venv/bin/python -m benchmarks.stampede
"""

import argparse
import asyncio
import http.client
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from statistics import median

import attrs
from bge_m3_server.domain import CostModel

from benchmarks.harness import Client, ForgetfulBackend, served_engine
from benchmarks.process_time import cpu_seconds
from tests.support.serve import Address

COST = CostModel(1.0, 0.0, 256)
QUEUE_TOKENS = 2000


LIVE_LIMIT_SECONDS = 0.1
LARGEST_SHARE_BEFORE_LIVE = 0.2
"""Of the server's work: the same on a machine that is busy otherwise, or slow."""

PAUSE_SECONDS = 0.002


@attrs.define
class StampedeReport:
    """Answers by status, clients that got none, and answers without `retry-after-ms`.

    `slowest_live_seconds`: of `/live`, each time on a new connection, from a process of its own.
    `most_cpu_before_live_seconds`: that the server spent between such a question and its answer: so
    long it let `/live` wait, whatever else the machine does. `cpu_seconds`: for all questions.
    `longest_stall_seconds`: by so much a pause of that process was longer than asked for: what the
    machine is to blame for.
    """

    answers: Counter = attrs.field(factory=Counter)
    resets: int = 0
    hints_missing: int = 0
    live_answers: int = 0
    slowest_live_seconds: float = 0.0
    most_cpu_before_live_seconds: float = 0.0
    cpu_seconds: float = 0.0
    longest_stall_seconds: float = 0.0
    largest_queue_tokens: int = 0

    def problems(self) -> list[str]:
        """What an operator could not accept, whatever the machine does meanwhile."""
        found = []
        if set(self.answers) - {200, 429, 503}:
            found.append(f"answers {dict(self.answers)}")
        if self.resets or self.hints_missing:
            found.append(f"{self.resets} resets, {self.hints_missing} without a time to come back")
        if self.largest_queue_tokens > QUEUE_TOKENS:
            found.append(f"{self.largest_queue_tokens} tokens in a queue of {QUEUE_TOKENS}")
        if self.most_cpu_before_live_seconds > LARGEST_SHARE_BEFORE_LIVE * self.cpu_seconds:
            found.append(
                f"/live waited for {self.most_cpu_before_live_seconds:.2f} s of the "
                f"{self.cpu_seconds:.2f} s of work"
            )
        return found


def run(clients: int) -> StampedeReport:
    """Let so many clients, in a process of their own, ask at the same moment."""
    backend = ForgetfulBackend(seconds_per_position=200e-6)
    settings = {"queue_tokens": QUEUE_TOKENS}
    spawn = multiprocessing.get_context("spawn")
    largest, found, is_over = 0, spawn.SimpleQueue(), spawn.Event()
    with (
        served_engine(backend, COST, **settings) as (engine, address),
        ProcessPoolExecutor(1, spawn) as process,
    ):
        process.submit(time.monotonic).result()
        prober = spawn.Process(target=probe, args=(address, os.getpid(), found, is_over))
        prober.start()
        found.get()  # it has begun
        spent = cpu_seconds(os.getpid())
        stampede = process.submit(rush, address, clients)
        while not stampede.done():
            largest = max(largest, engine.status().queue.waiting_tokens)
            time.sleep(0.005)
        spent = cpu_seconds(os.getpid()) - spent
        is_over.set()
        live = found.get()
        prober.join()
    return attrs.evolve(stampede.result(), largest_queue_tokens=largest, cpu_seconds=spent, **live)


def probe(address: Address, server_pid: int, found: SimpleQueue, is_over: Event) -> None:
    """Ask for `/live` again and again; tells when it begins, and at the end what it saw."""
    count, slowest, most_cpu, stall = 0, 0.0, 0.0, 0.0
    found.put(None)
    while not is_over.is_set():
        started, spent = time.monotonic(), cpu_seconds(server_pid)
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.request("GET", "/live")
        assert connection.getresponse().status == 200
        connection.close()
        answered = time.monotonic()
        most_cpu = max(most_cpu, cpu_seconds(server_pid) - spent)
        time.sleep(PAUSE_SECONDS)
        count += 1
        slowest = max(slowest, answered - started)
        stall = max(stall, time.monotonic() - answered - PAUSE_SECONDS)
    found.put(
        {
            "live_answers": count,
            "slowest_live_seconds": slowest,
            "most_cpu_before_live_seconds": most_cpu,
            "longest_stall_seconds": stall,
        }
    )


def rush(address: Address, clients: int) -> StampedeReport:
    """The clients."""
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

    async def stampede() -> None:
        await asyncio.gather(*(ask() for _ in range(clients)))

    asyncio.run(stampede())
    return report


def persist(clients: int) -> list[int]:
    """How often each of so many clients asks, if all come back exactly when they are told to."""
    backend = ForgetfulBackend(seconds_per_position=200e-6)
    with served_engine(backend, COST, queue_tokens=QUEUE_TOKENS) as (_, address):

        async def ask_until_served() -> int:
            client, tries = Client(address), 0
            while True:
                tries += 1
                body = {"input": ["word " * 30] * 30}
                status, headers, _ = await client.ask("POST", "/v1/embeddings", body)
                if status == 200:
                    client.close()
                    return tries
                await asyncio.sleep(int(headers["retry-after-ms"]) / 1e3)
                client.close()
                client = Client(address)

        async def all_at_once() -> list[int]:
            return await asyncio.gather(*(ask_until_served() for _ in range(clients)))

        asyncio.run(Client(address).embed(["measured"]))
        return asyncio.run(all_at_once())


def main() -> None:
    """Print the figures; exit code 1 when something is not acceptable."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    report = run(1000)
    print(f"answers: {dict(report.answers)}, resets: {report.resets}")
    print(f"429 without a hint: {report.hints_missing}")
    print(
        f"/live: {report.live_answers} answers, slowest {report.slowest_live_seconds * 1e3:.0f} ms"
    )
    print(
        f"most CPU time before one: {report.most_cpu_before_live_seconds * 1e3:.0f} ms "
        f"of {report.cpu_seconds * 1e3:.0f} ms in all"
    )
    print(f"longest stall of the prober itself: {report.longest_stall_seconds * 1e3:.0f} ms")
    print(f"largest queue: {report.largest_queue_tokens} of {QUEUE_TOKENS} tokens")
    tries = persist(40)
    print(f"tries of 40 clients that come back: median {median(tries):g}, most {max(tries)}")
    problems = report.problems()
    if report.slowest_live_seconds > LIVE_LIMIT_SECONDS:
        problems.append("/live was slow, if this machine did nothing else")
    print("\n".join(problems) or "all as it must be")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
