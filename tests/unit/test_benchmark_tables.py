"""The benchmark's results: summary, file and tables."""

import attrs
import pytest

from benchmarks.performance.contenders import BASELINE
from benchmarks.performance.machine import Machine, cpu_flags
from benchmarks.performance.matrix_rate import SHAPES, MatrixRate, layer_rates
from benchmarks.performance.measure import Sample
from benchmarks.performance.results import Results, cell_of, read_results
from benchmarks.performance.tables import BEGIN, END, markdown_table, report, with_results

MIB = 2**20
SERVED, BARE = "bge-m3-server cpu w8, HTTP", "bge-m3-server cpu w8, bare engine"


def sample(elapsed_seconds, *, cosine=0.9999, **changes):
    """Ten texts of 100 tokens in all, in so many seconds."""
    figures = {
        "texts": 10,
        "tokens": 100,
        "call_seconds": (elapsed_seconds,),
        "elapsed_seconds": elapsed_seconds,
        "loaded_bytes": 100 * MIB,
        "peak_bytes": 140 * MIB,
        "kept_bytes": 110 * MIB,
        "cosine": cosine,
    }
    return Sample(**figures | changes)


@pytest.fixture
def results():
    found = Results(
        machine=Machine("a CPU", ("avx512_vnni",), 2, 24 * 2**30, "Linux", "3.11"),
        options={"threads": 2, "rounds": 3, "layers": 24, "vocabulary": 250_002, "quick": False},
        rows=["8×128", "1×8192"],
        contenders=[SERVED, BARE, BASELINE, "a peer"],
    )
    for seconds in (1.0, 4.0, 2.0):
        found.add(SERVED, "8×128", sample(seconds))
    found.add(BARE, "8×128", sample(1.6))
    found.add(BASELINE, "8×128", sample(20.0, is_single=True))
    found.missing[BASELINE] = {"1×8192": "no answer within 900 s"}
    found.absent["a peer"] = "cannot be installed: no such version"
    found.versions["torch"] = {"torch": "2.13.0"}
    found.matrix_rates += [
        MatrixRate("int8", (1024, *shape), rate)
        for shape, rate in zip(SHAPES, (100.0, 200.0, 200.0), strict=True)
    ]
    return found


def line_of(table_title, contender, text):
    """The cells of one line of one table of a report."""
    table = text.split(f"### {table_title}")[1].split("###")[0]
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {contender}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_cell_sums_up_its_rounds():
    """Medians of rates, the worst of memory and closeness, percentiles over all calls."""
    cell = cell_of(
        [
            sample(1.0, cosine=0.9),
            sample(2.0, peak_bytes=500 * MIB),
            sample(4.0, call_seconds=(1.0, 2.0, 3.0)),
        ]
    )
    assert (cell.texts_per_second, cell.tokens_per_second) == (5.0, 50.0)
    assert (cell.cosine, cell.peak_bytes, cell.rounds, cell.calls) == (0.9, 500 * MIB, 3, 5)
    assert cell.p50_seconds == 2.0


def test_columns_are_as_wide_as_their_entries():
    """And read in a terminal as well as in Markdown."""
    assert markdown_table(["", "a row"], [["name", "1"], ["n", "123456"]]) == (
        "|      |  a row |\n| ---- | -----: |\n| name |      1 |\n| n    | 123456 |"
    )


def test_rates_are_compared_with_the_baseline(results):
    """In texts per second, with a star on what was measured once only."""
    text = report(results)
    title = "Texts or requests per second"
    assert line_of(title, SERVED, text)[1:] == ["5 (10.0×)", "–"]
    assert line_of(title, BASELINE, text)[1:] == ["0.5 (1.0×)*", "–"]


def test_http_is_compared_with_the_bare_engine(results):
    """In per cent of its tokens per second."""
    share = line_of("HTTP compared", "bge-m3-server cpu w8", report(results))
    assert share[1:] == ["80%", "–"]


