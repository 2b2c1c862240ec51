"""The bounded queue over fake backends: sharing, refusing, deadlines, canaries."""

import asyncio
import contextlib
import threading
import time

import attrs
import numpy as np
import pytest
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.app.service import ProbeStatus, Tuning
from bge_m3_server.domain import (
    CostModel,
    DeadlineExceededError,
    Embedder,
    NoTelemetry,
    NotReadyError,
    QueueFullError,
    RequestTooLargeError,
)
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer
from bge_m3_server.domain.types import Heads

from tests.support.engines import GatedBackend, engine_over, loaded_model, numbered, stopping, until
from tests.support.fault_backend import Fault, FaultBackend

BATCHES = CostModel(1.0, 0.0, 200)


@contextlib.contextmanager
def gated_engine(**settings):
    """One worker whose chunks wait at a gate, which opens at the end at the latest."""
    backend = GatedBackend()
    engine = engine_over(backend, **{"workers": 1, "cost_model": BATCHES, **settings})
    backend.guarded = True
    backend.runs.clear()
    try:
        with stopping(engine):
            try:
                yield engine, backend
            finally:
                backend.gate.set()
    finally:
        backend.gate.set()


@contextlib.asynccontextmanager
async def occupied(engine, backend):
    """The only worker is busy until the block ends."""
    running = asyncio.create_task(engine.embed(["first"], Heads.DENSE))
    await asyncio.to_thread(backend.waiting.acquire)
    try:
        yield
    finally:
        backend.gate.set()
        await running


def test_requests_that_wait_together_share_a_forward_pass():
    """Texts of many requests become one chunk, and each request gets its own answer."""

    async def ask(engine, backend):
        async with occupied(engine, backend):
            waiting = [
                asyncio.create_task(engine.embed([f"text {number}"], Heads.DENSE))
                for number in range(10)
            ]
            await until(lambda: engine.status().queue.waiting_texts == 10)
        return await asyncio.gather(*waiting)

    with gated_engine() as (engine, backend):
        results = asyncio.run(ask(engine, backend))

    assert [len(run.batch.lengths) for run in backend.runs] == [1, 10]
    alone = Embedder(FakeTokenizer(), FakeBackend(), BATCHES)
    for number, result in enumerate(results):
        (theirs,) = alone.embed([f"text {number}"])
        np.testing.assert_array_equal(result.embeddings[0].dense, theirs.dense)


def test_a_long_request_uses_all_workers():
    """Its texts are spread, even where one chunk could hold them all."""
    backend = FaultBackend(seconds_per_run=0.05)
    texts = [f"{number} " + "word " * 100 for number in range(20)]
    roomy = CostModel(1.0, 0.0, 10**6)
    with stopping(engine_over(backend, workers=4, cost_model=roomy)) as engine:
        backend.runs.clear()
        asyncio.run(engine.embed(texts, Heads.DENSE))

    assert [len(run.batch.lengths) for run in backend.runs] == [5] * 4


def test_a_full_queue_refuses_with_the_time_to_come_back():
    """What fits waits; what does not is told when there should be room."""

    async def ask(engine, backend):
        async with occupied(engine, backend):
            waiting = asyncio.create_task(engine.embed(numbered(9, tokens=10), Heads.DENSE))
            await until(lambda: engine.status().queue.waiting_tokens == 90)
            with pytest.raises(QueueFullError, match=r"90 of 100 tokens are taken") as caught:
                await engine.embed(numbered(2, tokens=10), Heads.DENSE)
            fits = asyncio.create_task(engine.embed(["word " * 8], Heads.DENSE))
            await until(lambda: engine.status().queue.waiting_tokens == 100)
            with pytest.raises(QueueFullError):
                await engine.embed([""], Heads.DENSE)
        await asyncio.gather(waiting, fits)
        return caught.value.retry_after_seconds

    with gated_engine(queue_tokens=100) as (engine, backend):
        assert 0 < asyncio.run(ask(engine, backend)) <= 60


def test_a_crowd_that_comes_at_once_is_not_tokenised_in_vain():
    """What is being tokenised counts by guess: most are refused before any work is done."""
    tokenizer = SlowTokenizer()
    tokenizer.gate.set()
    model = attrs.evolve(loaded_model(FakeBackend()), tokenizer=tokenizer)
    settings = EngineSettings(queue_tokens=100)
    engine = Engine(lambda: model, settings, NoTelemetry(), time.monotonic)
    engine.load()
    tokenizer.gate.clear()

    async def ask():
        crowd = [engine.embed(["word " * 30], Heads.DENSE) for _ in range(50)]
        waiting = [asyncio.create_task(request) for request in crowd]
        await until(lambda: sum(task.done() for task in waiting) == 48)
        tokenizer.gate.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    with stopping(engine):
        answers = asyncio.run(ask())
    assert sum(isinstance(answer, QueueFullError) for answer in answers) == 48


def test_the_bytes_of_requests_under_way_are_bounded():
    """A queue may be short in tokens and long in bytes; all of them come back."""

    async def ask(engine, backend):
        async with occupied(engine, backend):
            with pytest.raises(QueueFullError, match="of 32600 bytes are taken"):
                await engine.embed(["x" * 3600], Heads.DENSE)

    with gated_engine(queue_bytes=32600) as (engine, backend):
        asyncio.run(ask(engine, backend))
        assert engine.status().queue.held_bytes == 0


