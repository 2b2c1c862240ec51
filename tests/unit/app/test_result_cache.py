"""The result cache in front of a scripted service."""

import asyncio

import attrs
import numpy as np
import pytest
from bge_m3_server.app.result_cache import CachedService
from bge_m3_server.app.service import CacheStatus
from bge_m3_server.domain.errors import (
    DeadlineExceededError,
    InferenceError,
    NonFiniteOutputError,
    QueueFullError,
)
from bge_m3_server.domain.types import Heads

from tests.support.fake_service import FakeService, embedding

ROOMY = 10**6


def numbered(_index, text):
    """A vector that follows from the text."""
    return embedding(dense=(float(len(text)), 0.0, 0.0), tokens=len(text))


def ask(service, texts, heads=Heads.DENSE):
    return asyncio.run(service.embed(texts, heads))


@attrs.define
class GatedService(FakeService):
    """Its calls wait at a gate; `waiting` counts who is there."""

    gate: asyncio.Event = attrs.field(factory=asyncio.Event)
    waiting: int = 0

    async def embed(self, texts, heads, *, timeout_seconds=None):
        self.waiting += 1
        await self.gate.wait()
        return await FakeService.embed(self, texts, heads, timeout_seconds=timeout_seconds)


async def settle():
    """Let all tasks go as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


def together(requests, meanwhile=lambda _tasks: None, **script):
    """Requests that come at once, before any has an answer; their outcomes and the service."""

    async def run():
        inner = GatedService(result=numbered, **script)
        cached = CachedService(inner, ROOMY)
        tasks = [asyncio.create_task(cached.embed(texts, Heads.DENSE)) for texts in requests]
        await settle()
        meanwhile(tasks)
        await settle()
        inner.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True), inner, cached

    return asyncio.run(run())


def test_requests_that_come_together_are_computed_once():
    """Whoever asks for a text that is under way waits for the same result, in the right place."""
    results, inner, cached = together([["a", "bb"], ["bb", "a"], ["ccc", "a", "ccc"]])

    assert [texts for texts, _ in inner.calls] == [["a", "bb"], ["ccc"]]
    found = [[item.dense[0] for item in result.embeddings] for result in results]
    assert found == [[1, 2], [2, 1], [3, 1, 3]]
    assert cached.figures() | {"cache_bytes": 0} == {
        "cache_hits": 4,
        "cache_misses": 3,
        "cache_bytes": 0,
    }


def test_a_client_that_leaves_does_not_take_the_result_from_others():
    """Who waited for its text has it computed after all."""
    (left, stayed), inner, _ = together([["a"], ["a"]], lambda tasks: tasks[0].cancel())

    assert isinstance(left, asyncio.CancelledError)
    assert stayed.embeddings[0].dense[0] == 1
    assert [texts for texts, _ in inner.calls] == [["a"]]


def test_one_of_those_who_wait_takes_over():
    """When a request leaves, what it has computed is computed once for all the others."""
    texts = ["a", "bb"]
    (_, *stayed), inner, _ = together([texts, *[texts[::-1]] * 32], lambda tasks: tasks[0].cancel())

    assert [[item.dense[0] for item in result.embeddings] for result in stayed] == [[2, 1]] * 32
    assert [texts for texts, _ in inner.calls] == [["bb", "a"]]
    assert inner.waiting == 2


def test_a_text_that_is_left_alone_does_not_wait_for_another():
    """It is taken over while the rest of the request still waits for somebody else."""

    async def run():
        inner = GatedService(result=numbered)
        cached = CachedService(inner, ROOMY)
        slow, leaving, waiting = (
            asyncio.create_task(cached.embed(texts, Heads.DENSE))
            for texts in (["slow"], ["left"], ["slow", "left"])
        )
        await settle()
        leaving.cancel()
        await settle()
        assert inner.waiting == 3
        inner.gate.set()
        await asyncio.gather(slow, waiting)
        return inner.calls

    assert [texts for texts, _ in asyncio.run(run())] == [["slow"], ["left"]]


def test_a_guilty_text_is_not_tried_again_for_those_who_wait_for_it():
    """Each request is told the text's place in its own list."""
    outcomes, inner, _ = together(
        [["a", "poison"], ["poison"]], failure=InferenceError("broken", index=1)
    )

    assert [error.index for error in outcomes] == [1, 0]
    assert inner.waiting == 1


