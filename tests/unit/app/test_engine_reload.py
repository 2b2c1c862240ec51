"""An idle model that is slow to come back, or does not come back: health says so."""

import asyncio
import logging
import threading

import attrs
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.app.supervisor import SupervisorSettings
from bge_m3_server.domain import NoTelemetry
from bge_m3_server.domain.testing import FakeBackend
from bge_m3_server.domain.types import Heads

from tests.support.engines import loaded_model, stopping, until


@attrs.define
class Time:
    """A clock that stands still until it is set."""

    now: float = 0.0

    def __call__(self):
        return self.now


@attrs.define
class Loader:
    """The first load takes `first_seconds`; later ones wait at `gate` or raise the next error."""

    clock: Time
    first_seconds: float = 0.0
    gate: threading.Event = attrs.field(factory=threading.Event)
    loading: threading.Event = attrs.field(factory=threading.Event)
    errors: list[Exception] = attrs.field(factory=list)
    loads: int = 0

    def __call__(self):
        self.loads += 1
        if self.loads == 1:
            self.clock.now += self.first_seconds
        else:
            self.loading.set()
            assert self.gate.wait(10)
            if self.errors:
                raise self.errors.pop(0)
        return loaded_model(FakeBackend())


def idling_engine(loader, **settings):
    supervisor = SupervisorSettings(
        **{"idle_timeout_seconds": 60.0, "tick_seconds": 0.01, **settings}
    )
    engine = Engine(loader, EngineSettings(supervisor=supervisor), NoTelemetry(), loader.clock)
    engine.load()
    return engine


async def request_that_wakes(engine, loader):
    """Let the model be unloaded, then ask; returns when it is on its way."""
    loader.clock.now += 100.0
    await until(lambda: engine.status().loaded_workers == 0)
    request = asyncio.create_task(engine.embed(["wake up"], Heads.DENSE))
    await until(loader.loading.is_set)
    return request


def test_a_quick_return_is_not_worth_a_word():
    """Readiness does not flap each time that an idle model comes back."""
    loader = Loader(Time())

    async def ask(engine):
        request = await request_that_wakes(engine, loader)
        loader.clock.now += 1.9
        delay = engine.status().delay
        loader.gate.set()
        await request
        return delay

    with stopping(idling_engine(loader)) as engine:
        assert asyncio.run(ask(engine)) is None
        assert engine.status().delay is None


def test_a_load_that_hangs_is_told():
    """After two seconds, while requests still wait for it."""
    loader = Loader(Time())

    async def ask(engine):
        request = await request_that_wakes(engine, loader)
        loader.clock.now += 2.0
        delay = engine.status().delay
        loader.gate.set()
        await request
        return delay

    with stopping(idling_engine(loader)) as engine:
        assert asyncio.run(ask(engine)) == "the model is being loaded again, for 2 s so far"
        asyncio.run(until(lambda: engine.status().delay is None))


def test_a_model_that_always_takes_long_is_not_late_until_it_takes_longer():
    """The start has shown what is usual; beyond half a minute nothing is."""

    async def delays(engine, loader, seconds):
        request = await request_that_wakes(engine, loader)
        found, began = [], loader.clock.now
        for passed in seconds:
            loader.clock.now = began + passed
            found.append(engine.status().delay is not None)
        loader.gate.set()
        await request
        return found

    for first_seconds, usual_seconds in ((8.0, 8.0), (600.0, 30.0)):
        loader = Loader(Time(), first_seconds)
        with stopping(idling_engine(loader)) as engine:
            looks = delays(engine, loader, (usual_seconds - 1, usual_seconds + 1))
            assert asyncio.run(looks) == [False, True]


def test_a_try_that_failed_is_told_at_once():
    """However quick it was; the next one may succeed all the same."""
    loader = Loader(Time(), errors=[RuntimeError("no such file")])

    async def ask(engine):
        request = await request_that_wakes(engine, loader)
        loader.gate.set()
        await until(lambda: engine.status().delay)
        delay = engine.status().delay
        await request
        return delay

    with stopping(idling_engine(loader, reload_pause_seconds=0.2)) as engine:
        delay = asyncio.run(ask(engine))
        assert delay == "the model is being loaded again: 1 of 3 tries have failed"
        asyncio.run(until(lambda: engine.status().delay is None))
        assert engine.status().failure is None


def test_the_heartbeat_goes_on_while_a_model_loads(caplog):
    """The supervisor watches and tells, whatever the load does."""
    loader = Loader(Time())

    def beats():
        return sum(record.getMessage() == "heartbeat" for record in caplog.records)

    async def ask(engine):
        request = await request_that_wakes(engine, loader)
        before = beats()
        loader.clock.now += 10.0
        await until(lambda: beats() > before)
        loader.gate.set()
        await request

    with (
        caplog.at_level(logging.INFO, "bge_m3_server"),
        stopping(idling_engine(loader, heartbeat_seconds=10.0)) as engine,
    ):
        asyncio.run(ask(engine))
