"""Does a server's memory come back after its longest text, and stay where it is for good?

Serves a small model of BGE-M3's kind as a real process and reads what is resident: before and after
requests of one text of 8192 tokens, and again and again during mixed requests of many clients.

    .venv/bin/python -m benchmarks.soak [requests]
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import attrs
import httpx
from bge_m3_server.app.supervisor import TRIM_AFTER_SECONDS

from benchmarks.synthetic_bge_m3 import Shape, write_synthetic_bge_m3
from tests.support.server_process import ServerProcess, running_server

SHAPE = Shape(layers=2, hidden=256, attention_heads=2, intermediate=1024)
FLOAT_BYTES = 4
LONGEST_TOKENS = 8192
MAX_TEXTS = 32
MAX_TOKENS = 1024
CLIENTS = 4
WARM_UP_REQUESTS = 20

REST_SECONDS = 1.5 * TRIM_AFTER_SECONDS
"""The server gives memory back when it has nothing to do."""

EXCESS_LIMIT = 0.15
"""So much more than before may be resident after a long text, and at the end."""

NOISE_BYTES = 48 * 2**20
"""So much more may be chance, however small the process: each thread has an arena of its own, and
what holds it open differs from run to run. Of BGE-M3 itself it is two percent."""


@attrs.frozen
class SoakReport:
    """Resident bytes: before and after long texts, the peak, and during mixed requests in order."""

    before_bytes: int
    peak_bytes: int
    after_bytes: Sequence[int]
    mixed_bytes: Sequence[int]

    def problems(self) -> list[str]:
        """What an operator could not accept."""
        quarter = -(-len(self.mixed_bytes) // 4)
        first, last = self.mixed_bytes[:quarter], self.mixed_bytes[-quarter:]
        found = []
        if max(self.after_bytes) > _most(self.before_bytes):
            found.append("memory does not come back after a long text")
        if median(last) > _most(median(first)):
            found.append("memory grows")
        return found


def _most(before_bytes: float) -> float:
    return before_bytes + max(EXCESS_LIMIT * before_bytes, NOISE_BYTES)


def run(
    requests: int, shape: Shape = SHAPE, *, long_texts: int = 3, samples: int = 20
) -> SoakReport:
    """Serve `shape`, and ask it for so many mixed requests and long texts."""
    with tempfile.TemporaryDirectory() as directory:
        write_synthetic_bge_m3(Path(directory), shape)
        settings = {
            "BGE_M3_MODEL_DIR": directory,
            # Materialised attention, which rises the highest.
            "BGE_M3_MODEL": "fp32",
            "BGE_M3_EP": "cpu",
            # Of this shape: the conservative ones would have a small machine refuse long texts.
            "BGE_M3_DISABLE_AUTO_BUDGET": "",
            "BGE_M3_COST_MODEL_A": str(FLOAT_BYTES * (8 * shape.hidden + 2 * shape.intermediate)),
            "BGE_M3_COST_MODEL_B": str(FLOAT_BYTES * 3 * shape.attention_heads),
            "BGE_M3_LOG_FORMAT": "json",
            "RUST_LOG": "warn,uvicorn=info,bge_m3_server.app.server=info",
        }
        with running_server(settings) as server:
            chance = random.Random(7)
            _ask_mixed(server, chance, max(requests // 10, WARM_UP_REQUESTS))
            before_bytes = _resident_bytes(server)
            after_bytes = []
            for _ in range(long_texts):
                _ask(server, [_text(chance, LONGEST_TOKENS)])
                after_bytes.append(_resident_bytes(server))
            peak_bytes = _status_bytes(server, "VmHWM")
            mixed_bytes = []
            for _ in range(samples):
                _ask_mixed(server, chance, -(-requests // samples))
                mixed_bytes.append(_resident_bytes(server))
    return SoakReport(before_bytes, peak_bytes, after_bytes, mixed_bytes)


def _ask_mixed(server: ServerProcess, chance: random.Random, requests: int) -> None:
    """Numbers of texts and tokens are spread evenly over their logarithms."""
    batches = [
        [_text(chance, _spread(chance, MAX_TOKENS)) for _ in range(_spread(chance, MAX_TEXTS))]
        for _ in range(requests)
    ]
    with ThreadPoolExecutor(CLIENTS) as clients:
        for _ in clients.map(lambda texts: _ask(server, texts), batches):
            pass


def _ask(server: ServerProcess, texts: list[str]) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=300)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == len(texts)


def _text(chance: random.Random, tokens: int) -> str:
    """The two special tokens are counted."""
    return " ".join(f"w{chance.randrange(100)}" for _ in range(max(tokens - 2, 1)))


def _spread(chance: random.Random, most: int) -> int:
    return round(most ** chance.random())


def _resident_bytes(server: ServerProcess) -> int:
    """At rest."""
    time.sleep(REST_SECONDS)
    return _status_bytes(server, "VmRSS")


def _status_bytes(server: ServerProcess, field: str) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print the figures; exit code 1 when something is not acceptable."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("requests", type=int, nargs="?", default=5000)
    report = run(parser.parse_args().requests)
    print(f"before: {_mib(report.before_bytes)}, peak: {_mib(report.peak_bytes)}")
    print(f"after a text of {LONGEST_TOKENS} tokens: {', '.join(map(_mib, report.after_bytes))}")
    print(f"during mixed requests: {', '.join(map(_mib, report.mixed_bytes))}")
    print("\n".join(report.problems()) or "all as it must be")
    sys.exit(bool(report.problems()))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()
