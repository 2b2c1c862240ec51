"""What measured speed decides: sizes of chunks, and patience."""

import numpy as np
import pytest
from bge_m3_server.app.jobs import Job, Task
from bge_m3_server.app.pace import Pace
from bge_m3_server.domain.types import Heads, TokenizedText


def task(texts, tokens):
    job = Job([TokenizedText(np.zeros(tokens, np.int64))] * texts, Heads.DENSE, 0.0)
    return Task(tuple((job, index) for index in range(texts)), Heads.DENSE, 0)


def pace_of(positions_per_second):
    pace = Pace()
    pace.record(task(10, 100), 1000 / positions_per_second)
    return pace


@pytest.mark.parametrize(
    ("positions_per_second", "waiting", "free_workers", "limit"),
    [
        (10_000, 10**6, 1, 5000),
        (10_000, 8000, 4, 2000),
        (10_000, 100, 4, 512),
        (100, 10**6, 1, 512),
    ],
    ids=["half a second", "a share for each free worker", "not too small", "slow engine"],
)
def test_chunks_end_soon_and_leave_work_for_others(
    positions_per_second, waiting, free_workers, limit
):
    """Half a second of work at most, a share of what waits, and never inefficiently little."""
    assert pace_of(positions_per_second).position_limit(waiting, free_workers) == limit


def test_nothing_limits_the_first_chunk_of_a_single_worker():
    """Until something was measured, only the budget counts."""
    assert Pace().position_limit(10**6, 1) is None


def test_patience_grows_with_the_chunk():
    """A large chunk on a slow machine is not taken for hanging."""
    pace = pace_of(1000)

    assert pace.hang_seconds(task(1, 100), minimum=60) == 60
    assert pace.hang_seconds(task(10, 1000), minimum=60) == pytest.approx(
        20 * 10 * (1 + 1000 / 6144)
    )


def test_a_chunk_that_should_be_over_is_suspect_within_two_seconds():
    """As long as the engine keeps chunks short, a worker that hangs shows at once."""
    pace = pace_of(1000)
    limit = pace.position_limit(10**6, 1)

    assert pace.suspect_seconds(task(1, 10)) == 1.0
    assert pace.suspect_seconds(task(limit // 10, 10)) <= 2.0


def test_the_first_chunk_is_judged_by_what_loading_took():
    """An assumed pace holds until a chunk has succeeded, and then counts no more."""
    pace = Pace()
    pace.assume(0.001)
    assert pace.suspect_seconds(task(1, 10)) == 1.0
    assert pace.position_limit(10**6, 1) == 512
    pace.record(task(10, 100), 0.1)
    assert pace.seconds_per_position == pytest.approx(1e-4)
    pace.assume(5.0)
    assert pace.seconds_per_position == pytest.approx(1e-4)


def test_a_pass_too_short_to_measure_tells_nothing():
    """A coarse clock may say that loading's short pass took no time at all."""
    pace = Pace()
    pace.assume(0.0)

    assert pace.position_limit(10**6, 1) is None
    assert pace.top_up_positions() == 512
    assert pace.suspect_seconds(task(1, 8)) == float("inf")


def test_an_honest_long_chunk_is_not_suspect():
    """A text of 8192 tokens takes more than twice as long per token as those measured so far."""
    pace = pace_of(1000)
    honest_seconds = 8192 / 1000 * (1 + 8192 / 6144)

    assert pace.suspect_seconds(task(1, 8192)) > 2.5 * honest_seconds
    assert Pace().suspect_seconds(task(1, 8)) == float("inf")
