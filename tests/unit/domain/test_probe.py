"""Which shapes are measured, and why others are not."""

import contextlib
from collections.abc import Iterator

import attrs
import pytest
from bge_m3_server.domain.errors import InferenceError
from bge_m3_server.domain.probe import (
    Probe,
    ProbeLimits,
    ProbeOutcome,
    growth,
    probe_shapes,
)
from bge_m3_server.domain.probe_fit import Coefficients, ShapePeak
from bge_m3_server.domain.testing import FakeClock
from hypothesis import given
from hypothesis import strategies as st

MIB = 1024**2
GIB = 1024**3
CONSERVATIVE = Coefficients(98_304.0, 192.0)
TRUE = Coefficients(80_000.0, 180.0)


@attrs.define
class FakeMeter:
    """Passes that cost what `true` says, at a hundredth of a second per token squared.

    `disturbed`: so many measurements from the start on are disturbed by other work, which can be
    held back where it `ends_soon`. `extra`: bytes on top of the first measurements.
    `fails_at`: the engine fails on this shape.
    """

    clock: FakeClock
    true: Coefficients = TRUE
    seconds_per_token: float = 0.0
    resident: int = 2 * GIB
    disturbed: int = 0
    fails_at: tuple[int, int] | None = None
    warmed_up: bool = False
    ends_soon: bool = True
    extra: Iterator[int] = attrs.field(factory=lambda: iter(()))
    is_held_back: bool = False
    measured: list[tuple[int, int]] = attrs.field(factory=list)

    def warm_up(self):
        self.warmed_up = True

    @contextlib.contextmanager
    def alone(self):
        self.is_held_back = self.ends_soon
        yield self.ends_soon
        self.is_held_back = False

    def resident_bytes(self):
        return self.resident

    def peak_bytes(self, batch, tokens):
        assert self.warmed_up
        if (batch, tokens) == self.fails_at:
            raise InferenceError("no more")
        self.clock.advance(batch * tokens * self.seconds_per_token)
        self.measured.append((batch, tokens))
        if self.disturbed and not self.is_held_back:
            self.disturbed -= 1
            return None
        return round(self.true.cost_bytes(batch, tokens)) + next(self.extra, 0)


def probe(meter, *, max_tokens=8192, cancelled=lambda: False, conservative=CONSERVATIVE, **limits):
    """A probe with room for everything, unless `limits` say otherwise."""
    roomy = {"memory_bytes": None, "workspace_bytes": 100 * GIB, "repeats": 1}
    return Probe(
        probe_shapes(max_tokens, conservative),
        meter,
        conservative,
        ProbeLimits(**roomy | limits),
        meter.clock,
        cancelled,
        meter.clock.advance,
    ).run()


@pytest.fixture
def meter():
    return FakeMeter(FakeClock())


@pytest.mark.parametrize(
    ("max_tokens", "longest", "count"),
    [
        (8192, (1, 8192), 10),
        (4096, (1, 4096), 9),
        (3000, (1, 3000), 9),
        (512, (8, 512), 7),
        (100, (40, 100), 4),
    ],
)
def test_shapes_reach_the_longest_text(max_tokens, longest, count):
    """The longest text that is accepted is measured itself, nothing beyond it is."""
    shapes = probe_shapes(max_tokens, CONSERVATIVE)

    assert longest in shapes
    assert max(tokens for _, tokens in shapes) == max_tokens
    assert len(shapes) == count


@given(st.integers(2, 8192))
def test_shapes_come_cheapest_first(max_tokens):
    """What a shape may need is always bounded by cheaper ones before it."""
    costs = [CONSERVATIVE.cost_bytes(*shape) for shape in probe_shapes(max_tokens, CONSERVATIVE)]

    assert costs == sorted(costs)
    assert len(set(costs)) == len(costs)


def test_everything_is_measured_where_there_is_room(meter):
    """Exact shapes, each once, with its time."""
    meter.seconds_per_token = 0.001
    result = probe(meter)

    assert result.outcome is ProbeOutcome.COMPLETE
    assert "10 of 10 shapes" in result.reason
    assert tuple(meter.measured) == probe_shapes(8192, CONSERVATIVE)
    assert result.peaks[0] == ShapePeak(1, 64, 80_000 * 64 + 180 * 64**2, pytest.approx(0.064))
    assert result.skipped == ()


def test_shapes_above_the_workspace_are_not_run(meter):
    """No forward pass will ever be that large, so its cost is not needed."""
    result = probe(meter, workspace_bytes=2 * GIB)

    assert result.outcome is ProbeOutcome.COMPLETE
    assert [skipped.shape for skipped in result.skipped] == [(1, 4096), (1, 8192)]
    assert "of workspace, one pass may use 2048 MiB" in result.skipped[0].reason
    assert max(peak.peak_bytes for peak in result.peaks) < 2 * GIB


def test_shapes_that_could_breach_the_limit_are_not_run(meter):
    """What is resident already counts against the limit."""
    result = probe(meter, memory_bytes=3 * GIB)

    assert max(peak.peak_bytes for peak in result.peaks) + meter.resident <= 3 * GIB
    assert [skipped.shape for skipped in result.skipped] == [(1, 2048), (1, 4096), (1, 8192)]
    assert "beside the 2048 MiB in use, the limit is 3072 MiB" in result.skipped[0].reason


def test_the_first_shape_is_judged_conservatively(meter):
    """Without any measurement, the model's own shape says what a pass may need."""
    result = probe(meter, memory_bytes=meter.resident + 5 * MIB)

    assert meter.measured == []
    assert len(result.skipped) == 10


