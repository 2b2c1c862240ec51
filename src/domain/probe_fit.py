"""From measured peaks to the two coefficients of the cost model, with proof of how well they fit.

The peak workspace of a (batch, tokens) forward pass is y = a · x1 + b · x2 with x1 = batch·tokens
(activations) and x2 = batch·tokens² (attention scores): least squares without an intercept, on
x1 and x2 scaled to 1, because x2 is four orders of magnitude larger than x1. Neither coefficient
can be negative. Where b would be, a is fitted alone; where a would be, it is none: b is then a
little too high, which is the safe side.
"""

from collections.abc import Sequence

import attrs
import numpy as np
from attrs.validators import ge
from numpy.typing import NDArray

from .cost_model import CostModel

A_RANGE = (4096.0, 262_144.0)
"""Bytes per token that a BERT may need: one float32 row of 1024 up to sixty-four."""

B_RANGE = (0.0, 50_000.0)
"""Bytes per token pair that attention may need: none when fused, up to 12 500 floats."""

LARGEST_FIXED_BYTES = 256 * 1024**2
"""What an engine may need for a pass of any size: kernels, and buffers for each thread."""

NOTICEABLE_BYTES = 16 * 1024**2
"""Peaks below this count as this where an estimate above them is judged: so little decides nothing,
and is mostly what an engine needs for any pass."""

SCATTER = 0.05
"""Repeated measurements of one shape differ by so much of the peak."""

UNSEEN_SHAPE_MARGIN = 1.10
"""What shapes that were not probed get on top, for the scatter of both."""

SHORT_TEXT_TOKENS = 512
"""Texts shorter than this need next to nothing for attention: they tell a."""

_Column = NDArray[np.float64]

_LEAST_POINTS = 2
_RAISES = 33
_FIXED_PARTS = 17
_TELLING_RATIO = 4
_SINGULAR = 1e-6
"""Share of the largest squared entry below which a determinant counts as zero."""


@attrs.frozen
class ShapePeak:
    """Peak workspace of one (batch, tokens) forward pass; `seconds` is how long it took."""

    batch: int = attrs.field(validator=ge(1))
    tokens: int = attrs.field(validator=ge(1))
    peak_bytes: int = attrs.field(validator=ge(0))
    seconds: float = 0.0


@attrs.frozen
class Coefficients:
    """Bytes per token position, per token position and token of the same text, and per pass."""

    a_bytes_per_token: float
    b_bytes_per_token_sq: float
    fixed_bytes: float = 0.0

    def cost_bytes(self, batch: int, tokens: int) -> float:
        """Estimated workspace of one forward pass."""
        positions = batch * tokens
        return (
            self.a_bytes_per_token * positions
            + self.b_bytes_per_token_sq * positions * tokens
            + self.fixed_bytes
        )

    def scaled(self, factor: float) -> "Coefficients":
        """All terms times `factor`."""
        return Coefficients(
            self.a_bytes_per_token * factor,
            self.b_bytes_per_token_sq * factor,
            self.fixed_bytes * factor,
        )

    def cost_model(self, max_workspace_bytes: int) -> CostModel:
        """These coefficients under a ceiling."""
        return CostModel(
            self.a_bytes_per_token,
            self.b_bytes_per_token_sq,
            max_workspace_bytes,
            self.fixed_bytes,
        )


@attrs.frozen
class FitQuality:
    """How far a fit can be trusted.

    `r_squared`: share of the peaks' variance that least squares explains; 1 is all of it.
    `worst_relative_error`: largest |estimate - peak| / peak of the least-squares fit.
    `margin`: the highest estimate over its peak, or `NOTICEABLE_BYTES`, once none is below one.
    `points`: shapes that were measured.
    """

    r_squared: float
    worst_relative_error: float
    margin: float
    points: int


@attrs.frozen
class Fit:
    """Coefficients to pack with: margin included, every probed shape covered.

    `limited_to_bytes`: the workspace that kept larger shapes from being measured; None if none did.
    """

    coefficients: Coefficients
    quality: FitQuality
    limited_to_bytes: int | None = None


@attrs.frozen
class FitRefusal:
    """Why measurements give no fit."""

    reason: str


