"""From measured peaks to coefficients."""

import math

import attrs
import pytest
from bge_m3_server.domain.probe_fit import (
    A_RANGE,
    B_RANGE,
    NOTICEABLE_BYTES,
    UNSEEN_SHAPE_MARGIN,
    Coefficients,
    Fit,
    FitRefusal,
    ShapePeak,
    fit_workspace,
    is_plausible,
    least_squares,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SEVEN_SHAPES = [(1, 64), (4, 64), (1, 256), (1, 1024), (1, 2048), (1, 4096), (1, 8192)]
GRID = [(batch, tokens) for batch in (1, 4, 8, 16) for tokens in (64, 256, 1024, 2048)]
MIB = 1024**2


def peaks_of(shapes, a, b):
    """Peaks that follow the model to the byte."""
    return [
        ShapePeak(batch, tokens, math.floor(a * batch * tokens + b * batch * tokens**2))
        for batch, tokens in shapes
    ]


def peaks(table):
    return [ShapePeak(batch, tokens, int(size)) for (batch, tokens), size in table.items()]


@pytest.mark.parametrize("shapes", [SEVEN_SHAPES, [s for s in SEVEN_SHAPES if s != (4, 64)], GRID])
def test_coefficients_that_made_the_peaks_are_found(shapes):
    """Seven shapes, the same without the only batch, and a grid give back a = 18000 and b = 6."""
    solved = least_squares(peaks_of(shapes, 18_000, 6))

    assert solved.a_bytes_per_token == pytest.approx(18_000, rel=1e-4)
    assert solved.b_bytes_per_token_sq == pytest.approx(6, rel=1e-4)


def test_peaks_from_production():
    """Where short texts show nothing, the quadratic term alone explains the long ones."""
    measured = peaks(dict(zip(SEVEN_SHAPES, (0, 0, 0, 10e6, 12e6, 1976e6, 7846e6), strict=True)))
    solved = least_squares(measured)
    fit = fit_workspace(measured)

    assert solved.a_bytes_per_token == 0.0
    assert solved.b_bytes_per_token_sq == pytest.approx(131.06, abs=0.01)
    assert fit.coefficients.a_bytes_per_token == A_RANGE[0] * UNSEEN_SHAPE_MARGIN
    assert fit.coefficients.cost_bytes(1, 8192) == pytest.approx(
        7846e6 * UNSEEN_SHAPE_MARGIN, rel=0.15
    )


def test_what_an_engine_needs_for_any_pass_is_no_reason_to_refuse():
    """A small model on OpenVINO: of 36 to 103 MiB, 35 are needed whatever the pass."""
    table = {
        (1, 64): 35.8,
        (4, 64): 39.5,
        (1, 256): 41.5,
        (1, 512): 46.6,
        (8, 128): 54.5,
        (4, 512): 70.9,
        (8, 512): 102.6,
    }
    measured = peaks({shape: size * MIB for shape, size in table.items()})
    fit = fit_workspace(measured)

    assert isinstance(fit, Fit)
    assert fit.quality.r_squared > 0.98
    assert fit.quality.margin < 1.5
    assert 25 * MIB < fit.coefficients.fixed_bytes < 45 * MIB
    for peak in measured:
        assert fit.coefficients.cost_bytes(peak.batch, peak.tokens) >= peak.peak_bytes


def test_a_linear_term_below_the_range_is_raised():
    """Four peaks of short texts give a = 1592, less than any BERT needs."""
    measured = peaks({(1, 64): 8e6, (1, 512): 1e8, (4, 64): 3e7, (4, 256): 8e7})
    solved = least_squares(measured)
    fit = fit_workspace(measured)

    assert solved.a_bytes_per_token == pytest.approx(1591.8, abs=0.1)
    assert solved.b_bytes_per_token_sq == pytest.approx(341.71, abs=0.01)
    assert fit.coefficients.a_bytes_per_token >= A_RANGE[0]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({(1, 64): 8e6}, "two coefficients need at least two"),
        ({(1, 64): 8e6, (4, 64): 3e7}, "one length"),
        ({(1, 512): 1e8, (2, 512): 2e8, (16, 512): 16e8}, "one length"),
        ({(1, 64): 0, (1, 512): 0}, "every measured peak is zero"),
        ({(16, 64): 1e7, (1, 8192): 1, (8, 256): 5e6, (4, 1024): 2e6}, "do not grow"),
    ],
)
def test_measurements_that_allow_no_fit(table, reason):
    """Too few, one length, nothing seen, or shrinking peaks: the refusal says which."""
    refusal = fit_workspace(peaks(table))

    assert isinstance(refusal, FitRefusal)
    assert reason in refusal.reason


def test_two_identical_points_allow_no_fit():
    """A shape that is measured twice is one point."""
    assert isinstance(fit_workspace([ShapePeak(1, 64, 5), ShapePeak(1, 64, 5)]), FitRefusal)


