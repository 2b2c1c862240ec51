"""What the defaults are worth on a processor with fewer instructions, against fp32.

OpenVINO's kernels come from oneDNN, which `ONEDNN_MAX_CPU_ISA` keeps from instructions beyond the
given ones; ONNX Runtime has no such switch, and uses all that the processor has. Either engine
serves fp32 and 8-bit weights in turns, and the default, which is one of these, must not be slower
than ONNX Runtime's fp32 on the geometric mean of rows.

    .venv/bin/python -m benchmarks.lesser_processor .cache/bench/checkpoint-24-250002 --mask AVX2
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import httpx
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.app.config import load_config
from bge_m3_server.app.container.engines import settle
from bge_m3_server.app.container.preparation import engine_flags, is_prepared

from benchmarks.performance.workloads import TextMaker, Workload, text_maker, workloads
from tests.support.server_process import ServerProcess, running_server

SERVERS = {
    f"{engine} {model}": {"BGE_M3_EP": engine, "BGE_M3_MODEL": model}
    for engine in ("openvino", "cpu")
    for model in ("fp32", "w8")
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
    default = _default(arguments)
    print(f"the default is {default}", flush=True)
    maker = text_maker(arguments.directory / "tokenizer.json")
    rows = [row for row in workloads() if row.name in ROWS]
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for name, settings in SERVERS.items():
            with running_server(_environment(arguments, settings)) as server:
                for row in rows:
                    rate = _tokens_per_second(server, maker, row, arguments.calls)
                    rates.setdefault((name, row.name), []).append(rate)
    medians = {key: statistics.median(found) for key, found in rates.items()}
    shares = [medians[default, row] / medians["cpu fp32", row] for row in ROWS]
    for row in ROWS:
        print(row, ", ".join(f"{name} {medians[name, row]:.0f}" for name in SERVERS), "tokens/s")
    share = statistics.geometric_mean(shares)
    mark = "ok" if share >= BAR else "MISSED"
    print(f"the default has {share:.2f} x the speed of cpu fp32 on the mean of rows: {mark}")
    if arguments.json:
        figures = {f"{name}, {row}": found for (name, row), found in rates.items()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(share < BAR)


def _default(arguments: argparse.Namespace) -> str:
    """What the server makes of its defaults here, under the mask."""
    config = settle(load_config(_environment(arguments, {}), "linux"))
    is_prepared_ = is_prepared(config, local_model(arguments.directory, None), engine_flags(config))
    return f"{config.execution_provider.value} {'w8' if is_prepared_ else 'fp32'}"


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


if __name__ == "__main__":
    main()