def test_a_refusal_of_one_request_does_not_refuse_another():
    """What was refused for its request's sake is asked again for whoever waits."""
    outcomes, inner, _ = together(
        [["a"], ["a"]], failure=QueueFullError("full", retry_after_seconds=1)
    )

    assert all(isinstance(error, QueueFullError) for error in outcomes)
    assert inner.waiting == 2


@pytest.mark.parametrize("way", ["argument", "setting"])
def test_waiting_for_another_request_ends_with_the_deadline(way):
    """A client's own limit holds, whoever computes its text."""

    async def run():
        inner = GatedService(result=numbered)
        cached = CachedService(inner, ROOMY, 0.05 if way == "setting" else None)
        first = asyncio.create_task(cached.embed(["a"], Heads.DENSE, timeout_seconds=60))
        await settle()
        with pytest.raises(DeadlineExceededError, match=r"0\.05 s"):
            await cached.embed(
                ["a"], Heads.DENSE, timeout_seconds=0.05 if way == "argument" else None
            )
        inner.gate.set()
        return await first

    assert len(asyncio.run(run()).embeddings) == 1


def test_a_text_is_embedded_once():
    """What is in the cache does not reach the engine, and comes back in its place."""
    inner = FakeService(result=numbered)
    cached = CachedService(inner, ROOMY)
    ask(cached, ["a", "bb"])
    result = ask(cached, ["ccc", "bb", "a", "bb"])

    assert [texts for texts, _ in inner.calls] == [["a", "bb"], ["ccc"]]
    assert [item.dense[0] for item in result.embeddings] == [3, 2, 1, 2]
    assert result.prompt_tokens == result.report.lengths.total == 8
    status = cached.status().cache
    assert (status.hits, status.misses) == (3, 3)


def test_a_request_of_known_texts_costs_no_work():
    """The engine is not asked at all, and the log line says so."""
    inner = FakeService(result=numbered)
    cached = CachedService(inner, ROOMY)
    ask(cached, ["a"])
    result = ask(cached, ["a"])

    assert len(inner.calls) == 1
    assert result.report.chunks == 0


def test_other_heads_are_other_results():
    """A dense result does not answer for the sparse one."""
    inner = FakeService()
    cached = CachedService(inner, ROOMY)
    ask(cached, ["a"])
    result = ask(cached, ["a"], Heads.SPARSE)

    assert len(inner.calls) == 2
    assert result.embeddings[0].sparse is not None


def test_bytes_are_bounded_and_the_oldest_goes_first():
    """A text that was used again outlives one that was not."""
    inner = FakeService(result=numbered)
    ask(cached := CachedService(inner, 1300), ["a", "bb"])
    ask(cached, ["a"])
    ask(cached, ["ccc"])
    inner.calls.clear()
    ask(cached, ["a", "ccc"])

    assert inner.calls == []
    ask(cached, ["bb"])
    assert len(inner.calls) == 1
    assert cached.status().cache.held_bytes <= 1300


def test_an_entry_larger_than_the_cache_is_not_kept():
    """It would push out everything else for nothing."""
    inner = FakeService(result=numbered)
    ask(cached := CachedService(inner, 10), ["a"])

    assert cached.status().cache == CacheStatus(hits=0, misses=1, held_bytes=0, limit_bytes=10)


@pytest.mark.parametrize("error", [InferenceError, NonFiniteOutputError])
def test_an_error_names_the_place_in_the_whole_request(error):
    """The engine sees fewer texts than the client sent, and is told where the client has them."""
    inner = FakeService(result=numbered)
    ask(cached := CachedService(inner, ROOMY), ["a", "c"])
    inner.failure = error("broken", index=1)
    with pytest.raises(error) as caught:
        ask(cached, ["a", "poison", "c"])

    assert caught.value.index == 1
    assert inner.inputs[-1] == [1]


def test_the_cache_keeps_no_view_of_a_larger_array():
    """A row that is kept must not keep its whole chunk."""
    whole = np.ones((1000, 3), dtype=np.float32)
    inner = FakeService(result=lambda _index, _text: embedding(dense=whole[0]))
    cached = CachedService(inner, ROOMY)
    ask(cached, ["a"])
    (kept,) = ask(cached, ["a"]).embeddings

    assert kept.dense.base is None
