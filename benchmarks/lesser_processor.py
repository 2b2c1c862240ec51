"""What the defaults are worth on a processor with fewer instructions, against fp32.

OpenVINO's kernels come from oneDNN, which `ONEDNN_MAX_CPU_ISA` keeps from instructions beyond the
given ones; ONNX Runtime has no such switch, and uses all that the processor has. For each mask four
servers take turns: the one that the defaults make of it, fp32 on either engine, and 8-bit weights on
ONNX Runtime. The first must not be slower than ONNX Runtime's fp32 on a processor that has no more
than the mask allows.

    .venv/bin/python -m benchmarks.lesser_processor .cache/bench/checkpoint-24-250002 --mask AVX2
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from benchmarks.performance.workloads import TextMaker, Workload, text_maker, workloads
from tests.support.server_process import ServerProcess, running_server

SERVERS = {
    "the default": {"BGE_M3_EP": "auto", "BGE_M3_MODEL": "auto"},
    "openvino fp32": {"BGE_M3_EP": "openvino", "BGE_M3_MODEL": "fp32"},
    "cpu fp32": {"BGE_M3_EP": "cpu", "BGE_M3_MODEL": "fp32"},
    "cpu w8": {"BGE_M3_EP": "cpu", "BGE_M3_MODEL": "w8"},
}
ROWS = ("1×16", "8×128", "1×2048")
BAR = 1.0


def main() -> None:
    """Measure in turns and print; exit code 1 where the default is slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mask", default="", help="as ONEDNN_MAX_CPU_ISA: AVX2, AVX512_CORE, ...")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench/product"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=3, help="of each row and round")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    maker = text_maker(arguments.directory / "tokenizer.json")
    rows = [row for row in workloads() if row.name in ROWS]
    rates: dict[tuple[str, str], list[float]] = {}
    for round_ in range(arguments.rounds):
        for name, settings in SERVERS.items():
            with running_server(_environment(arguments, settings)) as server:
                for row in rows:
                    rate = _tokens_per_second(server, maker, row, arguments.calls)
                    rates.setdefault((name, row.name), []).append(rate)
                if not round_:
                    print(f"{name}: {_served(server)}", flush=True)
    medians = {key: statistics.median(found) for key, found in rates.items()}
    for row in rows:
        print(_line(row, {name: medians[name, row.name] for name in SERVERS}), flush=True)
    if arguments.json:
        figures = {f"{name}, {row}": rate for (name, row), rate in medians.items()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(medians["the default", row] < BAR * medians["cpu fp32", row] for row in ROWS))


def _environment(arguments: argparse.Namespace, settings: dict[str, str]) -> dict[str, str]:
    return {
        **settings,
        "BGE_M3_MODEL_DIR": str(arguments.directory),
        "BGE_M3_CACHE_DIR": str(arguments.cache),
        "BGE_M3_DISABLE_AUTO_BUDGET": "1",
        "BGE_M3_LOG_FORMAT": "json",
        "ONEDNN_MAX_CPU_ISA": arguments.mask,
    }


def _tokens_per_second(server: ServerProcess, maker: TextMaker, row: Workload, calls: int) -> float:
    """Of the median call, after one that warms up."""
    seconds = []
    for variant in range(calls + 1):
        body = {"input": maker.texts(row.name, variant, row.lengths)}
        started = time.perf_counter()
        httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=600).raise_for_status()
        seconds.append(time.perf_counter() - started)
    return row.tokens / statistics.median(seconds[1:])


def _served(server: ServerProcess) -> str:
    """The engine, and why, as the first line of the log has it."""
    fields = json.loads(server.wait_for_log("Starting bge-m3-server"))["fields"]
    return f"{fields['execution_provider']} ({fields['execution_provider_reason']})"


def _line(row: Workload, rates: Mapping[str, float]) -> str:
    default = rates["the default"]
    others = ", ".join(
        f"{default / rate:.2f} x {name} ({rate:.0f})"
        for name, rate in rates.items()
        if name != "the default"
    )
    mark = "ok" if default >= BAR * rates["cpu fp32"] else "MISSED"
    return f"{row.name:7} {default:.0f} tokens/s, {others}: {mark}"


if __name__ == "__main__":
    main()