def fit_workspace(
    peaks: Sequence[ShapePeak],
    conservative: Coefficients | None = None,
    max_tokens: int = 0,
) -> Fit | FitRefusal:
    """Least squares, clamped to what a BERT can need, raised until it covers every peak.

    Where most of every peak is what the engine needs for any pass, least squares is of the rest.
    The quadratic term is at least what the scatter of the longest texts can hide: texts that are
    longer still may be limited by it. Where texts of up to `max_tokens` are accepted and so long
    ones were not measured, all of the longest peak may have been attention, up to `conservative`.
    """
    solved = least_squares(peaks)
    if isinstance(solved, FitRefusal):
        return solved
    x1, x2, measured = _columns(peaks)
    clamped = _clamped(solved)
    estimated = _estimate(clamped, x1, x2)
    if _r_squared(measured, estimated) < 0:
        clamped = _with_fixed_part(clamped, peaks)
        estimated = _estimate(clamped, x1, x2)
    r_squared = _r_squared(measured, estimated)
    if r_squared < 0:
        return FitRefusal(
            f"the peaks do not grow with the tokens (R² = {r_squared:.2f}): something else used "
            "memory meanwhile"
        )
    least_b = _hidden_quadratic(clamped, peaks)
    longest = max(peaks, key=lambda peak: peak.tokens)
    is_told = longest.tokens >= max_tokens
    if conservative and not is_told:
        all_of_it = longest.peak_bytes / (longest.batch * longest.tokens**2)
        least_b = max(least_b, min(all_of_it, conservative.b_bytes_per_token_sq))
    least = Coefficients(clamped.a_bytes_per_token, least_b)
    if is_told:
        covering = _covering(least, peaks, _slope_of_short_texts(least_b, peaks), raises=_RAISES)
    else:  # what short texts need must not hide behind attention that may not be there
        slope = _slope_of_short_texts(0.0, peaks)
        covering = _covering(least, peaks, slope, raises=1)
    covering = covering.scaled(UNSEEN_SHAPE_MARGIN)
    return Fit(
        covering,
        FitQuality(
            r_squared=r_squared,
            worst_relative_error=_worst_relative_error(measured, estimated),
            margin=_worst_ratio(_estimate(covering, x1, x2), measured),
            points=len(peaks),
        ),
    )


def least_squares(peaks: Sequence[ShapePeak]) -> Coefficients | FitRefusal:
    """The two-by-two normal equations, under the condition that neither term is negative."""
    if len(peaks) < _LEAST_POINTS:
        return FitRefusal(f"{len(peaks)} shapes were measured; two coefficients need at least two")
    x1, x2, y = _columns(peaks)
    if not y.any():
        return FitRefusal("every measured peak is zero: memory use is not visible here")
    x1_max, x2_max = x1.max(), x2.max()
    n1, n2 = x1 / x1_max, x2 / x2_max
    g11, g12, g22 = n1 @ n1, n1 @ n2, n2 @ n2
    y1, y2 = n1 @ y, n2 @ y
    determinant = g11 * g22 - g12 * g12
    if abs(determinant) < _SINGULAR * max(g11, g22) ** 2:
        return FitRefusal("all measured shapes have one length: the two terms cannot be told apart")
    a = float((g22 * y1 - g12 * y2) / determinant / x1_max)
    b = float((g11 * y2 - g12 * y1) / determinant / x2_max)
    if b < 0:
        return Coefficients(float(y1 / g11 / x1_max), 0.0)
    return Coefficients(max(a, 0.0), b)


def is_plausible(coefficients: Coefficients) -> bool:
    """Whether a fit with its margin can have given them; false for NaN."""
    return (
        A_RANGE[0] <= coefficients.a_bytes_per_token <= A_RANGE[1] * 2
        and B_RANGE[0] <= coefficients.b_bytes_per_token_sq <= B_RANGE[1] * 2
        and 0 <= coefficients.fixed_bytes <= LARGEST_FIXED_BYTES * 2
    )


