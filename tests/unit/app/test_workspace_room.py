"""Texts that need more than a worker's share of the workspace, and more than all of it."""

import asyncio
import time

import attrs
import pytest
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.app.http.errors import failure_of
from bge_m3_server.app.service import ProbeStatus, Tuning
from bge_m3_server.app.workspace_room import PROBE_RETRY_SECONDS, require_room
from bge_m3_server.domain import CostModel, NoTelemetry, NotReadyError, RequestTooLargeError
from bge_m3_server.domain.testing import FakeTokenizer
from bge_m3_server.domain.types import Heads

from tests.support.engines import (
    TICK,
    GatedBackend,
    engine_over,
    loaded_model,
    numbered,
    stopping,
    until,
)
from tests.support.fault_backend import Fault, FaultBackend

SHARE = CostModel(1.0, 0.0, 20)
"""Of two workers: one byte per token."""


def tuning(total_bytes=40, status=ProbeStatus.COMPLETE):
    return Tuning(1.0, 0.0, 20, status, total_workspace_bytes=total_bytes)


@attrs.define
class Time:
    """A clock that stands still until it is set."""

    now: float = 0.0

    def __call__(self):
        return self.now


def text(tokens):
    return " ".join(["word"] * (tokens - 2))


def test_a_text_beyond_the_whole_workspace_is_refused():
    """What does not fit alone never will: 413, with what would fit."""
    require_room([40, 3], tuning())
    with pytest.raises(RequestTooLargeError, match="at most 40 tokens") as caught:
        require_room([3, 41], tuning())

    assert caught.value.param == "input[1]"


def test_a_refusal_by_figures_soon_to_be_replaced_is_temporary():
    """While the probe runs, the answer is to try again: 503 with Retry-After."""
    with pytest.raises(NotReadyError, match="being measured") as caught:
        require_room([41], tuning(status=ProbeStatus.RUNNING))

    failure = failure_of(caught.value, "POST", "/v1/embeddings")
    assert failure.status == 503
    assert failure.headers["retry-after"] == f"{PROBE_RETRY_SECONDS:.0f}"


def test_a_pinned_ceiling_refuses_nothing():
    """An operator who pins the budget is obeyed."""
    require_room([8192], tuning(total_bytes=None))


def test_a_refused_request_reaches_no_worker():
    """The refusal comes from the engine, before anything is queued."""
    backend = GatedBackend()
    engine = engine_over(backend)
    engine.set_cost_model(SHARE, tuning())
    backend.runs.clear()
    with stopping(engine), pytest.raises(RequestTooLargeError):
        asyncio.run(engine.embed([text(41)], Heads.DENSE))

    assert backend.runs == []


def wait_until_busy(engine):
    while engine.status().busy_workers < 2:
        time.sleep(0.01)


