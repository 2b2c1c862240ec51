"""The picture of a probe."""

import sys

import pytest
from bge_m3_server.adapters.probe_plot import plot_probe
from bge_m3_server.domain.errors import ConfigError
from bge_m3_server.domain.probe_fit import Coefficients, ShapePeak

PEAKS = [ShapePeak(1, 64, 5 << 20), ShapePeak(4, 512, 300 << 20), ShapePeak(1, 2048, 920 << 20)]
FITTED = Coefficients(90_000.0, 200.0)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_formats(tmp_path, suffix, magic):
    """The suffix of the file tells what is written."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"probe{suffix}"
    plot_probe(path, PEAKS, FITTED, unseen=PEAKS[:1], conservative=FITTED)

    assert path.read_bytes().startswith(magic)


def test_equal_measurements_give_equal_pictures(tmp_path):
    """A picture changes only when its figures do."""
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    plot_probe(first, PEAKS, FITTED)
    plot_probe(second, PEAKS, FITTED)

    assert first.read_bytes() == second.read_bytes()


def test_unknown_format(tmp_path):
    """Other suffixes are refused before anything is drawn."""
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        plot_probe(tmp_path / "probe.pdf", PEAKS, FITTED)


def test_without_matplotlib(tmp_path, monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install"):
        plot_probe(tmp_path / "probe.svg", PEAKS, FITTED)
