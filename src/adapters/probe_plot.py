"""Measured peaks against the fitted surface, as a picture; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from ..domain.errors import ConfigError
from ..domain.probe_fit import Coefficients, ShapePeak

_MIB = 2**20


def plot_probe(
    path: Path,
    peaks: Sequence[ShapePeak],
    fitted: Coefficients,
    *,
    unseen: Sequence[ShapePeak] = (),
    conservative: Coefficients | None = None,
) -> None:
    """Write peak workspace over tokens, a curve for each batch size, as PNG or SVG.

    Args:
        path: its suffix tells the format.
        peaks: measured by the probe.
        fitted: coefficients with their margin.
        unseen: measured, but not part of the fit.
        conservative: what is used without a probe, for comparison.

    Raises:
        ConfigError: matplotlib is not installed, or `path` has another suffix.
    """
    if path.suffix not in {".png", ".svg"}:
        raise ConfigError(f"cannot draw {path}: choose a file that ends in .png or .svg")
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    everything = (*peaks, *unseen)
    longest = max(peak.tokens for peak in everything)
    lengths = [longest ** (step / 60) * 16 ** (1 - step / 60) for step in range(61)]
    for number, batch in enumerate(sorted({peak.batch for peak in everything})):
        colour = f"C{number}"
        estimates = [_cost_mib(fitted, batch, tokens) for tokens in lengths]
        axes.plot(lengths, estimates, color=colour, linewidth=1, label=f"estimate, batch {batch}")
        for group, marker in ((peaks, "o"), (unseen, "s")):
            shown = [peak for peak in group if peak.batch == batch]
            axes.plot(
                [peak.tokens for peak in shown],
                [peak.peak_bytes / _MIB for peak in shown],
                marker,
                color=colour,
                markerfacecolor=colour if marker == "o" else "white",
            )
    if conservative is not None:
        estimates = [_cost_mib(conservative, 1, tokens) for tokens in lengths]
        axes.plot(lengths, estimates, "--", color="grey", label="conservative, batch 1")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens per text")
    axes.set_ylabel("peak workspace, MiB")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    # Without dates, and with fixed ids, equal measurements give equal files.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    from matplotlib import rc_context  # noqa: PLC0415  an optional extra

    with rc_context({"svg.hashsalt": "bge-m3-server"}):
        figure.savefig(path, metadata=metadata)


def _cost_mib(coefficients: Coefficients, batch: int, tokens: float) -> float:
    positions = batch * tokens
    cost = coefficients.a_bytes_per_token + coefficients.b_bytes_per_token_sq * tokens
    return (positions * cost + coefficients.fixed_bytes) / _MIB
