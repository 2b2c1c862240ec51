"""The worker pool over fake backends: real threads, a real event loop."""

import asyncio
import contextlib
import threading
import time

import attrs
import numpy as np
import pytest
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.domain import (
    CostModel,
    Embedder,
    HeadUnavailableError,
    InferenceError,
    NonFiniteOutputError,
    NoTelemetry,
    NotReadyError,
    SelfTestError,
)
from bge_m3_server.domain.testing import FakeBackend, FakeClock, FakeTokenizer, RecordingTelemetry
from bge_m3_server.domain.types import Heads

from tests.support.engines import GatedBackend, engine_over, loaded_model, stopping

TEXTS = [f"text number {number} " + "word " * (number % 7) for number in range(40)]


def test_results_are_those_of_the_embedder_in_input_order():
    """Spreading chunks over workers changes neither numbers nor order."""
    expected = Embedder(FakeTokenizer(), FakeBackend(), CostModel.conservative()).embed(
        TEXTS, Heads.DENSE | Heads.SPARSE
    )
    with stopping(engine_over(FakeBackend(), FakeBackend(), workers=3)) as engine:
        result = asyncio.run(engine.embed(TEXTS, Heads.DENSE | Heads.SPARSE))

    assert result.report.chunks > 3
    for ours, theirs in zip(result.embeddings, expected, strict=True):
        np.testing.assert_array_equal(ours.dense, theirs.dense)
        assert ours.sparse.as_dict() == theirs.sparse.as_dict()


def test_tokenising_and_inference_stay_off_the_event_loop():
    """The loop's thread only waits: it never tokenises nor runs the model."""
    threads = set()

    @attrs.define(eq=False)
    class WatchedBackend(FakeBackend):
        def run(self, batch, outputs):
            threads.add(threading.current_thread())
            return FakeBackend.run(self, batch, outputs)

    @attrs.frozen
    class WatchedTokenizer:
        def encode(self, texts):
            threads.add(threading.current_thread())
            return FakeTokenizer().encode(texts)

    model = attrs.evolve(loaded_model(WatchedBackend()), tokenizer=WatchedTokenizer())
    engine = Engine(lambda: model, EngineSettings(), NoTelemetry(), time.monotonic)
    engine.load()
    threads.clear()
    with stopping(engine):
        asyncio.run(engine.embed(TEXTS, Heads.DENSE))

    assert len(threads) >= 2
    assert threading.current_thread() not in threads


def test_the_report_counts_tokens_and_chunks():
    """The log line's figures are true counts."""
    with stopping(engine_over(FakeBackend())) as engine:
        result = asyncio.run(engine.embed(["a b c", "d"], Heads.DENSE))

    assert result.prompt_tokens == 8
    assert result.report.lengths.maximum == 5
    assert result.report.max_chunk_tokens == 5
    assert result.report.chunks == 1


def test_many_requests_at_once_get_their_own_answers():
    """Concurrent requests share the queue and never mix."""

    async def ask(engine):
        return await asyncio.gather(*(engine.embed([text], Heads.DENSE) for text in TEXTS))

    alone = Embedder(FakeTokenizer(), FakeBackend(), CostModel.conservative())
    with stopping(engine_over(FakeBackend())) as engine:
        results = asyncio.run(ask(engine))

    for text, result in zip(TEXTS, results, strict=True):
        np.testing.assert_array_equal(result.embeddings[0].dense, alone.embed([text])[0].dense)


def test_a_request_before_the_model_is_loaded_is_refused():
    """Nothing waits for a model that may never come."""
    engine = Engine(
        lambda: loaded_model(FakeBackend()), EngineSettings(), NoTelemetry(), FakeClock()
    )

    assert not engine.status().ready
    assert engine.status().model is None
    with pytest.raises(NotReadyError, match="model not ready"):
        asyncio.run(engine.embed(["a"], Heads.DENSE))


def test_a_loaded_engine_reports_its_workers():
    """All workers live and loaded once the model is there."""
    with stopping(engine_over(FakeBackend(), workers=3)) as engine:
        status = engine.status()

    assert (status.ready, status.live_workers, status.loaded_workers) == (True, 3, 3)
    assert status.total_workers == 3
    assert status.model.model_id == "fake"


def test_an_engine_error_reaches_its_request_only():
    """The worker survives a failed chunk and serves the next request."""
    backend = FakeBackend()
    with stopping(engine_over(backend, workers=1)) as engine:
        backend.error = InferenceError("boom")
        with pytest.raises(InferenceError, match="boom"):
            asyncio.run(engine.embed(TEXTS, Heads.DENSE))
        backend.error = None

        assert len(asyncio.run(engine.embed(["fine"], Heads.DENSE)).embeddings) == 1
        assert engine.status().live_workers == 1


