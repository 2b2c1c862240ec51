"""The page that a person reads after a probe."""

from bge_m3_server.app.probe_report import probe_report
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.probe import ProbeOutcome, ProbeResult, SkippedShape
from bge_m3_server.domain.probe_fit import FitRefusal, ShapePeak, fit_workspace

MIB = 1024**2
PEAKS = (
    ShapePeak(1, 64, 5 * MIB, 0.25),
    ShapePeak(1, 1024, 280 * MIB, 3.0),
    ShapePeak(1, 2048, 920 * MIB, 9.5),
)
RESULT = ProbeResult(
    PEAKS, (SkippedShape((1, 4096), "may take 90 s"),), ProbeOutcome.COMPLETE, "3 of 4 shapes"
)


def test_measured_table_fit_and_batches():
    """Peaks, what was left out, coefficients with their quality, and what fits."""
    fit = fit_workspace(PEAKS)
    page = probe_report(RESULT, fit, fit.coefficients.cost_model(1024 * MIB), 4096, 256)
    lines = page.splitlines()

    assert lines[0] == "probe: complete, 3 of 4 shapes"
    assert any(line.split()[:3] == ["1", "2048", "920.0"] for line in lines)
    assert "    1   4096 not measured: may take 90 s" in lines
    assert f"a = {fit.coefficients.a_bytes_per_token:.0f} bytes per token" in page
    assert "R² = 0." in page or "R² = 1." in page
    assert "workspace of one forward pass: 1024 MiB" in page
    assert lines[-1].split(maxsplit=1) == ["4096", "does not fit"]
    assert next(line for line in lines if line.startswith("    32")).split() == ["32", "256"]


def test_without_a_fit():
    """The page says why, and what is used instead."""
    page = probe_report(RESULT, FitRefusal("too few shapes"), CostModel.conservative(), 512, 256)

    assert "no fit: too few shapes; conservative coefficients are used" in page
    assert page.splitlines()[-1].split()[0] == "512"