def test_cheap_attention_is_found_out(meter):
    """With fused attention long texts are measured where conservative figures forbid them."""
    meter.true = Coefficients(80_000.0, 0.5)
    result = probe(meter, memory_bytes=meter.resident + 4 * GIB)

    assert CONSERVATIVE.cost_bytes(1, 8192) > 4 * GIB
    assert (1, 8192) in [(peak.batch, peak.tokens) for peak in result.peaks]


def test_too_low_conservative_figures_do_not_breach_the_limit(meter):
    """A model far beyond its conservative figures is caught by its first measurement."""
    meter.true = Coefficients(3_000_000.0, 20_000.0)
    limit = meter.resident + 2 * GIB
    result = probe(meter, memory_bytes=limit)

    assert all(peak.peak_bytes + meter.resident <= limit for peak in result.peaks)
    assert len(result.peaks) == 2


def test_a_slow_shape_is_left_out(meter):
    """A pass cannot be stopped, so one that may take too long is not begun."""
    meter.seconds_per_token = 0.01
    result = probe(meter, shape_seconds=25.0)

    assert result.outcome is ProbeOutcome.COMPLETE
    assert all(peak.seconds <= 25.0 for peak in result.peaks)
    assert {skipped.shape for skipped in result.skipped} >= {(1, 4096), (1, 8192)}
    assert "one pass may take 25 s" in result.skipped[-1].reason


def test_the_whole_probe_ends_in_time(meter):
    """What would go beyond the total is not begun, and what was measured is kept."""
    meter.seconds_per_token = 0.01
    result = probe(meter, total_seconds=60.0)

    assert result.outcome is ProbeOutcome.TIMED_OUT
    assert meter.clock() <= 60.0
    assert "within the 60 s" in result.reason
    assert len(result.peaks) >= 2


def test_a_disturbed_measurement_is_repeated(meter):
    """Peaks that other work may have raised do not count."""
    meter.disturbed = 2
    result = probe(meter, retry_seconds=3.0)

    assert meter.measured[:3] == [(1, 64)] * 3
    assert len(result.peaks) == 10
    assert meter.clock() == 6.0


def test_a_server_that_is_never_quiet(meter):
    """Other work is held back for short passes, and long ones are left out with the reason."""
    meter.disturbed = 10_000
    meter.seconds_per_token = 0.003
    result = probe(meter)

    assert result.outcome is ProbeOutcome.COMPLETE
    assert [(peak.batch, peak.tokens) for peak in result.peaks] == [
        (1, 64), (4, 64), (1, 256), (1, 512), (8, 128), (1, 1024),
    ]  # fmt: skip
    assert [skipped.shape for skipped in result.skipped] == [
        (4, 512), (1, 2048), (1, 4096), (1, 8192),
    ]  # fmt: skip
    assert "6 of 10 shapes were measured; 4x512: other work ran all the time" in result.reason
    assert result.was_disturbed
    assert meter.clock() <= 300.0


def test_a_busy_server_ends_the_probe_in_time(meter):
    """Waiting for quiet moments counts for the time of the whole probe."""
    meter.disturbed = 10_000
    meter.seconds_per_token = 0.003
    result = probe(meter, total_seconds=20.0)

    assert result.outcome is ProbeOutcome.TIMED_OUT
    assert meter.clock() <= 20.0 + 1.0  # the last pause
    assert len(result.peaks) >= 2


def test_patience_ends_once(meter):
    """Under steady load only the first shape is waited for; a quiet moment brings patience back."""
    meter.disturbed = 13
    result = probe(meter)

    assert meter.measured.count((1, 64)) == 11 + 1
    assert meter.measured.count((4, 64)) == 1 + 1
    assert len(result.peaks) == 10
    assert not result.was_disturbed


def test_work_that_cannot_be_held_back(meter):
    """What runs does not end in time: the probe ends all the same, without a measurement."""
    meter.disturbed, meter.ends_soon = 10_000, False
    result = probe(meter)

    assert result.peaks == ()
    assert len(result.skipped) == 10
    assert meter.clock() <= 300.0


def test_cheap_shapes_are_repeated(meter):
    """The largest of three readings counts, where they take no longer than a second."""
    meter.seconds_per_token = 0.001
    meter.extra = iter([10, 30, 20])
    result = probe(meter, repeats=3)

    assert result.peaks[0].peak_bytes == TRUE.cost_bytes(1, 64) + 30
    assert meter.measured.count((1, 256)) == 3
    assert meter.measured.count((1, 512)) == 1


def test_cancelled_between_passes(meter):
    """Shutdown waits for one pass at most."""
    result = probe(meter, cancelled=lambda: len(meter.measured) == 2)

    assert result.outcome is ProbeOutcome.CANCELLED
    assert result.reason == "cancelled by shutdown before 1x256"
    assert len(result.peaks) == 2


def test_an_engine_that_fails(meter):
    """The probe ends with what it has, and says what the engine said."""
    meter.fails_at = (8, 128)
    result = probe(meter)

    assert (result.outcome, result.reason) == (ProbeOutcome.ENGINE_FAILED, "no more")
    assert len(result.peaks) == 4


@given(
    a=st.floats(0, 1e6),
    b=st.floats(0, 1e4),
    first=st.tuples(st.integers(1, 64), st.integers(1, 8192)),
    second=st.tuples(st.integers(1, 64), st.integers(1, 8192)),
)
def test_growth_is_a_bound(a, b, first, second):
    """For any coefficients, no shape costs more than another one times the growth."""
    true = Coefficients(a, b)
    bound = true.cost_bytes(*first) * growth(ShapePeak(*first, 0), second)

    assert true.cost_bytes(*second) <= bound * (1 + 1e-9)
