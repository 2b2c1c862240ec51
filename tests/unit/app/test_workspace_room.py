"""Texts that need more than a worker's share of the workspace, and more than all of it."""

import asyncio
import time

import pytest
from bge_m3_server.app.http.errors import failure_of
from bge_m3_server.app.service import ProbeStatus, Tuning
from bge_m3_server.app.workspace_room import PROBE_RETRY_SECONDS, require_room
from bge_m3_server.domain import CostModel, NotReadyError, RequestTooLargeError
from bge_m3_server.domain.types import Heads

from tests.support.engines import GatedBackend, engine_over, stopping

SHARE = CostModel(1.0, 0.0, 20)
"""Of two workers: one byte per token."""


def tuning(total_bytes=40, status=ProbeStatus.COMPLETE):
    return Tuning(1.0, 0.0, 20, status, total_workspace_bytes=total_bytes)


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