def _covering(
    least: Coefficients, peaks: Sequence[ShapePeak], slope: float | None, raises: int
) -> Coefficients:
    """The raise of `least` that covers every peak and exceeds none by more than it must.

    `slope`: the least that a token of short texts adds; None where that is not known.
    `raises`: values of b to try, from that of `least` upwards; with one, a bears the raise.

    Passes peak either in the feed-forward part or in attention, so their sum is too low for some
    shapes; and some engines need a few MiB for a pass of any size, which no token should bear.
    Raising a costs long texts little, raising b costs short ones little, and a fixed part costs
    large passes little; which mixture is best is tried out.
    """
    x1, x2, measured = _columns(peaks)
    lack = max(1.0, float((measured / _estimate(least, x1, x2)).max()))
    least_a, fixed_parts = least.a_bytes_per_token, np.zeros(1)
    if slope is not None:
        least_a = max(slope, least_a)
        most_fixed = min(max(float(measured.min()), NOTICEABLE_BYTES), LARGEST_FIXED_BYTES)
        fixed_parts = np.linspace(0.0, most_fixed, _FIXED_PARTS)
    candidates = []
    for b in least.b_bytes_per_token_sq * np.geomspace(1.0, lack, raises):
        for fixed in fixed_parts:
            a = max(least_a, float(((measured - fixed - b * x2) / x1).max()))
            candidates.append(Coefficients(a, float(b), float(fixed)))
    return min(
        candidates, key=lambda candidate: _worst_ratio(_estimate(candidate, x1, x2), measured)
    )


def _with_fixed_part(without: Coefficients, peaks: Sequence[ShapePeak]) -> Coefficients:
    """Least squares of what short texts leave when what a token adds to them is taken off.

    `without` again where short texts do not tell.
    """
    slope = _slope_of_short_texts(0.0, peaks)
    if slope is None:
        return without
    smallest = min(peaks, key=lambda peak: peak.batch * peak.tokens)
    fixed = smallest.peak_bytes - slope * smallest.batch * smallest.tokens
    fixed = _clamp(fixed, (0.0, LARGEST_FIXED_BYTES))
    rests = [
        attrs.evolve(peak, peak_bytes=max(0, round(peak.peak_bytes - fixed))) for peak in peaks
    ]
    solved = least_squares(rests)
    if isinstance(solved, FitRefusal):
        return without
    return attrs.evolve(_clamped(solved), fixed_bytes=fixed)


def _slope_of_short_texts(b: float, peaks: Sequence[ShapePeak]) -> float | None:
    """What a token of short texts adds to a pass; None where too little was measured to tell.

    A fixed part must not take over what many short texts in one pass would need.
    """
    short = [peak for peak in peaks if peak.tokens < SHORT_TEXT_TOKENS]
    if not short:
        return None
    x1, x2, measured = _columns(short)
    linear = measured - b * x2
    least, most = int(x1.argmin()), int(x1.argmax())
    if x1[most] < _TELLING_RATIO * x1[least]:
        return None
    return _clamp(float((linear[most] - linear[least]) / (x1[most] - x1[least])), A_RANGE)


def _hidden_quadratic(fitted: Coefficients, peaks: Sequence[ShapePeak]) -> float:
    """The quadratic term of `fitted`, or what scatter can hide of it if that is more."""
    longest = max(peaks, key=lambda peak: peak.tokens)
    unseen = SCATTER * longest.peak_bytes / (longest.batch * longest.tokens**2)
    return min(max(fitted.b_bytes_per_token_sq, unseen), B_RANGE[1])


def _columns(peaks: Sequence[ShapePeak]) -> tuple[_Column, _Column, _Column]:
    """Batch·tokens, batch·tokens² and peak of each shape."""
    x1 = np.array([peak.batch * peak.tokens for peak in peaks], dtype=np.float64)
    x2 = x1 * np.array([peak.tokens for peak in peaks], dtype=np.float64)
    return x1, x2, np.array([peak.peak_bytes for peak in peaks], dtype=np.float64)


def _estimate(coefficients: Coefficients, x1: _Column, x2: _Column) -> _Column:
    return (
        coefficients.a_bytes_per_token * x1
        + coefficients.b_bytes_per_token_sq * x2
        + coefficients.fixed_bytes
    )


def _clamped(solved: Coefficients) -> Coefficients:
    return Coefficients(
        _clamp(solved.a_bytes_per_token, A_RANGE), _clamp(solved.b_bytes_per_token_sq, B_RANGE)
    )


def _clamp(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])


def _r_squared(measured: _Column, estimated: _Column) -> float:
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - estimated) ** 2).sum())
    return 1.0 - missed / spread if spread else 0.0


def _worst_relative_error(measured: _Column, estimated: _Column) -> float:
    seen = measured > 0
    return float((np.abs(estimated - measured)[seen] / measured[seen]).max())


def _worst_ratio(estimated: _Column, measured: _Column) -> float:
    return float((estimated / np.maximum(measured, NOTICEABLE_BYTES)).max())
