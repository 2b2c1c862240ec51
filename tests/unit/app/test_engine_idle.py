"""A model that nobody uses is unloaded, and what the supervisor tells while it watches."""

import asyncio
import contextlib
import logging
import time

import attrs
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.app.loading import ProcessMemory
from bge_m3_server.app.service import ProbeStatus, Tuning
from bge_m3_server.app.supervisor import SupervisorSettings
from bge_m3_server.domain import CostModel, NoTelemetry
from bge_m3_server.domain.testing import FakeBackend
from bge_m3_server.domain.types import Heads

from tests.support.engines import loaded_model, numbered, stopping, until

BATCHES = CostModel(1.0, 0.0, 200)


@attrs.define
class Loader:
    """Gives a new backend per call and remembers them all."""

    backends: list = attrs.field(factory=list)

    def __call__(self):
        self.backends.append(FakeBackend())
        return loaded_model(self.backends[-1], cost_model=BATCHES)


@contextlib.contextmanager
def idling_engine(loader, **settings):
    """An engine that unloads its model after a twentieth of a second; yields it and the trims."""
    trims = []
    supervisor = SupervisorSettings(**{"tick_seconds": 0.01, **settings})
    memory = ProcessMemory(trim=lambda: trims.append(True), resident_bytes=lambda: 7 * 1024**2)
    engine = Engine(
        loader, EngineSettings(supervisor=supervisor), NoTelemetry(), time.monotonic, memory
    )
    engine.load()
    with stopping(engine):
        yield engine, trims


def test_a_model_that_is_being_measured_is_not_unloaded():
    """The idle time counts once the probe has ended."""
    loader = Loader()

    async def watch(engine):
        engine.set_cost_model(BATCHES, Tuning(1.0, 0.0, 200, ProbeStatus.RUNNING))
        await asyncio.sleep(0.2)
        kept = engine.status().loaded_workers
        engine.set_cost_model(BATCHES, Tuning(1.0, 0.0, 200, ProbeStatus.COMPLETE))
        await until(lambda: engine.status().loaded_workers == 0)
        return kept

    with idling_engine(loader, idle_timeout_seconds=0.1) as (engine, _):
        assert asyncio.run(watch(engine)) == 2


def test_new_coefficients_outlive_a_reload():
    """What was measured is not forgotten when an idle model comes back."""

    async def ask(engine):
        engine.set_cost_model(CostModel(1.0, 0.0, 10), engine.status().tuning)
        await until(lambda: engine.status().loaded_workers == 0)
        return await engine.embed(numbered(4, tokens=5), Heads.DENSE)

    with idling_engine(Loader(), idle_timeout_seconds=0.05) as (engine, _):
        assert asyncio.run(ask(engine)).report.chunks == 2


def test_an_idle_model_is_unloaded_and_comes_back_once_for_a_burst():
    """Health stays ready, memory is given back, and the first requests share one reload."""
    loader = Loader()

    async def ask(engine):
        await until(lambda: engine.status().loaded_workers == 0)
        assert loader.backends[0].closed
        assert engine.status().ready
        assert engine.status().live_workers == 2
        assert (await engine.canary()).is_healthy
        assert engine.status().loaded_workers == 0
        burst = [engine.embed([f"text {number}"], Heads.DENSE) for number in range(20)]
        return await asyncio.gather(*burst)

    with idling_engine(loader, idle_timeout_seconds=0.05) as (engine, trims):
        results = asyncio.run(ask(engine))
        assert len(results) == 20
        assert len(loader.backends) == 2
        assert trims


def test_a_client_that_leaves_during_a_reload_does_not_spoil_it_for_others():
    """The reload belongs to all who wait."""
    loader = Loader()

    async def ask(engine):
        await until(lambda: engine.status().loaded_workers == 0)
        leaving = asyncio.create_task(engine.embed(["leaving"], Heads.DENSE))
        staying = asyncio.create_task(engine.embed(["staying"], Heads.DENSE))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    with idling_engine(loader, idle_timeout_seconds=0.05) as (engine, _):
        assert len(asyncio.run(ask(engine)).embeddings) == 1


def test_the_heartbeat_tells_what_the_engine_did(caplog):
    """One line per interval, with memory, workers, queue, chunks, and what others report."""

    async def ask(engine):
        await engine.embed(["a b", "c d"], Heads.DENSE)
        await until(lambda: any(_chunks(record) for record in caplog.records))

    with (
        caplog.at_level(logging.INFO, "bge_m3_server"),
        idling_engine(Loader(), heartbeat_seconds=0.05) as (engine, _),
    ):
        engine.report_in_heartbeat(lambda: {"cache_hits": 5})
        asyncio.run(ask(engine))

    (fields,) = [record.fields for record in caplog.records if _chunks(record)]
    assert fields | {"busy_seconds": 0} == {
        "rss_mb": 7,
        "live_workers": 2,
        "loaded_workers": 2,
        "busy_workers": 0,
        "suspect_workers": 0,
        "replaced_workers": 0,
        "queue_depth": 0,
        "queue_tokens": 0,
        "available_permits": 2,
        "probe_status": "disabled",
        "chunks": 1,
        "chunk_texts": 2,
        "chunk_tokens": 8,
        "padding_pct": 0.0,
        "cache_hits": 5,
        "busy_seconds": 0,
    }


def _chunks(record):
    return record.getMessage() == "heartbeat" and record.fields["chunks"]


@attrs.define
class Time:
    """A clock that stands still until it is set."""

    now: float = 0.0

    def __call__(self):
        return self.now


def test_memory_is_given_back_after_each_spell_of_work():
    """Once, as soon as nothing was to do for a second: by the model, too, though it stays."""
    clock, rests, trims = Time(), [], []
    model = attrs.evolve(
        loaded_model(FakeBackend(), cost_model=BATCHES), rest=lambda: rests.append(clock.now)
    )
    memory = ProcessMemory(trim=lambda: trims.append(clock.now))
    settings = EngineSettings(supervisor=SupervisorSettings(tick_seconds=0.01))
    engine = Engine(lambda: model, settings, NoTelemetry(), clock, memory)

    async def work():
        clock.now = 5.0  # long after the model was loaded
        await until(lambda: trims)
        for spell in (10.0, 20.0):
            clock.now = spell
            await engine.embed(["a b"], Heads.DENSE)
            await asyncio.sleep(0.05)
            assert spell not in trims
            clock.now = spell + 1.0
            await until(lambda done=spell + 1.0: done in trims)
            clock.now = spell + 5.0
            await asyncio.sleep(0.05)
            assert engine.status().loaded_workers == 2

    engine.load()
    with stopping(engine):
        asyncio.run(work())
        assert rests == trims == [5.0, 11.0, 21.0]
