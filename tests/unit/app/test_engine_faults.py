"""Workers that raise, die and hang, models that break: the engine goes on, or says why not."""

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
    InferenceError,
    NoTelemetry,
    NoWorkersError,
    SelfTestError,
)
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer
from bge_m3_server.domain.types import Heads

from tests.support.engines import TICK, engine_over, loaded_model, stopping, until
from tests.support.fault_backend import Fault, FaultBackend

BATCHES = CostModel(1.0, 0.0, 200)
"""Room for some thirty short texts in a chunk."""

TEXTS = [f"text number {number}" for number in range(12)]
FAULTS = [Fault.RAISE, Fault.DIE, Fault.HANG]


def expected(texts):
    return Embedder(FakeTokenizer(), FakeBackend(), CostModel.conservative()).embed(texts)


def assert_right(result, texts):
    for ours, theirs in zip(result.embeddings, expected(texts), strict=True):
        np.testing.assert_array_equal(ours.dense, theirs.dense)


def poisoned(word, fault):
    return {FakeTokenizer().word_id(word): fault}


@contextlib.contextmanager
def faulty_engine(backend, **settings):
    """An engine that takes a chunk for hanging after a fifth of a second."""
    settings = {"hang_timeout_seconds": 0.2, "cost_model": BATCHES, **settings}
    try:
        with stopping(engine_over(backend, **settings)) as engine:
            backend.runs.clear()
            yield engine
    finally:
        backend.released.set()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_failure_costs_nobody_his_answer(fault, workers):
    """A chunk that fails once is run again, and its request never knows."""
    backend = FaultBackend()
    with faulty_engine(backend, workers=workers) as engine:
        backend.next_faults.append(fault)
        assert_right(asyncio.run(engine.embed(TEXTS, Heads.DENSE)), TEXTS)

        status = engine.status()
        assert status.live_workers == workers
        assert status.replaced_workers == (fault is not Fault.RAISE)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_guilty_text_fails_alone(fault):
    """Its own request learns its place; neighbours in the same chunk get their answers."""
    backend = FaultBackend()

    async def ask(engine):
        neighbours = [engine.embed([text], Heads.DENSE) for text in TEXTS]
        guilty = engine.embed(["harmless", "poison"], Heads.DENSE)
        return await asyncio.gather(*neighbours, guilty, return_exceptions=True)

    with faulty_engine(backend, workers=2) as engine:
        backend.poison = poisoned("poison", fault)
        backend.seconds_per_run = 0.02  # so that requests meet in one chunk
        *results, error = asyncio.run(ask(engine))

        assert isinstance(error, InferenceError)
        assert error.index == 1
        for text, result in zip(TEXTS, results, strict=True):
            assert_right(result, [text])
        assert max(len(run.batch.lengths) for run in backend.runs) > 1
        assert engine.status().live_workers == 2


def test_a_guilty_text_is_named_by_its_first_place_among_repeated_ones():
    """Texts that are computed once keep the places that the client gave them."""
    backend = FaultBackend()
    with faulty_engine(backend, workers=1) as engine:
        backend.poison = poisoned("poison", Fault.RAISE)
        with pytest.raises(InferenceError, match=r"input\[3\]") as caught:
            asyncio.run(engine.embed(["same", "same", "other", "poison", "poison"], Heads.DENSE))

    assert caught.value.index == 3


def test_a_guilty_text_is_not_tried_for_ever():
    """The passes that one bad text causes are few."""
    backend = FaultBackend()
    with faulty_engine(backend, workers=1) as engine:
        backend.poison = poisoned("poison", Fault.RAISE)
        before = backend.attempts
        with pytest.raises(InferenceError, match=r"input\[0\]"):
            asyncio.run(engine.embed(["poison"], Heads.DENSE))
        alone = backend.attempts - before
        with pytest.raises(InferenceError, match=r"input\[5\]"):
            asyncio.run(engine.embed([*TEXTS[:5], "poison", *TEXTS[5:]], Heads.DENSE))

        assert alone == 2
        assert backend.attempts - before - alone <= 2 + 2 * 4


def test_out_of_memory_halves_the_chunk_and_lowers_the_budget():
    """The request is answered in smaller chunks, and later ones do not run into the wall again."""
    backend = FaultBackend()
    texts = [f"text number {number}" for number in range(36)]
    with faulty_engine(backend, workers=1) as engine:
        backend.memory_positions = 60
        assert_right(asyncio.run(engine.embed(texts, Heads.DENSE)), texts)
        backend.runs.clear()
        before = backend.attempts
        assert_right(asyncio.run(engine.embed(texts, Heads.DENSE)), texts)

        assert backend.attempts - before == len(backend.runs)
        assert max(run.batch.ids.size for run in backend.runs) <= 60
        assert sum(len(run.batch.lengths) for run in backend.runs) == 36
        assert engine.status().failure is None


