"""Memory that a server holds after a mixed load, for each engine, with one worker and with four.

Starts `bge-m3-server serve` on the prepared model, asks it over HTTP for texts of log-normal
lengths, and reads what is resident afterwards: anonymous memory, which is the server's own, and
mapped files, which the kernel may drop at any time. Also the CPU time that the idle server takes,
and what is resident after one more text, of 8192 tokens.

    .venv/bin/python -m benchmarks.resident .cache/bench/checkpoint-24-250002
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.performance.workloads import Spread, TextMaker, log_normal_lengths, text_maker
from benchmarks.process_time import cpu_seconds
from tests.support.server_process import ServerProcess, running_server

LIMITS_GB = {"cpu": 0.9, "openvino": 1.3}
MORE_WORKERS_LIMIT = 1.15
AFTER_LONG_LIMIT = 1.15
LONG_TOKENS = 8192
SHORT_WORD_LETTERS = 2
"""So many tokens of usual words have more characters than a text may have."""

REST_SECONDS = 2.0
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
    short_words = [word for word in maker.words if len(word) <= SHORT_WORD_LETTERS]
    long_text = TextMaker(maker.tokenizer, short_words).texts("resident", 1, [LONG_TOKENS])
    found = {}
    for engine, limit in LIMITS_GB.items():
        for workers in (1, 4):
            figures = _measure(arguments, engine, workers, [texts, long_text])
            found[f"{engine} {workers}"] = figures
            print(
                f"{engine:9} {workers} workers: {figures['resident_gb']:.2f} GB "
                f"({figures['anonymous_gb']:.2f} anonymous + {figures['files_gb']:.2f} mapped), "
                f"limit {limit} GB; idle {figures['idle_cpu']:.2%} of a core; "
                f"after {LONG_TOKENS} tokens {figures['after_long']:.2f} x that, "
                f"limit {AFTER_LONG_LIMIT}",
                flush=True,
            )
        ratio = found[f"{engine} 4"]["resident_gb"] / found[f"{engine} 1"]["resident_gb"]
        print(f"{engine:9} 4 workers hold {ratio:.2f} x what 1 holds, limit {MORE_WORKERS_LIMIT}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _measure(
    arguments: argparse.Namespace, engine: str, workers: int, spells: Sequence[list[str]]
) -> dict[str, float]:
    """What is resident after the first spell of work, and how much more after the second."""
    settings = {
        "BGE_M3_MODEL_DIR": str(arguments.directory),
        "BGE_M3_CACHE_DIR": str(arguments.cache),
        "BGE_M3_EP": engine,
        "BGE_M3_MODEL": "w8",
        "BGE_M3_WORKERS": str(workers),
    }
    with running_server(settings) as server:
        mixed, long_text = spells
        _embed(server, mixed)
        before = cpu_seconds(server.process.pid)
        time.sleep(IDLE_SECONDS)
        idle = (cpu_seconds(server.process.pid) - before) / IDLE_SECONDS
        resident = _resident_gb(server)
        _embed(server, long_text)
        after_long = _resident_gb(server)
    return {
        "resident_gb": resident["VmRSS"],
        "anonymous_gb": resident["RssAnon"],
        "files_gb": resident["RssFile"],
        "idle_cpu": idle,
        "after_long": after_long["VmRSS"] / resident["VmRSS"],
    }


def _embed(server: ServerProcess, texts: list[str]) -> None:
    """Ask for all of them, and let the server come to rest."""
    for start in range(0, len(texts), 32):
        body = {"input": texts[start : start + 32]}
        httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=600).raise_for_status()
    time.sleep(REST_SECONDS)


def _resident_gb(server: ServerProcess) -> dict[str, float]:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return {
        line.split(":")[0]: int(line.split()[1]) * 1024 / 1e9
        for line in status.splitlines()
        if line.startswith(("VmRSS", "RssAnon", "RssFile"))
    }


if __name__ == "__main__":
    main()
