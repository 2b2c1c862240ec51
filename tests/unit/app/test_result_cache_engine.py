"""The result cache in front of a real engine: bounds, refusals and failures are the engine's."""

import asyncio
import contextlib

import attrs
import pytest
from bge_m3_server.app.admission import size_bytes
from bge_m3_server.app.result_cache import CachedService
from bge_m3_server.domain import CostModel, QueueFullError, RequestTooLargeError
from bge_m3_server.domain.errors import InferenceError
from bge_m3_server.domain.testing import FakeTokenizer
from bge_m3_server.domain.types import Heads

from tests.support.engines import GatedBackend, engine_over, loaded_model, stopping, until
from tests.support.fault_backend import Fault, FaultBackend

ROOMY = CostModel(1.0, 0.0, 10**6)
CACHE_BYTES = 10**6


@contextlib.contextmanager
def gated(**settings):
    """A cache, its engine, and the backend whose chunks wait at a gate."""
    backend = GatedBackend()
    with stopping(engine_over(backend, workers=1, cost_model=ROOMY, **settings)) as engine:
        backend.runs.clear()
        backend.guarded = True
        try:
            yield CachedService(engine, CACHE_BYTES), engine, backend
        finally:
            backend.gate.set()


def test_requests_that_wait_for_one_text_are_bounded_like_all_others():
    """Each holds its own copy of texts and answers, though only one has them computed."""
    texts = [f"{number} " + "x" * 10_000 for number in range(10)]

    async def ask(cached, engine, backend):
        crowd = [asyncio.create_task(cached.embed(texts, Heads.DENSE)) for _ in range(200)]
        await until(lambda: sum(task.done() for task in crowd) == 198)
        held_bytes = engine.status().queue.held_bytes
        backend.gate.set()
        return held_bytes, await asyncio.gather(*crowd, return_exceptions=True)

    one_bytes = size_bytes(texts, Heads.DENSE, loaded_model(FaultBackend()).info)
    with gated(queue_bytes=3 * one_bytes - 1) as (cached, engine, backend):
        held_bytes, answers = asyncio.run(ask(cached, engine, backend))
        assert held_bytes == 2 * one_bytes
        assert engine.status().queue.held_bytes == 0

    assert sum(isinstance(answer, QueueFullError) for answer in answers) == 198
    assert sum(len(run.batch.lengths) for run in backend.runs) == 10


def test_a_request_that_would_not_fit_an_empty_queue_is_told_so():
    """Also where neither what it waits for nor what it asks for itself is too large."""

    async def ask(cached, backend):
        first = asyncio.create_task(cached.embed(["x" * 3000], Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        with pytest.raises(RequestTooLargeError, match="the whole queue holds"):
            await cached.embed(["x" * 3000, "y" * 3000], Heads.DENSE)
        backend.gate.set()
        await first

    half_bytes = size_bytes(["x" * 3000], Heads.DENSE, loaded_model(FaultBackend()).info)
    with gated(queue_bytes=2 * half_bytes - 1) as (cached, _, backend):
        asyncio.run(ask(cached, backend))


def test_known_texts_are_answered_while_the_queue_is_full_of_tokens():
    """They do not wait for a worker."""

    async def ask(cached, engine, backend):
        backend.guarded = False
        await cached.embed(["known"], Heads.DENSE)
        backend.guarded = True
        running = asyncio.create_task(engine.embed(["runs"], Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        waiting = asyncio.create_task(engine.embed(["word " * 8], Heads.DENSE))
        await until(lambda: engine.status().queue.waiting_tokens == 10)
        with pytest.raises(QueueFullError):
            await cached.embed(["unknown"], Heads.DENSE)
        answer = await cached.embed(["known"], Heads.DENSE)
        backend.gate.set()
        await asyncio.gather(running, waiting)
        return answer

    with gated(queue_tokens=10) as (cached, engine, backend):
        assert len(asyncio.run(ask(cached, engine, backend)).embeddings) == 1


def test_a_text_that_is_too_long_is_named_by_its_place_in_the_whole_request():
    """Known texts before it are not missing from the count."""

    async def ask(cached):
        await cached.embed(["one", "two"], Heads.DENSE)
        with pytest.raises(RequestTooLargeError, match=r"^input\[2\] has") as caught:
            await cached.embed(["one", "two", "long " * 300], Heads.DENSE)
        return caught.value.param

    with stopping(engine_over(FaultBackend(), cost_model=ROOMY)) as engine:
        tuning = attrs.evolve(engine.status().tuning, total_workspace_bytes=100)
        engine.set_cost_model(ROOMY, tuning)
        assert asyncio.run(ask(CachedService(engine, CACHE_BYTES))) == "input[2]"


def test_a_text_that_the_engine_fails_on_is_named_by_its_place_in_each_request():
    """For who has it computed, and for who waits for that."""
    backend = FaultBackend(poison={FakeTokenizer().word_id("poison"): Fault.RAISE})

    async def ask(cached):
        await cached.embed(["one"], Heads.DENSE)
        return await asyncio.gather(
            cached.embed(["one", "two", "two", "poison"], Heads.DENSE),
            cached.embed(["one", "poison"], Heads.DENSE),
            return_exceptions=True,
        )

    with stopping(engine_over(backend, cost_model=ROOMY)) as engine:
        errors = asyncio.run(ask(CachedService(engine, CACHE_BYTES)))

    assert [type(error) for error in errors] == [InferenceError] * 2
    assert [error.index for error in errors] == [3, 1]
    assert [str(error).partition(":")[0] for error in errors] == ["input[3]", "input[1]"]


def test_what_a_client_leaves_behind_is_computed_once_more():
    """The chunk that runs for nobody cannot be called back; of those who wait one asks again."""

    async def ask(cached, backend):
        first = asyncio.create_task(cached.embed(["same"], Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        rest = [asyncio.create_task(cached.embed(["same"], Heads.DENSE)) for _ in range(32)]
        await asyncio.sleep(0)
        first.cancel()
        backend.gate.set()
        return await asyncio.gather(*rest)

    with gated() as (cached, _, backend):
        assert len(asyncio.run(ask(cached, backend))) == 32
    assert [len(run.batch.lengths) for run in backend.runs] == [1, 1]