def test_a_text_too_big_for_the_memory_fails_alone():
    """Halving ends at one text."""
    backend = FaultBackend()
    with faulty_engine(backend, workers=1) as engine:
        backend.memory_positions = 50
        with pytest.raises(InferenceError, match=r"input\[1\].*memory ran out") as caught:
            asyncio.run(engine.embed(["short", "long " * 60], Heads.DENSE))

        assert caught.value.index == 1
        assert_right(asyncio.run(engine.embed(["short"], Heads.DENSE)), ["short"])


def test_a_failed_chunk_is_tried_elsewhere():
    """A device that fails does not fail the requests while another one works."""
    bad, good = FaultBackend(), FaultBackend()
    with stopping(engine_over(bad, good, workers=2, cost_model=BATCHES)) as engine:
        bad.error = InferenceError("the device is lost")
        for text in TEXTS:
            assert_right(asyncio.run(engine.embed([text], Heads.DENSE)), [text])


@attrs.define
class Time:
    """A clock that stands still until it is set."""

    now: float = 0.0

    def __call__(self):
        return self.now


def test_a_hang_in_the_very_first_chunk_is_told():
    """How long it should take is known from loading the model."""
    time, backend = Time(), FaultBackend()
    model = loaded_model(backend, cost_model=BATCHES, seconds_per_position=0.001)
    engine = Engine(lambda: model, EngineSettings(supervisor=TICK), NoTelemetry(), time)

    async def ask():
        backend.next_faults.append(Fault.HANG)
        hanging = asyncio.create_task(engine.embed(["hangs"], Heads.DENSE))
        await until(lambda: engine.status().busy_workers)
        time.now += 2.0
        suspects = engine.status().suspect_workers
        backend.released.set()
        await hanging
        return suspects

    engine.load()
    with stopping(engine):
        assert asyncio.run(ask()) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_hangs_is_told_before_it_is_given_up(workers):
    """Two seconds are enough to see it, though it gets a minute to end."""
    time, backend = Time(), FaultBackend()
    model = loaded_model(backend, cost_model=BATCHES)
    settings = EngineSettings(workers=workers, supervisor=TICK)
    engine = Engine(lambda: model, settings, NoTelemetry(), time)

    async def ask():
        await engine.embed(["measured"], Heads.DENSE)
        backend.next_faults.append(Fault.HANG)
        hanging = asyncio.create_task(engine.embed(["hangs"], Heads.DENSE))
        await until(lambda: engine.status().busy_workers)
        assert engine.status().suspect_workers == 0
        time.now += 2.0
        assert engine.status().suspect_workers == 1
        report = await engine.canary()
        backend.released.set()
        await hanging
        assert engine.status().suspect_workers == 0
        return report

    engine.load()
    with stopping(engine):
        report = asyncio.run(ask())

    assert report.is_healthy is (workers == 2)
    if workers == 1:
        assert report.reason == "all workers take far longer than expected"


def failing_loader(*backends):
    """Gives one backend per call, then fails; remembers what it gave."""
    waiting = list(backends)

    def load():
        if not waiting:
            raise InferenceError("there are no more models")
        return loaded_model(waiting.pop(0), cost_model=BATCHES)

    return load


@contextlib.contextmanager
def loaded_from(load, **settings):
    engine = Engine(
        load,
        EngineSettings(**{"workers": 1, "supervisor": TICK, **settings}),
        NoTelemetry(),
        time.monotonic,
    )
    engine.load()
    with stopping(engine):
        yield engine


def test_a_broken_model_is_loaded_again():
    """When even a harmless text fails, the model is replaced, and waiting requests never know."""
    broken, fresh = FaultBackend(), FaultBackend()
    load, may_load = failing_loader(broken, fresh), threading.Event()

    def load_when_allowed():
        assert may_load.wait(10)
        return load()

    async def ask(engine):
        may_load.clear()
        broken.error = InferenceError("the device is lost")
        with contextlib.suppress(InferenceError):
            await engine.embed(TEXTS, Heads.DENSE)
        await until(lambda: broken.closed)
        waiting = asyncio.create_task(engine.embed(TEXTS, Heads.DENSE))
        await asyncio.sleep(0)
        assert "is being loaded again" in engine.status().failure
        may_load.set()
        return await waiting

    may_load.set()
    with loaded_from(load_when_allowed) as engine:
        assert_right(asyncio.run(ask(engine)), TEXTS)
        assert fresh.runs
        assert engine.status().failure is None


