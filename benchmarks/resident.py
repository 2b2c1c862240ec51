"""Memory that a server holds after a mixed load, for each engine, with one worker and with four.

Starts `bge-m3-server serve` on the prepared model, asks it over HTTP for texts of log-normal
lengths, and reads what is resident afterwards: anonymous memory, which is the server's own, and
mapped files, which the kernel may drop at any time. Also the CPU time that the idle server takes.

    .venv/bin/python -m benchmarks.resident .cache/bench/checkpoint-24-250002
"""

import argparse
import json
import time
from pathlib import Path

import httpx

from benchmarks.performance.workloads import Spread, log_normal_lengths, text_maker
from benchmarks.process_time import cpu_seconds
from tests.support.server_process import running_server

LIMITS_GB = {"cpu": 0.9, "openvino": 1.3}
MORE_WORKERS_LIMIT = 1.15
IDLE_SECONDS = 5.0
SPREAD = Spread(8, 2048, 1.1, seed=5)


def main() -> None:
    """Measure each, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench/product"))
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    maker = text_maker(arguments.directory / "tokenizer.json")
    texts = maker.texts("resident", 0, log_normal_lengths(arguments.texts, 96, SPREAD))
    found = {}
    for engine, limit in LIMITS_GB.items():
        for workers in (1, 4):
            figures = _measure(arguments, engine, workers, texts)
            found[f"{engine} {workers}"] = figures
            print(
                f"{engine:9} {workers} workers: {figures['resident_gb']:.2f} GB "
                f"({figures['anonymous_gb']:.2f} anonymous + {figures['files_gb']:.2f} mapped), "
                f"limit {limit} GB; idle {figures['idle_cpu']:.2%} of a core",
                flush=True,
            )
        ratio = found[f"{engine} 4"]["resident_gb"] / found[f"{engine} 1"]["resident_gb"]
        print(f"{engine:9} 4 workers hold {ratio:.2f} x what 1 holds, limit {MORE_WORKERS_LIMIT}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _measure(
    arguments: argparse.Namespace, engine: str, workers: int, texts: list[str]
) -> dict[str, float]:
    settings = {
        "BGE_M3_MODEL_DIR": str(arguments.directory),
        "BGE_M3_CACHE_DIR": str(arguments.cache),
        "BGE_M3_EP": engine,
        "BGE_M3_WORKERS": str(workers),
    }
    with running_server(settings) as server:
        for start in range(0, len(texts), 32):
            body = {"input": texts[start : start + 32]}
            httpx.post(
                f"{server.url}/v1/embeddings:both", json=body, timeout=600
            ).raise_for_status()
        time.sleep(2)
        before = cpu_seconds(server.process.pid)
        time.sleep(IDLE_SECONDS)
        idle = (cpu_seconds(server.process.pid) - before) / IDLE_SECONDS
        fields = {
            line.split(":")[0]: int(line.split()[1]) * 1024 / 1e9
            for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
            if line.startswith(("VmRSS", "RssAnon", "RssFile"))
        }
    return {
        "resident_gb": fields["VmRSS"],
        "anonymous_gb": fields["RssAnon"],
        "files_gb": fields["RssFile"],
        "idle_cpu": idle,
    }


if __name__ == "__main__":
    main()
