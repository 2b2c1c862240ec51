"""The tables of a result, in Markdown: the terminal shows the same as the documentation."""

from collections.abc import Callable, Sequence

from bge_m3_server.adapters.openvino.choice import prefers_openvino

from benchmarks.performance.contenders import BASELINE, PRODUCT
from benchmarks.performance.machine import versions_line
from benchmarks.performance.matrix_rate import FLOP_PER_TOKEN, GFLOP, layer_rates
from benchmarks.performance.results import Cell, Results

MIB = 2**20
NOTHING = "–"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; all but the first are aligned to the right."""
    widths = [max(len(row[place]) for row in (headers, *rows)) for place in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *others]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(headers), line(rule), *map(line, rows)])


def report(results: Results) -> str:
    """All tables, what is missing and why, and the machine."""
    parts = [
        ("Tokens per second", _grid(results, _rate)),
        (
            "Texts or requests per second, and how many times the baseline",
            _grid(results, _texts(results)),
        ),
        ("Latency of a call, seconds: median / 95th percentile", _grid(results, _latency)),
        (
            "Resident memory, MiB: peak (above the loaded model) / after",
            _grid(results, _memory),
        ),
        ("Least cosine of a dense vector to the fp32 reference", _grid(results, _cosine)),
        ("HTTP compared with the bare engine", _shares(results)),
        ("The engine that `BGE_M3_EP=auto` takes here, compared with the other", _rule(results)),
        (f"Matrix rate of this machine, {results.options['threads']} threads", _matrix(results)),
        ("Not measured", _reasons(results)),
    ]
    sections = [f"### {title}\n\n{body}" for title, body in parts if body]
    settings = ", ".join(f"{name} {value}" for name, value in results.options.items())
    foot = (
        f"Machine: {results.machine.line()}.\n\nVersions: {versions_line(results.versions)}.\n\n"
        f"Options: {settings}. The baseline is {BASELINE}. A star marks a first and only call."
    )
    return "\n\n".join([*sections, foot])


def with_results(page: str, tables: str) -> str:
    """`page` with what lies between its markers replaced.

    Raises:
        ValueError: the page has not exactly one pair of markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after:
        raise ValueError(f"the page needs {BEGIN} and {END} once each")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


Show = Callable[[str, str, Cell], str]
"""What a table says of a contender on a row."""


def _grid(results: Results, show: Show) -> str:
    """Contenders down, rows of work across; those that never ran are told elsewhere."""
    lines = []
    for contender in results.contenders:
        if contender not in results.samples:
            continue
        shown = [contender]
        for row in results.rows:
            cell = results.cell(contender, row)
            text = NOTHING if cell is None else show(contender, row, cell)
            shown.append(f"{text}*" if cell and cell.is_single else text)
        lines.append(shown)
    return markdown_table(["", *results.rows], lines) if lines else ""


def _rate(_contender: str, _row: str, cell: Cell) -> str:
    return f"{cell.tokens_per_second:.0f}"


def _texts(results: Results) -> Show:
    def show(_contender: str, row: str, cell: Cell) -> str:
        baseline = results.cell(BASELINE, row)
        shown = f"{cell.texts_per_second:.3g}"
        if baseline is None:
            return shown
        return f"{shown} ({cell.texts_per_second / baseline.texts_per_second:.1f}×)"

    return show


def _latency(_contender: str, _row: str, cell: Cell) -> str:
    return f"{cell.p50_seconds:.3g} / {cell.p95_seconds:.3g}"


def _memory(_contender: str, _row: str, cell: Cell) -> str:
    above_bytes = max(0, cell.peak_bytes - cell.loaded_bytes)
    return f"{cell.peak_bytes / MIB:.0f} ({above_bytes / MIB:.0f}) / {cell.kept_bytes / MIB:.0f}"


def _cosine(_contender: str, _row: str, cell: Cell) -> str:
    return NOTHING if cell.cosine is None else f"{cell.cosine:.5f}"


def _shares(results: Results) -> str:
    """Tokens per second over HTTP, in per cent of those of the same engine without it."""
    lines = []
    for contender in results.contenders:
        name = contender.removesuffix(", HTTP")
        if not contender.startswith(PRODUCT) or name == contender:
            continue
        shares = [NOTHING] * len(results.rows)
        for place, row in enumerate(results.rows):
            served, bare = results.cell(contender, row), results.cell(f"{name}, bare engine", row)
            if served and bare:
                shares[place] = f"{served.tokens_per_second / bare.tokens_per_second:.0%}"
        if set(shares) != {NOTHING}:
            lines.append([name, *shares])
    return markdown_table(["", *results.rows], lines) if lines else ""


def _rule(results: Results) -> str:
    """How many times the other's tokens per second, over HTTP; below 1.0 the rule is wrong."""
    machine = results.machine
    architecture = machine.system.rpartition(" ")[2]
    preference = prefers_openvino(
        is_installed=True, architecture=architecture, cpu_flags=machine.flags
    )
    names = [f"{PRODUCT} {engine} w8, HTTP" for engine in ("cpu", "openvino")]
    other, taken = names if preference.is_preferred else reversed(names)
    times = []
    for row in results.rows:
        cells = results.cell(taken, row), results.cell(other, row)
        times.append(
            f"{cells[0].tokens_per_second / cells[1].tokens_per_second:.2f}×"
            if cells[0] and cells[1]
            else NOTHING
        )
    if set(times) == {NOTHING}:
        return ""
    table = markdown_table(["", *results.rows], [[f"{taken} / {other}", *times]])
    return f"{table}\n\nThe rule's reason: {preference.reason}."


def _matrix(results: Results) -> str:
    """GFLOP/s, and the tokens per second that they would give if there were nothing else."""
    if not results.matrix_rates:
        return ""
    layers = layer_rates(results.matrix_rates)
    shapes = list(dict.fromkeys(rate.shape for rate in results.matrix_rates))
    by_place = {(rate.kind, rate.shape): rate for rate in results.matrix_rates}
    return markdown_table(
        ["GFLOP/s", *("×".join(map(str, shape)) for shape in shapes), "a layer", "tokens/s"],
        [
            [
                kind,
                *(f"{by_place[kind, shape].gflop_per_second:.0f}" for shape in shapes),
                f"{layer:.0f}",
                f"{layer * GFLOP / FLOP_PER_TOKEN:.0f}",
            ]
            for kind, layer in layers.items()
        ],
    )


def _reasons(results: Results) -> str:
    lines = [f"- {contender}: {reason}" for contender, reason in results.absent.items()]
    lines += [
        f"- {contender}, {row}: {reason}"
        for contender, rows in results.missing.items()
        for row, reason in rows.items()
    ]
    return "\n".join(lines)
