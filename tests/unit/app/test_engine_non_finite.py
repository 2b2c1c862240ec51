"""Outputs that are not finite: a client's texts or the model, and a harmless text tells which."""

import asyncio
import contextlib
import time

from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.domain import CostModel, NonFiniteOutputError, NoTelemetry, NoWorkersError
from bge_m3_server.domain.testing import FakeTokenizer
from bge_m3_server.domain.types import Heads

from tests.support.engines import TICK, loaded_model, stopping, until
from tests.support.fault_backend import Fault, FaultBackend

BATCHES = CostModel(1.0, 0.0, 200)
POISON = {FakeTokenizer().word_id("poison"): Fault.NON_FINITE}
BAD_TEXTS = ["poison 1", "poison 2", "poison 3"]
HARMLESS = FakeTokenizer().word_id("What")
"""A word of the text that the supervisor tries."""


def engine_of(*backends):
    """Loads one backend after the other, the last one again and again."""
    waiting = list(backends)

    def load():
        backend = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return loaded_model(backend, cost_model=BATCHES)

    settings = EngineSettings(workers=1, supervisor=TICK)
    engine = Engine(load, settings, NoTelemetry(), time.monotonic)
    engine.load()
    return engine


def harmless_runs(backend):
    return [run for run in backend.runs if HARMLESS in run.batch.ids]


def test_texts_of_one_client_never_cost_readiness():
    """After three bad ones a harmless text is tried before anything is said; it is fine."""
    backend = FaultBackend()

    async def ask(engine):
        failures = []
        for _ in range(3):
            with contextlib.suppress(NonFiniteOutputError):
                await engine.embed(BAD_TEXTS, Heads.DENSE)
            seen = len(harmless_runs(backend))
            await until(lambda seen=seen: len(harmless_runs(backend)) > seen)
            failures.append(engine.status().failure)
        return failures

    with stopping(engine_of(backend)) as engine:
        backend.poison = POISON
        assert asyncio.run(ask(engine)) == [None] * 3
        assert not backend.closed


def test_one_bad_pass_of_the_harmless_text_proves_nothing():
    """What raises is tried twice, and so is what is not finite."""
    backend = FaultBackend()

    async def ask(engine):
        with contextlib.suppress(NonFiniteOutputError):
            await engine.embed(BAD_TEXTS, Heads.DENSE)
        await until(lambda: len(harmless_runs(backend)) == 2)
        await engine.embed(["fine"], Heads.DENSE)
        return engine.status().failure

    with stopping(engine_of(backend)) as engine:
        backend.poison = POISON
        backend.next_faults.append(Fault.NON_FINITE)  # for the first pass without poison
        assert asyncio.run(ask(engine)) is None
        assert not backend.closed


def test_a_model_that_gives_nothing_finite_is_loaded_again_without_being_asked():
    """No traffic comes to a server that is not ready: it has to heal by itself."""
    broken, fresh = FaultBackend(), FaultBackend()

    async def ask(engine):
        with contextlib.suppress(NonFiniteOutputError):
            await engine.embed(BAD_TEXTS, Heads.DENSE)
        await until(lambda: broken.closed and engine.status().loaded_workers)
        return await engine.embed(["fine"], Heads.DENSE)

    with stopping(engine_of(broken, fresh)) as engine:
        broken.poison = POISON | {HARMLESS: Fault.NON_FINITE}
        assert len(asyncio.run(ask(engine)).embeddings) == 1
        assert engine.status().failure is None
        assert fresh.runs


def test_models_that_never_give_anything_finite_end_in_fail():
    """The circuit breaker counts them, too."""

    async def ask(engine):
        while engine.status().live_workers:
            with contextlib.suppress(NonFiniteOutputError, NoWorkersError):
                await engine.embed(BAD_TEXTS, Heads.DENSE)

    backend = FaultBackend()
    with stopping(engine_of(backend)) as engine:
        backend.poison = POISON | {HARMLESS: Fault.NON_FINITE}
        asyncio.run(asyncio.wait_for(ask(engine), 20))
        assert "kept failing after 3 reloads" in engine.status().failure
