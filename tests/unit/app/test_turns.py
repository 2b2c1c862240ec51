"""A crowd is let in by turns of the event loop."""

import asyncio
import contextlib

from bge_m3_server.app.http.turns import STARTS_PER_TURN, Turns


async def crowd(count):
    """Who was let in by how many turns; in the order in which they were."""
    turns, turn, entered = Turns(), 0, []

    async def enter(number):
        await turns.wait()
        entered.append((number, turn))

    tasks = [asyncio.create_task(enter(number)) for number in range(count)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
    return entered


def test_a_crowd_is_let_in_a_few_at_a_time_and_in_order():
    """No turn of the loop begins more than its share, and nobody is forgotten."""
    entered = asyncio.run(crowd(10 * STARTS_PER_TURN + 1))

    assert [number for number, _ in entered] == list(range(10 * STARTS_PER_TURN + 1))
    for turn in {turn for _, turn in entered}:
        assert sum(then == turn for _, then in entered) <= STARTS_PER_TURN


def test_a_few_do_not_wait():
    """Without a crowd everybody goes on at once."""
    assert {turn for _, turn in asyncio.run(crowd(STARTS_PER_TURN))} == {0}


def test_who_leaves_takes_nobody_elses_turn():
    """A request that is cancelled while it waits is passed over."""

    async def leave():
        turns = Turns()
        waiting = [asyncio.create_task(turns.wait()) for _ in range(3 * STARTS_PER_TURN)]
        await asyncio.sleep(0)
        for task in waiting[STARTS_PER_TURN : 2 * STARTS_PER_TURN]:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting)
        return await asyncio.wait_for(asyncio.gather(*waiting[2 * STARTS_PER_TURN :]), 10)

    assert len(asyncio.run(leave())) == STARTS_PER_TURN