def test_a_fresh_model_that_fails_its_self_test_is_replaced_too():
    """The next one is loaded, and waiting requests never know."""
    broken, fresh = FaultBackend(), FaultBackend()
    loads = [broken, None, fresh]

    def load():
        backend = loads.pop(0)
        if backend is None:
            raise SelfTestError("it does not answer")
        return loaded_model(backend, cost_model=BATCHES)

    async def ask(engine):
        broken.error = InferenceError("the device is lost")
        with contextlib.suppress(InferenceError):
            await engine.embed(TEXTS, Heads.DENSE)
        await until(lambda: broken.closed)
        return await engine.embed(TEXTS, Heads.DENSE)

    with loaded_from(load) as engine:
        assert_right(asyncio.run(ask(engine)), TEXTS)
        assert fresh.runs
        assert engine.status().failure is None


def test_bad_texts_alone_never_reload_the_model():
    """The model answers a harmless text, so it is not at fault."""
    backend = FaultBackend()

    async def ask(engine):
        # The second canary shows that the first one's verdict was in the model's favour.
        while len(backend.runs) < 1 + 2:
            with contextlib.suppress(InferenceError):
                await engine.embed(["poison"], Heads.DENSE)
        return await engine.embed(TEXTS, Heads.DENSE)

    with loaded_from(failing_loader(backend)) as engine:
        backend.poison = poisoned("poison", Fault.RAISE)
        assert_right(asyncio.run(ask(engine)), TEXTS)
        assert engine.status().failure is None
        assert not backend.closed


def test_a_model_that_cannot_be_loaded_again_ends_in_fail():
    """Health says why, and requests are refused at once instead of waiting for ever."""
    backend = FaultBackend()

    async def ask(engine):
        backend.error = InferenceError("the device is lost")
        requests = [engine.embed([text], Heads.DENSE) for text in TEXTS]
        results = await asyncio.gather(*requests, return_exceptions=True)
        await until(lambda: engine.status().live_workers == 0)
        return results

    with loaded_from(failing_loader(backend)) as engine:
        results = asyncio.run(ask(engine))

        assert all(isinstance(result, InferenceError | NoWorkersError) for result in results)
        assert engine.status().failure == "the model could not be loaded again"
        assert engine.status().live_workers == 0
        with pytest.raises(NoWorkersError, match="no workers available"):
            asyncio.run(engine.embed(["late"], Heads.DENSE))


def test_a_model_that_cannot_be_loaded_again_gets_a_pause_and_a_stop_does_not_wait_for_it():
    """What keeps a file or a device may pass; whoever stops the server need not wait for that."""
    broken, tries = FaultBackend(), []

    def load():
        tries.append(time.monotonic())
        if len(tries) > 1:
            raise InferenceError("the device is busy")
        return loaded_model(broken, cost_model=BATCHES)

    async def fail(engine):
        broken.error = InferenceError("the device is lost")
        with contextlib.suppress(InferenceError):
            await engine.embed(TEXTS, Heads.DENSE)
        await until(lambda: len(tries) == 2)

    patient = attrs.evolve(TICK, reload_pause_seconds=3600)
    with loaded_from(load, supervisor=patient) as engine:
        asyncio.run(fail(engine))
        assert "is being loaded again" in engine.status().failure
        stop = threading.Thread(target=engine.stop, daemon=True)
        stop.start()
        stop.join(10)
        assert not stop.is_alive()
    assert len(tries) == 2


def test_a_model_that_keeps_breaking_is_given_up():
    """Reloading is not repeated for ever: the last state is `fail`."""

    class OneRunBackend(FaultBackend):
        """Runs once, then breaks."""

        def run(self, batch, outputs):
            if len(self.runs) > 0:
                raise InferenceError("broken again")
            return FaultBackend.run(self, batch, outputs)

    async def ask(engine):
        while engine.status().live_workers:
            with contextlib.suppress(InferenceError, NoWorkersError):
                await engine.embed(TEXTS, Heads.DENSE)

    with loaded_from(lambda: loaded_model(OneRunBackend(), cost_model=BATCHES)) as engine:
        asyncio.run(asyncio.wait_for(ask(engine), 20))

        assert "kept failing after 3 reloads" in engine.status().failure
