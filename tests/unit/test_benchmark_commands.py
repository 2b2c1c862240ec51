"""Long benchmarks say what they do before they do it."""

import sys

import pytest

from benchmarks import (
    faults,
    lesser_processor,
    load,
    memory_limit,
    overhead,
    resident,
    same_chunks,
    serialisation,
    soak,
    stampede,
    warm_start,
    workspace,
)


@pytest.mark.parametrize(
    "benchmark",
    [
        *(faults, lesser_processor, load, memory_limit, overhead, resident, same_chunks),
        *(serialisation, soak, stampede, warm_start, workspace),
    ],
)
def test_help_shows_what_a_benchmark_does(benchmark, monkeypatch, capsys):
    """Nobody has to read the file, or to wait ten minutes."""
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--help"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()

    assert ended.value.code == 0
    assert benchmark.__doc__.strip() in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", [load, faults, soak])
def test_what_is_no_number_is_refused(benchmark, monkeypatch, capsys):
    """With a sentence, not with a traceback."""
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "long"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()

    assert ended.value.code == 2
    assert "'long'" in capsys.readouterr().err