@pytest.mark.parametrize(
    ("flags", "system", "line"),
    [
        (("avx512_vnni",), "Linux 6 x86_64", ("openvino w8, HTTP / bge-m3-server cpu", "2.00×")),
        (("avx",), "Linux 6 x86_64", ("cpu w8, HTTP / bge-m3-server openvino", "0.50×")),
        (("i8mm",), "Linux 6 aarch64", ("cpu w8, HTTP / bge-m3-server openvino", "0.50×")),
    ],
)
def test_the_rule_for_engines_is_held_against_the_figures(results, flags, system, line):
    """What `auto` would take on the machine of the result, over what it would leave."""
    results.machine = attrs.evolve(results.machine, flags=flags, system=system)
    results.add("bge-m3-server openvino w8, HTTP", "8×128", sample(1.0))
    name, times = line
    shown = line_of(
        "The engine that `BGE_M3_EP=auto` takes", f"bge-m3-server {name}", report(results)
    )
    assert shown[1:] == [times, "–"]


def test_the_rule_is_not_shown_where_one_engine_was_measured(results):
    """There is nothing to compare."""
    assert "BGE_M3_EP=auto" not in report(results)


def test_memory_is_shown_with_what_the_row_took_and_kept(results):
    """In MiB."""
    assert line_of("Resident memory", SERVED, report(results))[1:] == ["140 (40) / 110", "–"]


def test_a_layer_weighs_the_shapes(results):
    """By the work of each: 4 small matrices and 2 large ones."""
    rates = layer_rates(results.matrix_rates)
    assert rates == {"int8": pytest.approx(12 / (4 / 100 + 8 / 200))}


def test_nobody_is_dropped_without_a_reason(results):
    """Neither whoever never ran, nor a row that was given up."""
    text = report(results)
    assert "- a peer: cannot be installed: no such version" in text
    assert f"- {BASELINE}, 1×8192: no answer within 900 s" in text


def test_the_machine_is_named(results):
    """With what its speed depends on, and the versions of what was measured."""
    text = report(results)
    assert "a CPU (avx512_vnni), 2 CPUs, 24 GiB" in text
    assert "torch: torch 2.13.0" in text


def test_results_are_read_as_they_were_written(results, tmp_path):
    """So that tables can be made again without a measurement."""
    path = tmp_path / "results.json"
    results.write(path)
    assert report(read_results(path)) == report(results)
    assert [found.name for found in tmp_path.iterdir()] == ["results.json"]


def test_only_what_is_between_the_markers_is_replaced():
    """Twice is as good as once."""
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = with_results(page, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert with_results(once, "new") == once


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_refused(page):
    """Instead of losing what it says."""
    with pytest.raises(ValueError, match="once each"):
        with_results(page, "new")


def test_flags_are_those_that_matter():
    """On x86-64 and on ARM, whose lines have another name."""
    assert cpu_flags("processor: 0\nflags\t\t: fpu avx2 avx512_vnni\n") == ("avx2", "avx512_vnni")
    assert cpu_flags("Features\t: fp i8mm bf16 asimddp\n") == ("asimddp", "i8mm", "bf16")
    assert cpu_flags("") == ()


def test_a_later_run_adds_rows_and_tries_again_what_is_missing(results, tmp_path):
    """The figures stay, in the order of all rows; only what is measured anew loses its reason."""
    results.missing["a peer"] = {"8×128": "no answer within 9 s"}
    later = attrs.evolve(results, rows=["1×16", "1×8192"], contenders=[BASELINE, "another"])
    order = ["1×16", "8×128", "1×8192"]
    results.write(tmp_path / "results.json")

    added = later.added_to(
        read_results(tmp_path / "results.json"),
        order,
        [BASELINE, "another", SERVED, BARE, "a peer"],
    )

    assert added.rows == order
    assert added.contenders == [BASELINE, "another", SERVED, BARE, "a peer"]
    assert added.samples == results.samples
    assert added.missing == {BASELINE: {}, "a peer": {"8×128": "no answer within 9 s"}}
    assert added.absent == results.absent


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": Machine("another", (), 2, 24 * 2**30, "Linux", "3.11")},
        {"options": {"threads": 4, "layers": 24, "vocabulary": 250_002, "quick": False}},
    ],
)
def test_figures_of_other_machines_or_work_do_not_come_into_one_table(results, changes):
    """They could not be compared."""
    with pytest.raises(ValueError, match="measure without --add"):
        attrs.evolve(results, **changes).added_to(results, results.rows, results.contenders)
