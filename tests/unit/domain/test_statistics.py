"""Sequence-length figures of a request."""

from bge_m3_server.domain import LengthStats
from hypothesis import given, settings
from hypothesis import strategies as st


def test_no_texts():
    """An empty request is all zeros."""
    assert LengthStats.of([]) == LengthStats(minimum=0, maximum=0, mean=0, p95=0, total=0)


def test_one_text():
    """A single length is each of its own statistics."""
    assert LengthStats.of([42]) == LengthStats(minimum=42, maximum=42, mean=42, p95=42, total=42)


def test_p95_of_64_is_the_61st_shortest():
    """The place of p95 is 64 × 95 div 100 = 60, counted from 0, in ascending order."""
    stats = LengthStats.of(list(range(64, 0, -1)))

    assert stats == LengthStats(minimum=1, maximum=64, mean=32, p95=61, total=2080)


def test_p95_of_100_is_the_96th_shortest():
    """Only four texts of a hundred with different lengths are longer than p95."""
    assert LengthStats.of(list(range(1, 101))).p95 == 96


def test_mean_is_rounded_down():
    """1 and 2 tokens are 1 on average."""
    assert LengthStats.of([1, 2]).mean == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 8192), min_size=1, max_size=300))
def test_figures_lie_between_the_extremes(lengths):
    """Mean and p95 lie within the lengths, and at least 95 % of texts are no longer than p95."""
    stats = LengthStats.of(lengths)

    assert stats.minimum == min(lengths)
    assert stats.maximum == max(lengths)
    assert stats.total == sum(lengths)
    assert stats.minimum <= stats.mean <= stats.maximum
    assert stats.p95 in lengths
    assert sum(length <= stats.p95 for length in lengths) * 100 >= len(lengths) * 95