def test_a_request_that_can_never_fit_says_so():
    """Waiting would not help: the figures say how far it is beyond the bound."""
    with gated_engine(queue_tokens=10, queue_bytes=32600) as (engine, _):
        with pytest.raises(RequestTooLargeError, match=r"needs 12 tokens.* holds 10"):
            asyncio.run(engine.embed(["word " * 10], Heads.DENSE))
        with pytest.raises(RequestTooLargeError, match="holds 32600"):
            asyncio.run(engine.embed(["x" * 5000], Heads.DENSE))


@pytest.mark.parametrize("way", ["argument", "setting"])
def test_a_deadline_ends_the_wait(way):
    """Queued texts are gone at once, whether the client or the server set the time."""
    settings = {"request_timeout_seconds": 0.05} if way == "setting" else {}
    argument = {"timeout_seconds": 0.05} if way == "argument" else {}

    async def ask(engine, backend):
        with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s"):
            await engine.embed(["first"], Heads.DENSE, **argument)
        with pytest.raises(DeadlineExceededError):
            await engine.embed(["second"], Heads.DENSE, **argument)
        assert engine.status().queue.waiting_texts == 0
        assert engine.status().queue.held_bytes == 0

    with gated_engine(**settings) as (engine, backend):
        asyncio.run(ask(engine, backend))


def test_a_cancelled_request_is_gone_from_the_queue():
    """The queue counts only what somebody waits for."""

    async def ask(engine, backend):
        async with occupied(engine, backend):
            leaving = asyncio.create_task(engine.embed(numbered(5, tokens=5), Heads.DENSE))
            await until(lambda: engine.status().queue.waiting_texts == 5)
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            assert engine.status().queue.waiting_texts == 0

    with gated_engine() as (engine, backend):
        asyncio.run(ask(engine, backend))


def test_the_canary_overtakes_the_queue_and_is_shared():
    """It is the next chunk, alone, and all who ask then or soon after get its report."""

    async def ask(engine, backend):
        async with occupied(engine, backend):
            bulk = asyncio.create_task(engine.embed(numbered(100, tokens=6), Heads.DENSE))
            await until(lambda: engine.status().queue.waiting_texts == 100)
            canaries = [asyncio.create_task(engine.canary()) for _ in range(3)]
            await until(lambda: engine.status().queue.waiting_texts == 101)
        reports = [*await asyncio.gather(*canaries), await engine.canary()]
        await bulk
        return reports

    with gated_engine() as (engine, backend):
        reports = asyncio.run(ask(engine, backend))

    assert reports[0].is_healthy
    assert len(set(reports)) == 1
    assert [len(run.batch.lengths) for run in backend.runs][:2] == [1, 1]


def test_the_canary_tells_when_the_engine_fails():
    """Workers may live and the model fail all the same."""
    backend = FaultBackend()
    with stopping(engine_over(backend, workers=1)) as engine:
        backend.next_faults.extend([Fault.RAISE, Fault.RAISE])
        report = asyncio.run(engine.canary())

    assert not report.is_healthy
    assert report.reason == "the engine failed on a harmless text"


def test_new_coefficients_decide_from_the_next_chunk_on():
    """Auto-tuning publishes while the server runs."""
    backend = FakeBackend()
    with stopping(engine_over(backend, workers=1, cost_model=BATCHES)) as engine:
        tuning = Tuning(1.0, 0.0, 10, ProbeStatus.COMPLETE)
        engine.set_cost_model(CostModel(1.0, 0.0, 10), tuning)
        backend.runs.clear()
        asyncio.run(engine.embed(numbered(4, tokens=5), Heads.DENSE))

        assert [len(run.batch.lengths) for run in backend.runs] == [2, 2]
        assert engine.status().tuning == tuning


def test_an_abort_answers_everybody():
    """Running and queued requests get an error that says why, not silence."""

    async def ask(engine, backend):
        requests = [asyncio.create_task(engine.embed(["a"], Heads.DENSE)) for _ in range(3)]
        await asyncio.to_thread(backend.waiting.acquire)
        engine.abort()
        return await asyncio.gather(*requests, return_exceptions=True)

    with gated_engine() as (engine, backend):
        errors = asyncio.run(ask(engine, backend))

    assert [str(error) for error in errors] == ["the server is stopping"] * 3
    assert all(isinstance(error, NotReadyError) for error in errors)


class SlowTokenizer:
    """Waits at a gate."""

    def __init__(self):
        self.gate, self.entered = threading.Event(), threading.Event()

    def encode(self, texts):
        self.entered.set()
        assert self.gate.wait(10)
        return FakeTokenizer().encode(texts)


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_request_that_comes_too_late_for_the_workers_is_refused(end):
    """One that was still being tokenised when the workers left does not wait for ever."""
    tokenizer = SlowTokenizer()
    tokenizer.gate.set()
    model = attrs.evolve(loaded_model(FakeBackend()), tokenizer=tokenizer)
    engine = Engine(lambda: model, EngineSettings(), NoTelemetry(), time.monotonic)
    engine.load()
    tokenizer.gate.clear()
    tokenizer.entered.clear()

    async def ask():
        late = asyncio.create_task(engine.embed(["late"], Heads.DENSE))
        await asyncio.to_thread(tokenizer.entered.wait)
        ending = asyncio.create_task(asyncio.to_thread(getattr(engine, end)))
        await until(lambda: engine.status().live_workers == 0)
        tokenizer.gate.set()
        with pytest.raises(NotReadyError, match="the server is stopping"):
            await late
        await ending

    asyncio.run(ask())
    engine.stop()


def test_draining_takes_work_and_says_that_it_will_stop():
    """Readiness falls first; requests that come all the same are served."""
    with stopping(engine_over(FakeBackend())) as engine:
        engine.drain()
        assert engine.status().draining
        assert len(asyncio.run(engine.embed(["a"], Heads.DENSE)).embeddings) == 1
