"""What a probe found, as a page for people."""

from collections.abc import Iterator

from ..domain.budget import largest_batch
from ..domain.cost_model import CostModel
from ..domain.probe import ProbeResult
from ..domain.probe_fit import Fit, FitRefusal

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_MIB = 2**20


def probe_report(
    result: ProbeResult,
    fit: Fit | FitRefusal,
    cost_model: CostModel,
    max_tokens: int,
    max_batch: int,
) -> str:
    """Measured peaks, fit, and the largest batch that fits for each length.

    Args:
        result: the probe's.
        fit: made from it.
        cost_model: what the server would pack with, fitted or conservative.
        max_tokens: the longest text that is accepted.
        max_batch: the most texts that are accepted.
    """
    return "\n".join(
        [
            f"probe: {result.outcome.value}, {result.reason}",
            "",
            *_peaks(result, fit),
            "",
            *_fit(fit),
            "",
            f"workspace of one forward pass: {cost_model.max_workspace_bytes / _MIB:.0f} MiB",
            *_batches(cost_model, max_tokens, max_batch),
        ]
    )


def _peaks(result: ProbeResult, fit: Fit | FitRefusal) -> Iterator[str]:
    yield f"{'batch':>5} {'tokens':>6} {'peak MiB':>9} {'estimate':>9} {'over':>7} {'seconds':>8}"
    for peak in result.peaks:
        row = f"{peak.batch:>5} {peak.tokens:>6} {peak.peak_bytes / _MIB:>9.1f}"
        if isinstance(fit, Fit):
            estimate = fit.coefficients.cost_bytes(peak.batch, peak.tokens)
            over = estimate / peak.peak_bytes - 1 if peak.peak_bytes else 0.0
            row += f" {estimate / _MIB:>9.1f} {over:>+7.1%}"
        else:
            row += f" {'-':>9} {'-':>7}"
        yield f"{row} {peak.seconds:>8.2f}"
    for skipped in result.skipped:
        batch, tokens = skipped.shape
        yield f"{batch:>5} {tokens:>6} not measured: {skipped.reason}"


def _fit(fit: Fit | FitRefusal) -> Iterator[str]:
    if isinstance(fit, FitRefusal):
        yield f"no fit: {fit.reason}; conservative coefficients are used"
        return
    coefficients, quality = fit.coefficients, fit.quality
    yield (
        f"a = {coefficients.a_bytes_per_token:.0f} bytes per token, "
        f"b = {coefficients.b_bytes_per_token_sq:.1f} bytes per token pair, "
        f"and {coefficients.fixed_bytes / _MIB:.1f} MiB for any pass"
    )
    yield (
        f"R² = {quality.r_squared:.5f}, worst error of the fit {quality.worst_relative_error:.1%}, "
        f"estimates that cover every peak are up to {quality.margin - 1:.1%} above it"
    )


def _batches(cost_model: CostModel, max_tokens: int, max_batch: int) -> Iterator[str]:
    yield f"{'tokens':>6} {'largest batch':>14} (of {max_batch} texts that a request may have)"
    lengths = [length for length in LENGTHS if length < max_tokens]
    for tokens in (*lengths, max_tokens):
        batch = largest_batch(cost_model, tokens, max_batch)
        yield f"{tokens:>6} {batch or 'does not fit':>14}"
