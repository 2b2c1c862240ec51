"""One contender on one workload: rates, latencies, memory and closeness to the reference."""

import threading
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from benchmarks.performance.processes import GaveUpError, Running, Vectors
from benchmarks.performance.workloads import Workload

MAX_CALLS = 7


@attrs.frozen
class Effort:
    """How long to measure.

    `row_seconds`: of repeated calls; a first call that takes longer is the only one.
    `query_seconds`: of clients that ask in a closed loop, or until each was answered twice.
    """

    row_seconds: float = 60.0
    query_seconds: float = 15.0


@attrs.frozen
class Sample:
    """What one visit measured.

    `call_seconds`: of each call or request; `elapsed_seconds`: of all of them together.
    `loaded_bytes`: resident after the first short text; `peak_bytes`: the most while the row ran;
    `kept_bytes`: resident after it.
    `cosine`: the least among the texts, None where nothing can be compared.
    `is_single`: only one call, the first, was made.
    """

    texts: int
    tokens: int
    call_seconds: tuple[float, ...]
    elapsed_seconds: float
    cosine: float | None
    is_single: bool = False
    loaded_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0

    @property
    def texts_per_second(self) -> float:
        """Of all calls together for queries, of the median call otherwise."""
        return self.texts / self.elapsed_seconds

    @property
    def tokens_per_second(self) -> float:
        """Likewise."""
        return self.tokens / self.elapsed_seconds


Texts = Callable[[int], list[str]]
"""The texts of a variant; the reference has embedded the first ones too."""


@attrs.frozen(eq=False)
class Task:
    """A row of work with its texts, and what the first of them should come to."""

    workload: Workload
    texts: Texts
    reference: Vectors


def measure(running: Running, task: Task, effort: Effort, *, http: bool) -> Sample:
    """Call or ask until the effort is spent.

    Raises:
        GaveUpError: a call took too long or failed.
    """
    running.memory.reset_peak()
    if task.workload.concurrency == 0:
        sample = _calls(running, task, effort)
    else:
        ask = _clients if http else _batches
        sample = ask(running, task, effort)
    return attrs.evolve(
        sample,
        peak_bytes=running.memory.peak_bytes(),
        kept_bytes=running.memory.resident_bytes(),
    )


def least_cosine(vectors: Vectors, reference: Vectors) -> float:
    """Between texts and their counterparts; the length of a vector makes no difference."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return float(((vectors * reference).sum(axis=1) / lengths).min())


def _calls(running: Running, task: Task, effort: Effort) -> Sample:
    """All texts in one call: once to warm up, then again and again."""
    first, vectors = running.embed(task.texts(0))
    times: list[float] = []
    spent = 0.0
    while len(times) < MAX_CALLS and first + spent < effort.row_seconds:
        seconds, _ = running.embed(task.texts(len(times) + 1))
        times.append(seconds)
        spent += seconds
    return Sample(
        texts=len(task.workload.lengths),
        tokens=task.workload.tokens,
        call_seconds=tuple(times or [first]),
        elapsed_seconds=float(np.median(times or [first])),
        cosine=least_cosine(vectors, task.reference),
        is_single=not times,
    )


def _batches(running: Running, task: Task, effort: Effort) -> Sample:
    """Queries for a library, which has no queue: as many per call as there would be clients."""
    clients = task.workload.concurrency
    _, vectors = running.embed([text for query in range(clients) for text in task.texts(query)])
    times: list[float] = []
    variant = clients
    while sum(times) < effort.query_seconds or len(times) < 2:
        asked = [text for query in range(clients) for text in task.texts(variant + query)]
        variant += clients
        times.append(running.embed(asked)[0])
    count = clients * len(times)
    return Sample(
        texts=count,
        tokens=count * task.workload.tokens,
        call_seconds=tuple(times),
        elapsed_seconds=sum(times),
        cosine=least_cosine(vectors, task.reference[:clients]),
    )


@attrs.define
class _Loop:
    """Clients that each ask again as soon as they are answered."""

    running: Running
    texts: Texts
    clients: int
    until: float = 0.0
    next_variant: int = 0
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    seconds: list[float] = attrs.field(factory=list)
    vectors: dict[int, Vectors] = attrs.field(factory=dict)
    failures: list[GaveUpError] = attrs.field(factory=list)

    def run(self, seconds: float, queries_each: int) -> float:
        """Ask for so long, and so often at least; returns the seconds until the last answer."""
        self.seconds.clear()
        started = time.perf_counter()
        self.until = started + seconds
        threads = [
            threading.Thread(target=self._client, args=(client, queries_each))
            for client in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return time.perf_counter() - started

    def _client(self, client: int, queries: int) -> None:
        asked = 0
        while not self.failures and (asked < queries or time.perf_counter() < self.until):
            with self.lock:
                variant = self.next_variant
                self.next_variant += 1
            try:
                seconds, vectors = self.running.embed(self.texts(variant), client)
            except GaveUpError as error:
                self.failures.append(error)
                return
            self.seconds.append(seconds)
            if variant < self.clients:
                self.vectors[variant] = vectors
            asked += 1


def _clients(running: Running, task: Task, effort: Effort) -> Sample:
    """Queries over HTTP; one of each client warms up."""
    loop = _Loop(running, task.texts, task.workload.concurrency)
    loop.run(0.0, queries_each=1)
    elapsed = loop.run(effort.query_seconds, queries_each=2)
    vectors = np.concatenate([loop.vectors[variant] for variant in range(loop.clients)])
    return Sample(
        texts=len(loop.seconds),
        tokens=len(loop.seconds) * task.workload.tokens,
        call_seconds=tuple(loop.seconds),
        elapsed_seconds=elapsed,
        cosine=least_cosine(vectors, task.reference[: loop.clients]),
    )


def reference_texts(workload: Workload, texts: Texts) -> Sequence[str]:
    """What the reference embeds for a row: the first call, or the first query of each client."""
    return [text for variant in range(workload.concurrency or 1) for text in texts(variant)]
