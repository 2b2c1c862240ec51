"""What the path around the engine costs: tokenising, padding, pooling, scattering, serialising.

Each step runs alone on 256 texts of 200 words with the real tokenizer, and the engine on chunks of
8x128 tokens; all of it scaled to the tokens of these texts. Prints each step's share of the whole,
of which all steps together may take 5 %.

    .venv/bin/python -m benchmarks.overhead .cache/bench/checkpoint-24-250002 --ep openvino
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bge_m3_server.app.config import load_config
from bge_m3_server.app.container import build_container
from bge_m3_server.app.http.encoding import DenseForm, both_answer
from bge_m3_server.app.jobs import Job
from bge_m3_server.app.service import JobResult
from bge_m3_server.domain.embedder import NoTelemetry, distinct, embed_chunk, pad
from bge_m3_server.domain.testing import FakeClock
from bge_m3_server.domain.types import Embedding, Floats, Heads, SparseVector, TokenBatch

from benchmarks.performance.workloads import text_maker

TEXTS, WORDS = 256, 200
CHUNK = (8, 128)
HEADS = Heads.DENSE | Heads.SPARSE
BAR = 0.05


class Remembering:
    """The real backend's first answer for a shape, again and again: only our own work is left."""

    def __init__(self, backend: object) -> None:
        self.contract = backend.contract
        self.projections = backend.projections
        self._backend = backend
        self._answers: dict[tuple[int, ...], dict[str, Floats]] = {}

    def run(self, batch: TokenBatch, outputs: list[str]) -> dict[str, Floats]:
        """Without the engine, from the second time on."""
        shape = batch.ids.shape
        if shape not in self._answers:
            self._answers[shape] = dict(self._backend.run(batch, outputs))
        return self._answers[shape]


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median of a few runs."""
    work()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ep", default="openvino")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench/product"))
    arguments = parser.parse_args()
    environment = {
        "BGE_M3_MODEL_DIR": str(arguments.directory),
        "BGE_M3_CACHE_DIR": str(arguments.cache),
        "BGE_M3_EP": arguments.ep,
        "BGE_M3_MODEL": "w8",
        "BGE_M3_DISABLE_AUTO_BUDGET": "1",
    }
    model = build_container(load_config(environment, "linux")).load_model()
    backend, tokenizer = model.backends[0], model.tokenizer
    texts = text_maker(arguments.directory / "tokenizer.json").texts(
        "overhead", 0, [WORDS + 2] * TEXTS
    )
    tokenized = tokenizer.encode(texts)
    tokens = sum(map(len, tokenized))
    rows = [text.ids[: CHUNK[1]] for text in tokenized[: CHUNK[0]]]
    chunk = [type(tokenized[0])(ids) for ids in rows]
    remembering = Remembering(backend)
    scale = tokens / (CHUNK[0] * CHUNK[1])
    results = [_embedding(len(text), text.ids) for text in tokenized]
    job_result = JobResult(results, Job(tokenized, HEADS, 0.0).report(0.0))

    engine = seconds(
        lambda: backend.run(pad(chunk), backend.contract.outputs_for(HEADS)), repeats=7
    )
    steps = {
        "tokenise": seconds(lambda: tokenizer.encode(texts)),
        "find repeats": seconds(lambda: distinct(tokenized)),
        "schedule": seconds(lambda: _schedule(list(map(len, tokenized)), model)),
        "pad, pool, scatter": scale
        * seconds(lambda: embed_chunk(chunk, HEADS, remembering, NoTelemetry())),
        "serialise": seconds(lambda: both_answer(job_result, model.info, DenseForm())),
    }
    whole = engine * scale + sum(steps.values())
    print(f"{TEXTS} texts, {tokens} tokens, {arguments.ep}: {whole:.1f} s")
    print(f"  {'engine':20} {engine * scale:9.3f} s {engine * scale / whole:8.2%}")
    for name, taken in steps.items():
        print(f"  {name:20} {taken:9.3f} s {taken / whole:8.2%}")
    share = sum(steps.values()) / whole
    print(f"  around the engine: {share:.2%} (bar {BAR:.0%}): {'ok' if share <= BAR else 'MISSED'}")


def _schedule(lengths: list[int], model: object) -> None:
    from bge_m3_server.domain.scheduling import Scheduler  # noqa: PLC0415

    scheduler = Scheduler(FakeClock())
    scheduler.submit(lengths)
    while scheduler.take(model.cost_model, padding=model.padding):
        pass


def _embedding(tokens: int, ids: np.ndarray) -> Embedding:
    generator = np.random.default_rng(tokens)
    indices = np.unique(ids)
    return Embedding(
        token_count=tokens,
        dense=generator.random(1024, np.float32),
        sparse=SparseVector(indices, generator.random(len(indices), np.float32)),
    )


if __name__ == "__main__":
    main()
