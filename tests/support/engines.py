"""An `Engine` over the domain's fakes."""

import asyncio
import contextlib
import threading
import time

import attrs
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.app.loading import LoadedModel
from bge_m3_server.app.service import ModelInfo, ProbeStatus, Tuning
from bge_m3_server.app.supervisor import SupervisorSettings
from bge_m3_server.domain import CostModel, NoTelemetry
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer


def loaded_model(*backends, cost_model=None, seconds_per_position=None):
    """What a loader returns for `backends`, with a budget that packs about four short texts."""
    cost_model = cost_model or CostModel(1.0, 0.0, 20)
    return LoadedModel(
        info=ModelInfo(
            model_id="fake",
            heads=backends[0].contract.heads,
            dimensions=backends[0].hidden_size,
            max_tokens=8192,
        ),
        tokenizer=FakeTokenizer(),
        backends=backends,
        cost_model=cost_model,
        seconds_per_position=seconds_per_position,
        tuning=Tuning(1.0, 0.0, cost_model.max_workspace_bytes, ProbeStatus.DISABLED),
    )


TICK = SupervisorSettings(tick_seconds=0.01, reload_pause_seconds=0.01)


def engine_over(*backends, telemetry=None, cost_model=None, **settings):
    """An engine that is loaded and ready, with a supervisor that looks around often."""
    engine = Engine(
        lambda: loaded_model(*backends, cost_model=cost_model),
        EngineSettings(**{"supervisor": TICK, **settings}),
        telemetry or NoTelemetry(),
        time.monotonic,
    )
    engine.load()
    return engine


@contextlib.contextmanager
def stopping(engine):
    """Stop the engine at the end."""
    try:
        yield engine
    finally:
        engine.stop()


@attrs.define(eq=False)
class GatedBackend(FakeBackend):
    """A fake whose runs wait at a gate; `waiting` counts who has arrived."""

    gate: threading.Event = attrs.field(factory=threading.Event)
    waiting: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    guarded: bool = False

    def run(self, batch, outputs):
        """Wait for the gate, then behave as usual."""
        if self.guarded:
            self.waiting.release()
            assert self.gate.wait(timeout=30)
        return FakeBackend.run(self, batch, outputs)


async def until(condition, timeout_seconds=10):
    """Wait for what another task or thread does."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110  a thread tells nobody
            await asyncio.sleep(0.002)


def numbered(count, tokens):
    """Texts of so many tokens each, no two of them the same."""
    return [f"{number} " + "word " * (tokens - 3) for number in range(count)]
