"""What a start with a cache hit costs beyond loading the model.

Starts, in turns, `bge-m3-server serve` with remembered coefficients, from the start of the process
until `/ready` answers 200, and a bare process that only makes the same session and tokenizer.
Prints both medians and the median of the differences of neighbours, which must stay below two
seconds; fp32 on ONNX Runtime.

    .venv/bin/python -m benchmarks.synthetic_bge_m3 .cache/synthetic
    .venv/bin/python -m benchmarks.warm_start .cache/synthetic --repeats 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.support.server_process import ServerProcess, clean_environment, running_server

BAR_SECONDS = 2.0
PROBE_TIMEOUT_SECONDS = 600.0

BARE = """
import sys
from pathlib import Path
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.adapters.ort.cpu import cpu_providers
from bge_m3_server.adapters.ort.session import SessionSettings, load_backend
from bge_m3_server.adapters.tokenizer import load_tokenizer
from bge_m3_server.domain.types import HeadProjections

files = local_model(Path(sys.argv[1]))
settings = SessionSettings(int(sys.argv[2]), Path("unused"))
load_backend(files.graph_path, HeadProjections(), settings, cpu_providers(None))
load_tokenizer(files.tokenizer_path, 8192)
"""
"""The same session and tokenizer as the server's, and nothing else."""


def main() -> None:
    """Fill the cache, measure in turns, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of one forward pass")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "BGE_M3_MODEL_DIR": str(arguments.directory),
            "BGE_M3_CACHE_DIR": cache,
            "BGE_M3_EP": "cpu",
            "BGE_M3_MODEL": "fp32",
            "BGE_M3_INTRA_THREADS": str(arguments.threads),
            "BGE_M3_DISABLE_AUTO_BUDGET": "",
        }
        with running_server(settings) as server:
            server.wait_for_log("probe complete", PROBE_TIMEOUT_SECONDS)
        pairs = [
            (seconds_to_ready(settings), seconds_of_bare_load(arguments))
            for _ in range(arguments.repeats)
        ]
    warm, bare = zip(*pairs, strict=True)
    difference = statistics.median(one - other for one, other in pairs)
    print(
        f"{arguments.repeats} starts each, medians: ready after {statistics.median(warm):.2f} s "
        f"with a cache hit, bare load {statistics.median(bare):.2f} s; "
        f"difference {difference:.2f} s (bar: {BAR_SECONDS:g} s)"
    )
    if arguments.json:
        figures = {"warm_seconds": warm, "bare_seconds": bare, "difference_seconds": difference}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(difference >= BAR_SECONDS)


def seconds_to_ready(settings: dict[str, str]) -> float:
    """From the start of the process to the first 200 of `/ready`."""
    started = time.monotonic()
    with running_server(settings, wait_until_ready=False) as server:
        while not _is_ready(server):
            time.sleep(0.005)
        seconds = time.monotonic() - started
        status = httpx.get(f"{server.url}/health").json()["tuning"]["probe_status"]
    if status != "cache_hit":
        sys.exit(f"the start was not warm: {status}")
    return seconds


def _is_ready(server: ServerProcess) -> bool:
    if server.process.poll() is not None:
        sys.exit("the server ended: " + "".join(server.log))
    return httpx.get(f"{server.url}/ready").status_code == httpx.codes.OK


def seconds_of_bare_load(arguments: argparse.Namespace) -> float:
    """From the start of the process to its end, which comes at once."""
    started = time.monotonic()
    command = [sys.executable, "-c", BARE, str(arguments.directory), str(arguments.threads)]
    subprocess.run(command, env=clean_environment(), check=True)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
