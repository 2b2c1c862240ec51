"""The result cache in front of a scripted service."""

import asyncio

import numpy as np
import pytest
from bge_m3_server.app.result_cache import CachedService
from bge_m3_server.app.service import CacheStatus
from bge_m3_server.domain.errors import InferenceError, NonFiniteOutputError
from bge_m3_server.domain.types import Heads

from tests.support.fake_service import FakeService, embedding

ROOMY = 10**6


def numbered(_index, text):
    """A vector that follows from the text."""
    return embedding(dense=(float(len(text)), 0.0, 0.0), tokens=len(text))


def ask(service, texts, heads=Heads.DENSE):
    return asyncio.run(service.embed(texts, heads))


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
    """The engine saw fewer texts than the client sent."""
    inner = FakeService(result=numbered)
    ask(cached := CachedService(inner, ROOMY), ["a", "c"])
    inner.failure = error("broken", index=0)
    with pytest.raises(error) as caught:
        ask(cached, ["a", "poison", "c"])

    assert caught.value.index == 1


def test_the_cache_keeps_no_view_of_a_larger_array():
    """A row that is kept must not keep its whole chunk."""
    whole = np.ones((1000, 3), dtype=np.float32)
    inner = FakeService(result=lambda _index, _text: embedding(dense=whole[0]))
    cached = CachedService(inner, ROOMY)
    ask(cached, ["a"])
    (kept,) = ask(cached, ["a"]).embeddings

    assert kept.dense.base is None
