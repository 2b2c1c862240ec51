"""This server and its peers side by side, on the same checkpoint, texts and threads.

Contenders run one after the other, each in a process of its own, round after round, so that what
else the machine does falls on all of them alike. Figures are medians over the rounds.

    make bench
    make bench BENCH_ARGS="--layers 2 --quick"
    make bench BENCH_ARGS="--only bge-m3-server --rows 8×128"
    make bench BENCH_ARGS="--only bge-m3-server --rows 1×8192 --add"
    make bench BENCH_ARGS="--render --docs docs/performance.md"
"""

import argparse
import signal
import sys
import time
from pathlib import Path

import attrs
from bge_m3_server.adapters.memory.cpu_count import cpu_count

from benchmarks.performance.checkpoint import FULL, write_checkpoint
from benchmarks.performance.contenders import CONTENDERS
from benchmarks.performance.machine import this_machine
from benchmarks.performance.matrix_rate import measure_rates
from benchmarks.performance.measure import Effort
from benchmarks.performance.plot import plot_results
from benchmarks.performance.results import Results, read_results
from benchmarks.performance.tables import report, with_results
from benchmarks.performance.visits import Bench
from benchmarks.performance.workloads import text_maker, workloads

QUICK = Effort(row_seconds=2.0, query_seconds=1.0)


def main() -> None:
    """Measure or only render, then print, and write what was asked for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and stop what was started
    arguments = _arguments()
    path = arguments.output / "results.json"
    results = read_results(path) if arguments.render else _measured(arguments, path)
    tables = report(results)
    print(f"\n{tables}")
    plot_results(arguments.output / "results.svg", results)
    print(f"\n{path}, {path.with_suffix('.svg')}")
    if arguments.docs:
        figure = arguments.docs.parent / "figures" / f"{arguments.docs.stem}.svg"
        shown = f"![Tokens per second](figures/{figure.name})\n\n{tables}"
        page = with_results(arguments.docs.read_text(encoding="utf-8"), shown)
        arguments.docs.write_text(page, encoding="utf-8")
        figure.parent.mkdir(exist_ok=True)
        plot_results(figure, results)
        print(f"{arguments.docs}, {figure}")


def _measured(arguments: argparse.Namespace, path: Path) -> Results:
    effort = QUICK if arguments.quick else Effort(arguments.row_seconds, arguments.query_seconds)
    rows = [
        row
        for row in workloads(quick=arguments.quick)
        if not arguments.rows or row.name in arguments.rows
    ]
    contenders = [
        contender
        for contender in CONTENDERS
        if not arguments.only or any(part in contender.name for part in arguments.only)
    ]
    shape = attrs.evolve(FULL, layers=arguments.layers, vocabulary=arguments.vocabulary)
    directory = arguments.cache / f"checkpoint-{shape.layers}-{shape.vocabulary}"
    print(f"checkpoint {directory} ...", flush=True)
    write_checkpoint(directory, shape, arguments.cache)
    results = Results(
        machine=this_machine(),
        options={
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "layers": shape.layers,
            "vocabulary": shape.vocabulary,
            "quick": arguments.quick,
            "seconds of a row": effort.row_seconds,
            "seconds of queries": effort.query_seconds,
            "gives up after": arguments.give_up_seconds,
            "started": time.strftime("%Y-%m-%d"),
        },
        rows=[row.name for row in rows],
        contenders=[contender.name for contender in contenders],
    )
    if arguments.add:
        every_row = [row.name for row in workloads(quick=arguments.quick)]
        every_contender = [contender.name for contender in CONTENDERS]
        results = results.added_to(read_results(path), every_row, every_contender)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not arguments.no_matrix_rate and not results.matrix_rates:
        print("matrix rate ...", flush=True)
        results.matrix_rates += measure_rates(arguments.threads)
    bench = Bench(
        results=results,
        rows=rows,
        maker=text_maker(directory / "tokenizer.json"),
        directory=directory,
        cache_dir=arguments.cache,
        threads=arguments.threads,
        effort=effort,
        limit_seconds=arguments.give_up_seconds,
        save=lambda: results.write(path),
    )
    bench.embed_references()
    places = bench.installed(contenders)
    for number in range(arguments.rounds):
        # Each round begins with another one, so that nobody always follows the same neighbour.
        first = number * len(places) // arguments.rounds
        order = list(places)[first:] + list(places)[:first]
        for contender in order:
            print(f"round {number + 1} of {arguments.rounds}: {contender.name}", flush=True)
            bench.visit(contender, places[contender])
    results.write(path)
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cpu_count().count)
    parser.add_argument("--only", action="append", help="contenders with this in their name")
    parser.add_argument("--rows", action="append", help="only this row of work")
    parser.add_argument("--layers", type=int, default=FULL.layers)
    parser.add_argument("--vocabulary", type=int, default=FULL.vocabulary)
    parser.add_argument("--quick", action="store_true", help="few and short texts: a trial")
    parser.add_argument("--row-seconds", type=float, default=Effort().row_seconds)
    parser.add_argument("--query-seconds", type=float, default=Effort().query_seconds)
    parser.add_argument(
        "--give-up-seconds", type=float, default=900.0, help="of one call; then its row stays empty"
    )
    parser.add_argument("--add", action="store_true", help="to the last results of this machine")
    parser.add_argument("--no-matrix-rate", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--output", type=Path, default=Path(".cache/bench/results"))
    parser.add_argument("--docs", type=Path, help="write the tables into this page, and its figure")
    parser.add_argument("--render", action="store_true", help="measure nothing: the last results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
