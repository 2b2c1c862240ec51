"""Workers that fall between two passes, over the queue itself."""

import asyncio
import contextlib

import attrs
import pytest
from bge_m3_server.app.service import ProbeStatus, Tuning
from bge_m3_server.domain import CostModel, InferenceError, NoWorkersError
from bge_m3_server.domain.testing import FakeBackend
from bge_m3_server.domain.types import Heads

from tests.support.engines import engine_over, stopping, until

TUNING = Tuning(1.0, 0.0, 200, ProbeStatus.DISABLED)


@attrs.frozen
class UnusableCostModel(CostModel):
    """Whoever asks it falls."""

    def chunk_cost_bytes(self, count, max_tokens):
        raise OverflowError(f"{count} texts of {max_tokens} tokens")


BROKEN, SOUND = UnusableCostModel(1.0, 0.0, 200), CostModel(1.0, 0.0, 200)


def test_a_fall_ends_its_requests_and_is_seen():
    """They get an error instead of waiting for ever, and the place is empty for a while."""
    with stopping(engine_over(FakeBackend(), workers=1)) as engine:
        engine.set_cost_model(BROKEN, TUNING)
        with pytest.raises(InferenceError, match="the worker died"):
            asyncio.run(engine.embed(["a", "b"], Heads.DENSE))
        status = engine.status()

        assert (status.live_workers, status.replaced_workers) == (0, 1)
        assert status.queue.waiting_texts == 0


def test_a_worker_comes_back_after_a_fall():
    """What made it fall may have passed."""
    with stopping(engine_over(FakeBackend(), workers=1)) as engine:
        engine.set_cost_model(BROKEN, TUNING)
        with contextlib.suppress(InferenceError):
            asyncio.run(engine.embed(["a"], Heads.DENSE))
        engine.set_cost_model(SOUND, TUNING)
        asyncio.run(until(lambda: engine.status().live_workers))

        assert len(asyncio.run(engine.embed(["b"], Heads.DENSE)).embeddings) == 1
        assert engine.status().failure is None


def test_falls_end_in_fail_after_few_of_them():
    """The circuit breaker counts them: workers do not fall for ever."""

    async def ask(engine):
        while "kept failing after 3 reloads" not in (engine.status().failure or ""):
            with contextlib.suppress(InferenceError, NoWorkersError):
                await engine.embed(["a"], Heads.DENSE)

    with stopping(engine_over(FakeBackend(), workers=8)) as engine:
        engine.set_cost_model(BROKEN, TUNING)
        asyncio.run(asyncio.wait_for(ask(engine), 30))

        assert engine.status().replaced_workers <= 4 * 2 * 8
