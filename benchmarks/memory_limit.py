"""Does the server's budget hold where the kernel kills?

Makes a cgroup with a hard memory limit (version 1, as root), and in it a process that finds its
limit, loads the model, probes, and then embeds mixed requests in as many threads as a server has
workers: 1-256 texts of 1-8192 tokens, lengths and numbers spread evenly over their logarithms. What
does not fit alone is refused. Prints the budget, the peak and what was done, or that the process
was killed. The work of one request is bounded by --request-tokens, for machines of few cores.

    .venv/bin/python -m benchmarks.synthetic_bge_m3 .cache/synthetic
    .venv/bin/python -m benchmarks.memory_limit .cache/synthetic --limit-mib 6144
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bge_m3_server.adapters.coefficient_store import JsonCoefficientStore
from bge_m3_server.adapters.memory.cgroup import CgroupV1Probe
from bge_m3_server.adapters.memory.peak import peak_memory
from bge_m3_server.adapters.memory.trim import trim_heap
from bge_m3_server.app.tuning import Situation, Tuner, TuningDetail
from bge_m3_server.domain.binpack import bin_pack
from bge_m3_server.domain.budget import Budget, conservative_coefficients, require_fits
from bge_m3_server.domain.budget_override import Pins
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.embedder import NoTelemetry, embed_chunk
from bge_m3_server.domain.errors import RequestTooLargeError
from bge_m3_server.domain.ports import InferenceBackend, PeakMemory
from bge_m3_server.domain.types import Heads, ProbeKey, TokenizedText

from benchmarks.workspace import CONTRACT, open_backend

GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 2**20
KEY = ProbeKey(
    server_version="",
    model_id="synthetic",
    model_fingerprint="",
    precision="fp32",
    engine="onnxruntime",
    engine_version="",
    intra_threads=0,
    max_tokens=8192,
    cpu_model="",
    architecture="",
)


def main() -> None:
    """Make the group, and run this program again inside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit-mib", type=int, default=6144)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--request-tokens", type=int, default=20_000)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        serve(arguments)
        return
    group = GROUPS / f"bge-m3-benchmark-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(arguments.limit_mib * MIB))
    except OSError as error:
        sys.exit(f"a cgroup v1 memory group is needed and cannot be made: {error}")
    try:
        command = [sys.executable, "-m", "benchmarks.memory_limit", *sys.argv[1:], "--inside"]
        finished = subprocess.run(
            command,
            check=False,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        )
        print(f"exit code {finished.returncode}{' (killed)' if finished.returncode < 0 else ''}")
        print(f"OOM control: {(group / 'memory.oom_control').read_text().split()}")
    finally:
        group.rmdir()
    sys.exit(finished.returncode != 0)


def serve(arguments: argparse.Namespace) -> None:
    """Tune, embed, and compare the peak with the budget."""
    memory = peak_memory()
    limit = CgroupV1Probe().limit()
    if isinstance(memory, str) or limit is None:
        sys.exit(f"nothing to measure: {memory}, {limit}")
    inner = open_backend(arguments.directory / "onnx" / "model.onnx", arena=False)
    _embed(inner, [8])
    budget = Budget(
        available_bytes=limit.limit_bytes,
        model_bytes=memory.resident().total_bytes,
        workers=arguments.workers,
        safety_factor=0.7,
    )
    situation = Situation(
        memory=limit,
        budget=budget,
        pins=Pins(),
        conservative=conservative_coefficients(CONTRACT),
        max_tokens=8192,
        peaks=memory,
        trim=trim_heap,
        key=KEY,
    )
    tuner = Tuner(JsonCoefficientStore(Path(tempfile.mkdtemp())), time.monotonic)
    cost_model, _, backend = tuner.prepare(situation, inner)
    measured = threading.Event()
    found: list[CostModel] = [cost_model]

    def publish(newest: CostModel, _tuning: object) -> None:
        found.append(newest)
        measured.set()

    tuner.start(publish)
    measured.wait()
    print(f"limit {limit}, budget {budget}")
    print(f"worst case {budget.worst_case_peak_bytes() / MIB:.0f} MiB")
    print(_summary(tuner.detail()))

    served = refused = tokens = 0
    sampler = _Sampler(memory)
    sampler.start()
    with ThreadPoolExecutor(arguments.workers) as workers:
        for wanted in requests(arguments.requests, arguments.request_tokens):
            cost_model = found[-1]
            try:
                require_fits(wanted, cost_model)
            except RequestTooLargeError as error:
                refused += 1
                if refused == 1:
                    print(f"refused: {error}")
            lengths = [length for length in wanted if cost_model.fits(1, length)]
            chunks = bin_pack(lengths, cost_model)
            list(
                workers.map(
                    lambda chunk, lengths=lengths: _embed(
                        backend, [lengths[index] for index in chunk.indices]
                    ),
                    chunks,
                )
            )
            served += bool(chunks)
            tokens += sum(lengths)
    print(
        f"{served} requests served ({tokens} tokens), {refused} with texts that were refused; "
        f"resident at most {sampler.stop() / MIB:.0f} MiB of {limit.limit_bytes / MIB:.0f} MiB"
    )
    print(f"passes far above their estimate: {_excess(tuner.detail())}")


def _summary(detail: TuningDetail | None) -> str:
    if detail is None:
        return "no tuning"
    return (
        f"{detail.coefficients_source}: {detail.reason}; {detail.quality}; "
        f"texts of up to {detail.longest_text_tokens} tokens fit"
    )


def _excess(detail: TuningDetail | None) -> int:
    return detail.excess_passes if detail else 0


class _Sampler(threading.Thread):
    """The most that was resident: metered passes reset the kernel's mark, so it is read often."""

    def __init__(self, memory: PeakMemory) -> None:
        super().__init__(daemon=True)
        self._memory = memory
        self._is_over = threading.Event()
        self._highest_bytes = 0

    def run(self) -> None:
        while not self._is_over.wait(0.005):
            self._highest_bytes = max(self._highest_bytes, self._memory.peak_bytes())

    def stop(self) -> int:
        self._is_over.set()
        self.join()
        return self._highest_bytes


def requests(count: int, request_tokens: int) -> Iterator[list[int]]:
    """Lengths of the texts of each request; every fifth one has a text of any length up to 8192."""
    generator = np.random.default_rng(4)
    for number in range(count):
        texts = round(float(np.exp(generator.uniform(0, np.log(256)))))
        longest = 8192 if number % 5 == 0 else 1024
        lengths = np.exp(generator.uniform(np.log(2), np.log(longest), texts)).round().astype(int)
        fitting = int(np.searchsorted(np.cumsum(lengths), request_tokens, side="right"))
        yield lengths[: max(1, fitting)].tolist()


def _embed(backend: InferenceBackend, lengths: list[int]) -> None:
    texts = [TokenizedText(np.full(length, 5, dtype=np.int64)) for length in lengths]
    embed_chunk(texts, Heads.DENSE, backend, NoTelemetry())


if __name__ == "__main__":
    main()