def test_an_unexpected_exception_is_typed_and_hides_its_text():
    """Whatever a backend raises, the caller sees an InferenceError without internals."""
    backend = FakeBackend()
    with stopping(engine_over(backend, workers=1)) as engine:
        backend.error = ValueError("/secret/path")
        with pytest.raises(InferenceError) as caught:
            asyncio.run(engine.embed(["a"], Heads.DENSE))

    assert "secret" not in str(caught.value)


def test_a_non_finite_output_names_its_text():
    """The error tells which input of the request failed."""
    tokenizer = FakeTokenizer()
    backend = FakeBackend()
    with stopping(engine_over(backend)) as engine:
        backend.nan_id = tokenizer.word_id("poison")
        with pytest.raises(NonFiniteOutputError, match=r"input\[2\]") as caught:
            asyncio.run(engine.embed(["a", "b", "poison", "c"], Heads.DENSE))

    assert caught.value.index == 2


def test_a_poisoned_request_leaves_its_neighbours_alone():
    """Another request that runs at the same time still gets its answer."""
    backend = FakeBackend()

    async def ask(engine):
        return await asyncio.gather(
            engine.embed(["poison"], Heads.DENSE),
            engine.embed(["fine"], Heads.DENSE),
            return_exceptions=True,
        )

    with stopping(engine_over(backend)) as engine:
        backend.nan_id = FakeTokenizer().word_id("poison")
        failed, fine = asyncio.run(ask(engine))

    assert isinstance(failed, NonFiniteOutputError)
    assert len(fine.embeddings) == 1


def test_a_missing_head_is_refused_before_any_work():
    """A model without sparse output says so."""
    with (
        stopping(engine_over(FakeBackend(heads=Heads.DENSE))) as engine,
        pytest.raises(HeadUnavailableError, match="no sparse output"),
    ):
        asyncio.run(engine.embed(["a"], Heads.SPARSE))


def test_cancelling_a_request_drops_its_waiting_chunks():
    """Work of a client that went away is not done."""
    backend = GatedBackend()

    async def ask_and_leave(engine):
        task = asyncio.create_task(engine.embed(TEXTS, Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        backend.gate.set()
        return await engine.embed(["after"], Heads.DENSE)

    with stopping(engine_over(backend, workers=1)) as engine:
        backend.guarded = True
        before = len(backend.runs)
        asyncio.run(ask_and_leave(engine))

    assert len(backend.runs) - before == 2


def test_stopping_finishes_what_is_queued():
    """A drain loses nothing that was accepted, then gives the model back."""
    backend = GatedBackend()
    engine = engine_over(backend, workers=1)
    backend.guarded = True

    async def ask_and_stop():
        task = asyncio.create_task(engine.embed(TEXTS, Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        stop = asyncio.to_thread(engine.stop)
        backend.gate.set()
        result, _ = await asyncio.gather(task, stop)
        return result

    assert len(asyncio.run(ask_and_stop()).embeddings) == len(TEXTS)
    assert backend.closed
    with pytest.raises(NotReadyError):
        asyncio.run(engine.embed(["late"], Heads.DENSE))


def test_every_chunk_is_traced_with_its_estimate():
    """Chunk spans carry shape and estimated bytes."""
    telemetry = RecordingTelemetry()
    with stopping(engine_over(FakeBackend(), telemetry=telemetry)) as engine:
        asyncio.run(engine.embed(TEXTS, Heads.DENSE))

    assert sum(chunk.batch for chunk in telemetry.chunks) == len(TEXTS)
    assert all(
        chunk.estimated_bytes == chunk.batch * chunk.max_tokens for chunk in telemetry.chunks
    )


def test_a_model_that_fails_its_self_test_never_gets_ready():
    """A model that gives NaN stops the start."""

    def load():
        raise SelfTestError("no kernel")

    engine = Engine(load, EngineSettings(), NoTelemetry(), FakeClock())

    with pytest.raises(SelfTestError, match="no kernel"):
        engine.load()
    assert not engine.status().ready


def test_repeated_texts_of_a_request_are_computed_once():
    """Each gets its own answer at its own place, and the model sees the text a single time."""
    backend = FakeBackend()
    texts = ["same", "other", "same", "same"]
    with stopping(engine_over(backend)) as engine:
        backend.runs.clear()
        result = asyncio.run(engine.embed(texts, Heads.DENSE))

    assert sum(len(run.batch.lengths) for run in backend.runs) == 2
    alone = Embedder(FakeTokenizer(), FakeBackend(), CostModel.conservative()).embed(texts)
    for one, reference in zip(result.embeddings, alone, strict=True):
        np.testing.assert_array_equal(one.dense, reference.dense)