def test_quality_of_an_exact_fit():
    """Peaks on the surface leave nothing unexplained and need no margin but the one for others."""
    fit = fit_workspace(peaks_of(SEVEN_SHAPES, 80_000, 180))

    assert fit.quality.r_squared == pytest.approx(1.0, abs=1e-9)
    assert fit.quality.worst_relative_error < 1e-6
    assert fit.quality.margin == pytest.approx(UNSEEN_SHAPE_MARGIN, rel=1e-6)
    assert fit.quality.points == 7


def test_quality_of_a_poor_fit():
    """A peak twice as high as the surface shows in the error, and in what covering it costs."""
    measured = peaks_of(SEVEN_SHAPES, 80_000, 180)
    measured[0] = attrs.evolve(measured[0], peak_bytes=2 * measured[0].peak_bytes)
    fit = fit_workspace(measured)

    assert fit.quality.worst_relative_error == pytest.approx(0.5, abs=0.01)
    assert 1.15 < fit.quality.margin < 2.3
    assert fit.quality.r_squared > 0.99
    assert fit.coefficients.cost_bytes(1, 8192) < 1.25 * measured[-1].peak_bytes


@given(st.floats(1, 8), st.floats(20_000, 200_000), st.floats(0, 300))
def test_what_every_pass_needs_is_not_charged_to_the_tokens(fixed_mib, a, b):
    """An engine's fixed need raises no estimate of a large pass by more than the usual margin."""
    fixed_bytes = fixed_mib * 2**20
    measured = [
        attrs.evolve(peak, peak_bytes=round(peak.peak_bytes + fixed_bytes))
        for peak in peaks_of(SEVEN_SHAPES, a, b)
    ]
    fit = fit_workspace(measured)

    for peak in measured:
        assert fit.coefficients.cost_bytes(peak.batch, peak.tokens) >= peak.peak_bytes
    true_bytes = 16_384 * a + 16_384 * 1024 * b + fixed_bytes
    assert fit.coefficients.cost_bytes(16, 1024) < 1.5 * true_bytes


def test_attention_that_needs_no_scores():
    """Peaks that are proportional to the tokens give a fit without a quadratic term."""
    linear = peaks_of([*SEVEN_SHAPES, (8, 128), (4, 512)], 90_000, 0)
    wavy = [
        attrs.evolve(peak, peak_bytes=round(peak.peak_bytes * (1.03 if number % 2 else 0.97)))
        for number, peak in enumerate(linear)
    ]
    fit = fit_workspace(wavy)

    assert least_squares(wavy).b_bytes_per_token_sq == 0.0
    assert 1.0 < fit.coefficients.cost_bytes(1, 8192) / (90_000 * 8192) < 1.3
    assert fit.quality.r_squared > 0.98


def test_peaks_of_a_small_model():
    """Where the allocator keeps more for short texts than long ones need, every peak is covered."""
    measured = peaks({(1, 64): 6 * MIB, (4, 64): 23 * MIB, (1, 256): 43 * MIB, (8, 128): 95 * MIB,
                      (1, 512): 155 * MIB, (4, 512): 198 * MIB, (8, 512): 519 * MIB})  # fmt: skip
    fit = fit_workspace(measured)

    assert fit.quality.r_squared > 0.8
    for peak in measured:
        assert fit.coefficients.cost_bytes(peak.batch, peak.tokens) >= peak.peak_bytes


def test_what_scatter_can_hide_is_allowed_for():
    """Short texts cannot show a small quadratic term; long ones are estimated as if it was."""
    fit = fit_workspace(peaks_of([(1, 64), (4, 64), (1, 256), (1, 1024)], 90_000, 0))

    assert fit.coefficients.cost_bytes(1, 1024) < 1.2 * 90_000 * 1024
    assert fit.coefficients.cost_bytes(1, 8192) > 1.4 * 90_000 * 8192


def test_short_texts_alone_do_not_tell_what_long_ones_need():
    """A probe that got no further than 512 tokens keeps the conservative quadratic term.

    Unless no longer text is accepted.
    """
    conservative = Coefficients(98_304.0, 192.0)
    measured = peaks_of([(1, 64), (4, 64), (1, 256), (1, 512)], 90_000, 20)
    short = fit_workspace(measured, conservative, 8192)
    longest = fit_workspace(measured, conservative, 512)

    assert short.coefficients.b_bytes_per_token_sq >= 180.0
    assert longest.coefficients.b_bytes_per_token_sq < 30.0


@given(
    a=st.floats(40_000, 100_000),
    b=st.floats(20, 192),
    longest=st.sampled_from((256, 512, 1024, 2048)),
)
def test_a_pass_that_peaks_in_one_part_is_not_underestimated_where_it_is_longer(a, b, longest):
    """Feed-forward part or attention, whichever is larger: a probe cut short covers the rest."""
    shapes = [(1, 64), (4, 64), (1, 256), (8, 128), (1, 512), (1, 1024), (1, 2048)]

    def true_bytes(batch, tokens):
        return batch * tokens * max(a, b * tokens)

    measured = [
        ShapePeak(*shape, round(true_bytes(*shape))) for shape in shapes if shape[1] <= longest
    ]
    fit = fit_workspace(measured, Coefficients(98_304.0, 192.0), 8192)

    for shape in ((1, 3152), (1, 8192), (2, 3000), (3, 700)):
        assert fit.coefficients.cost_bytes(*shape) >= 0.95 * true_bytes(*shape)


