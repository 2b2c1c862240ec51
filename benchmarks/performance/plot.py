"""Tokens per second of everyone on every row, as a figure."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.performance.contenders import PRODUCT
from benchmarks.performance.results import Results

COLUMNS = 3
COLOURS = {True: "#1f77b4", False: "#b0b0b0"}


def plot_results(path: Path, results: Results) -> None:
    """One small chart per row of work, bars in the order of speed; the product's are blue."""
    mpl.rcParams["svg.hashsalt"] = "bge-m3-server"
    lines = -(-len(results.rows) // COLUMNS)
    figure = Figure(figsize=(6.0 * COLUMNS, 0.32 * len(results.samples) * lines + lines))
    for place, row in enumerate(results.rows):
        axes = figure.add_subplot(lines, COLUMNS, place + 1)
        cells = [(name, results.cell(name, row)) for name in results.samples]
        ranked = sorted((cell.tokens_per_second, name) for name, cell in cells if cell is not None)
        names = [name for _, name in ranked]
        bars = axes.barh(
            names,
            [rate for rate, _ in ranked],
            color=[COLOURS[name.startswith(PRODUCT)] for name in names],
        )
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
        axes.tick_params(labelsize=7)
        axes.set_title(f"{row}, tokens/s", fontsize=9)
        axes.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
