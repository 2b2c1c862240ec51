"""Draws the figures of docs/startup-probe.md from measurements of this product.

With --check it draws nothing, and fails if a figure in docs/figures is out of date.

    .venv/bin/python tools/visuals/draw.py
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
from bge_m3_server.adapters.probe_plot import plot_probe
from bge_m3_server.domain.budget import largest_batch
from bge_m3_server.domain.probe_fit import Coefficients, ShapePeak
from matplotlib.figure import Figure

HERE = Path(__file__).parent
FIGURES = HERE.parent.parent / "docs" / "figures"
MIB, GIB = 2**20, 2**30
GIVEN_BACK, KEPT = "arena given back after each pass", "arena kept"
LENGTHS = [2**power for power in range(5, 14)]


def main() -> None:
    """Draw all figures, or compare them with those that are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        FIGURES.mkdir(parents=True, exist_ok=True)
        draw_all(FIGURES)
        return
    with tempfile.TemporaryDirectory() as directory:
        drawn = Path(directory)
        draw_all(drawn)
        stale = [
            path.name
            for path in sorted(drawn.iterdir())
            if not (FIGURES / path.name).is_file()
            or (FIGURES / path.name).read_bytes() != path.read_bytes()
        ]
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; draw them again")


def draw_all(directory: Path) -> None:
    """Every figure, named as the documentation refers to it."""
    given_back, kept = _measurements("arena_given_back"), _measurements("arena_kept")
    plot_probe(
        directory / "probe.svg",
        _peaks(given_back["peaks"]),
        _coefficients(given_back["fit"]["coefficients"]),
        unseen=_peaks(given_back["unseen"]),
        conservative=_coefficients(given_back["conservative"]),
    )
    _arena(given_back, kept, directory / "arena.svg")
    _terms(given_back, directory / "terms.svg")
    _batches(given_back, directory / "batches.svg")


def _arena(given_back: dict[str, Any], kept: dict[str, Any], path: Path) -> None:
    """Peak above the loaded model, shape after shape, with an arena given back and one kept."""
    figure, axes = _axes("peak above the loaded model, MiB")
    names, by_arena = [], {}
    for name, figures in ((GIVEN_BACK, given_back), (KEPT, kept)):
        by_arena[name] = {
            f"{peak.batch}×{peak.tokens}": peak.peak_bytes / MIB
            for peak in _peaks([*figures["peaks"], *figures["unseen"]])
        }
    names = [shape for shape in by_arena[GIVEN_BACK] if shape in by_arena[KEPT]]
    for offset, (name, peaks) in zip((-0.2, 0.2), by_arena.items(), strict=True):
        places = [place + offset for place in range(len(names))]
        axes.bar(places, [peaks[shape] for shape in names], width=0.4, label=name)
    axes.set_xticks(range(len(names)), names, rotation=30)
    axes.set_xlabel("forward passes in the order in which they ran, batch × tokens")
    axes.legend()
    _save(figure, path)


def _terms(figures: dict[str, Any], path: Path) -> None:
    """Bytes per token that activations and attention need, by length of the text."""
    fitted = _coefficients(figures["fit"]["coefficients"])
    figure, axes = _axes("workspace per token, KiB")
    linear = [fitted.a_bytes_per_token / 1024] * len(LENGTHS)
    quadratic = [fitted.b_bytes_per_token_sq * tokens / 1024 for tokens in LENGTHS]
    axes.stackplot(
        LENGTHS, linear, quadratic, labels=["activations: a", "attention: b · tokens"], alpha=0.6
    )
    crossing = fitted.a_bytes_per_token / fitted.b_bytes_per_token_sq
    axes.axvline(crossing, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(f"both alike at {crossing:.0f} tokens", (crossing, linear[0] * 3), rotation=90)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens per text")
    axes.legend(loc="upper left")
    _save(figure, path)


def _batches(figures: dict[str, Any], path: Path) -> None:
    """The largest batch that fits, by length, for some workspaces."""
    fitted = _coefficients(figures["fit"]["coefficients"])
    figure, axes = _axes("texts in the largest batch")
    for workspace_gib in (0.5, 1, 2, 4, 8, 16):
        model = fitted.cost_model(int(workspace_gib * GIB))
        fitting = {tokens: largest_batch(model, tokens, 4096) for tokens in LENGTHS}
        shown = {tokens: batch for tokens, batch in fitting.items() if batch}
        axes.plot(shown.keys(), shown.values(), "o-", markersize=3, label=f"{workspace_gib:g} GiB")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("tokens per text")
    axes.legend(title="workspace per worker")
    _save(figure, path)


def _axes(label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def _measurements(name: str) -> dict[str, Any]:
    text = (HERE / "measurements" / f"{name}.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


def _peaks(records: list[dict[str, Any]]) -> list[ShapePeak]:
    return [ShapePeak(**record) for record in records]


def _coefficients(record: dict[str, float]) -> Coefficients:
    return Coefficients(**record)


if __name__ == "__main__":
    main()