def test_covering_short_texts_does_not_cost_long_ones():
    """Passes that peak in the feed-forward part raise the linear term, not the quadratic one."""
    shapes = [(1, 64), (4, 64), (1, 256), (1, 512), (8, 128), (1, 1024), (4, 512)]
    sizes = [5.1, 22, 30, 80, 96, 270, 312]
    fit = fit_workspace(peaks({s: size * MIB for s, size in zip(shapes, sizes, strict=True)}))

    assert fit.quality.margin < 1.35
    assert 1.0 <= fit.coefficients.cost_bytes(2, 3000) / (3631 * MIB) <= 1.3


def test_peaks_of_a_real_model():
    """Peaks measured on ONNX Runtime predict shapes that were not measured within 0 to +50 %."""
    fit = fit_workspace(
        peaks(
            {
                (1, 64): 5.3 * MIB,
                (4, 64): 23.8 * MIB,
                (1, 256): 34.8 * MIB,
                (1, 1024): 280 * MIB,
                (1, 2048): 920 * MIB,
                (1, 4096): 3338 * MIB,
            }
        )
    )
    for shape, peak in {(3, 700): 434, (2, 3000): 3690, (12, 150): 189}.items():
        assert 1.0 <= fit.coefficients.cost_bytes(*shape) / (peak * MIB) <= 1.5
    assert fit.quality.r_squared > 0.999


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 8192), st.integers(0, 2**36)),
        max_size=12,
    )
)
def test_no_estimate_is_below_its_peak(table):
    """Whatever was measured: a fit covers every shape it was made from, or there is none."""
    measured = [ShapePeak(*row) for row in table]
    fit = fit_workspace(measured)

    if isinstance(fit, Fit):
        for peak in measured:
            assert fit.coefficients.cost_bytes(peak.batch, peak.tokens) >= peak.peak_bytes
        if min(peak.peak_bytes for peak in measured) >= NOTICEABLE_BYTES:
            assert fit.quality.margin >= UNSEEN_SHAPE_MARGIN
        assert math.isfinite(fit.quality.r_squared)


@settings(deadline=None)
@given(a=st.floats(*A_RANGE), b=st.floats(1.0, 5_000.0))
def test_any_true_coefficients_are_recovered(a, b):
    """Noise-free peaks give the coefficients back, whatever they are."""
    solved = least_squares(peaks_of(SEVEN_SHAPES, a, b))

    assert solved.a_bytes_per_token == pytest.approx(a, rel=1e-3)
    assert solved.b_bytes_per_token_sq == pytest.approx(b, rel=1e-3)


@settings(deadline=None)
@given(
    a=st.floats(20_000, 200_000),
    b=st.floats(5.0, 500.0),
    noise=st.lists(st.floats(0.95, 1.05), min_size=7, max_size=7),
    shape=st.tuples(st.integers(1, 16), st.integers(64, 8192)),
)
def test_estimates_stay_close_under_noise(a, b, noise, shape):
    """Peaks that scatter by 5 % leave every other shape between its true cost and +50 %."""
    measured = [
        attrs.evolve(peak, peak_bytes=round(peak.peak_bytes * factor))
        for peak, factor in zip(peaks_of(SEVEN_SHAPES, a, b), noise, strict=True)
    ]
    fit = fit_workspace(measured)

    if isinstance(fit, Fit):
        true = Coefficients(a, b).cost_bytes(*shape)
        assert fit.coefficients.cost_bytes(*shape) >= 0.95 * true


@pytest.mark.parametrize(
    ("a", "b", "plausible"),
    [
        (90_000.0, 190.0, True),
        (A_RANGE[0], B_RANGE[0], True),
        (0.0, 190.0, False),
        (90_000.0, 0.0, True),
        (90_000.0, -1.0, False),
        (-1.0, 190.0, False),
        (math.nan, 190.0, False),
        (90_000.0, math.inf, False),
    ],
)
def test_plausible_coefficients(a, b, plausible):
    """Negative, infinite and undefined coefficients never come from a fit, nor does a = 0."""
    assert is_plausible(Coefficients(a, b)) is plausible


def test_cost_model_of_coefficients():
    """A ceiling turns coefficients into what chunks are packed with."""
    coefficients = Coefficients(100.0, 2.0)
    model = coefficients.cost_model(900)

    assert model.chunk_cost_bytes(2, 3) == coefficients.cost_bytes(2, 3) == 636
    assert model.max_workspace_bytes == 900
    assert coefficients.scaled(1.5) == Coefficients(150.0, 3.0)
