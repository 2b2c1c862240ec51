"""What measured speed decides: sizes of chunks, patience, and when to come back."""

import numpy as np
import pytest
from bge_m3_server.app.admission import Admission, size_bytes
from bge_m3_server.app.jobs import Job, Task, is_out_of_memory
from bge_m3_server.app.pace import Pace
from bge_m3_server.app.service import ModelInfo
from bge_m3_server.domain.errors import InferenceError, QueueFullError
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
    assert pace.hang_seconds(task(10, 1000), minimum=60) == pytest.approx(200)


@pytest.mark.parametrize(
    ("tokens_per_second", "seconds"), [(100.0, 0.5), (None, 1.0), (0.001, 60.0)]
)
def test_the_time_to_come_back_follows_from_the_drain_rate(tokens_per_second, seconds):
    """The excess over the speed; a second where nobody knows, a minute at most."""
    admission = Admission(limit_tokens=1000, limit_bytes=1)
    with pytest.raises(QueueFullError) as caught:
        admission.require_tokens(150, 900, tokens_per_second)

    assert caught.value.retry_after_seconds == pytest.approx(seconds)


def test_multi_vectors_weigh_more_than_dense_ones():
    """What a request holds depends on what it asks for."""
    model = ModelInfo("m", Heads.DENSE | Heads.COLBERT, dimensions=1024, max_tokens=8192)
    dense = size_bytes(["x" * 1000], Heads.DENSE, model)

    assert 4096 < dense < 20_000
    assert size_bytes(["x" * 1000], Heads.COLBERT, model) > 1000 * 4096


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (InferenceError("CUDA error: Out Of Memory"), True),
        (InferenceError("Failed to allocate memory for requested buffer of size 8"), True),
        (InferenceError("Failed to allocate 134217728 bytes of memory"), True),
        (InferenceError("invalid dimension"), False),
    ],
)
def test_out_of_memory_is_told_from_other_failures(error, expected):
    """By type or by what the engines say, also of the cause."""
    outer = InferenceError("a batch failed")
    outer.__cause__ = error

    assert is_out_of_memory(error) is expected
    assert is_out_of_memory(outer) is expected