@pytest.mark.parametrize(("total_bytes", "begins_at_once"), [(40, False), (None, True)])
def test_a_large_text_waits_until_there_is_room(total_bytes, begins_at_once):
    """More than a share beside a running pass would breach the budget, so it has to end first."""
    backend = GatedBackend()
    engine = engine_over(backend, workers=2)
    engine.set_cost_model(SHARE, tuning(total_bytes))
    backend.guarded = True

    async def embed():
        first = asyncio.create_task(engine.embed([text(10)], Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        large = asyncio.create_task(engine.embed([text(35)], Heads.DENSE))
        began = await asyncio.to_thread(backend.waiting.acquire, timeout=0.2)
        status = engine.status()
        last = asyncio.create_task(engine.embed([text(5)], Heads.DENSE))
        if not begins_at_once:
            began = began or await asyncio.to_thread(backend.waiting.acquire, timeout=0.2)
        backend.gate.set()
        return began, status.busy_workers, await asyncio.gather(first, large, last)

    with stopping(engine):
        began, busy_workers, answers = asyncio.run(embed())

    assert began == begins_at_once
    assert busy_workers == 2
    assert [answer.prompt_tokens for answer in answers] == [10, 35, 5]


def room_engine(backend, clock):
    """Two workers that share forty bytes; how long a chunk should take is known."""
    model = attrs.evolve(
        loaded_model(backend, cost_model=SHARE, seconds_per_position=1e-4), tuning=tuning()
    )
    engine = Engine(lambda: model, EngineSettings(supervisor=TICK), NoTelemetry(), clock)
    engine.load()
    return engine


def test_a_text_that_nobody_wants_any_more_needs_no_room():
    """Its client has left: what waited behind it begins at once, and the queue forgets it."""
    backend = GatedBackend(guarded=True)
    engine = room_engine(backend, Time())

    async def embed():
        first = asyncio.create_task(engine.embed([text(10)], Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        large = asyncio.create_task(engine.embed([text(35)], Heads.DENSE))
        await until(lambda: engine.status().busy_workers == 2)
        assert engine.status().queue.waiting_tokens == 35
        small = asyncio.create_task(engine.embed([text(5)], Heads.DENSE))
        await until(lambda: engine.status().queue.waiting_tokens == 40)
        large.cancel()
        assert await asyncio.to_thread(backend.waiting.acquire, timeout=10)
        assert engine.status().queue.waiting_tokens == 0
        backend.gate.set()
        return await asyncio.gather(first, small, large, return_exceptions=True)

    with stopping(engine):
        first, small, large = asyncio.run(embed())

    assert (first.prompt_tokens, small.prompt_tokens) == (10, 5)
    assert isinstance(large, asyncio.CancelledError)


def test_the_canary_does_not_wait_for_the_room_of_others():
    """It is small enough to begin beside what runs, while a large text waits."""
    backend = GatedBackend(guarded=True)
    engine = room_engine(backend, Time())

    async def embed():
        first = asyncio.create_task(engine.embed([text(10)], Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        large = asyncio.create_task(engine.embed([text(35)], Heads.DENSE))
        await until(lambda: engine.status().busy_workers == 2)
        canary = asyncio.create_task(engine.canary())
        began = await asyncio.to_thread(backend.waiting.acquire, timeout=10)
        backend.gate.set()
        await asyncio.gather(first, large)
        return began, await canary

    with stopping(engine):
        began, report = asyncio.run(embed())

    assert began
    assert report.is_healthy


def test_others_go_on_while_what_may_hang_holds_the_room():
    """Small texts run beside it, the large one gets its turn when it has ended."""
    backend, clock = FaultBackend(), Time()
    backend.poison = {FakeTokenizer().word_id("poison"): Fault.HANG}
    engine = room_engine(backend, clock)

    async def embed():
        hanging = asyncio.create_task(engine.embed(["poison " + text(24)], Heads.DENSE))
        await until(lambda: backend.hanging_since)
        large = asyncio.create_task(engine.embed([text(35)], Heads.DENSE))
        await until(lambda: engine.status().busy_workers == 2)
        small = asyncio.create_task(engine.embed(numbered(4, tokens=5), Heads.DENSE))
        await until(lambda: engine.status().queue.waiting_texts == 5)
        clock.now += 5.0
        answer, report = await small, await engine.canary()
        assert engine.status().queue.waiting_texts == 1
        backend.released.set()
        await asyncio.gather(hanging, large)
        return answer, report

    with stopping(engine):
        answer, report = asyncio.run(embed())

    assert answer.prompt_tokens == 20
    assert report.is_healthy


def test_waiting_for_room_that_a_hanging_worker_holds_is_not_work():
    """Where not even the canary finds room beside it, deep health does not call that busy."""
    backend, clock = FaultBackend(), Time()
    backend.poison = {FakeTokenizer().word_id("poison"): Fault.HANG}
    engine = room_engine(backend, clock)

    async def embed():
        hanging = asyncio.create_task(engine.embed(["poison " + text(38)], Heads.DENSE))
        await until(lambda: backend.hanging_since)
        clock.now += 5.0
        canary = asyncio.create_task(engine.canary())
        await until(lambda: engine.status().queue.waiting_texts)
        clock.now += 11.0
        report = await canary
        backend.released.set()
        await hanging
        return report

    with stopping(engine):
        report = asyncio.run(embed())

    assert not report.is_healthy
    assert report.reason == "no answer within 10 s"


def test_a_stop_ends_the_wait_for_room():
    """Nobody waits for a pass that will not run any more."""
    backend = GatedBackend()
    engine = engine_over(backend, workers=2)
    engine.set_cost_model(SHARE, tuning())
    backend.guarded = True

    async def embed():
        first = asyncio.create_task(engine.embed([text(10)], Heads.DENSE))
        await asyncio.to_thread(backend.waiting.acquire)
        large = asyncio.create_task(engine.embed([text(35)], Heads.DENSE))
        await asyncio.to_thread(wait_until_busy, engine)
        engine.abort()
        return await asyncio.gather(first, large, return_exceptions=True)

    with stopping(engine):
        answers = asyncio.run(embed())
        backend.gate.set()

    assert all(isinstance(answer, NotReadyError) for answer in answers)
