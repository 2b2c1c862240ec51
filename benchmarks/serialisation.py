"""What does writing an answer cost beside computing it?

Embeds 256 short texts with the preview model (a model about 14 times cheaper than BGE-M3, so the
ratio for BGE-M3 is smaller) and writes a 256 x 1024 answer, interleaved, and prints medians.

    .venv/bin/python benchmarks/serialisation.py
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import numpy as np
from bge_m3_server.app.config import load_config
from bge_m3_server.app.container import build_container
from bge_m3_server.app.http.encoding import DenseForm, dense_answer
from bge_m3_server.app.service import JobResult
from bge_m3_server.domain.types import Embedding, Heads

REPEATS = 7
TEXTS = 256
DIMENSIONS = 1024


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    cache = Path(__file__).parent.parent / ".cache"
    config = load_config({"BGE_M3_MODEL": "preview", "BGE_M3_CACHE_DIR": str(cache)}, "linux")
    engine = build_container(config).engine()
    engine.load()
    model = engine.status().model
    texts = [f"What does document number {number} say?" for number in range(TEXTS)]

    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((TEXTS, DIMENSIONS), dtype=np.float32)
    answer = JobResult([Embedding(token_count=9, dense=vector) for vector in vectors], None)

    seconds: dict[str, list[float]] = {"embed": [], "float": [], "base64": []}
    for _ in range(REPEATS):
        seconds["embed"].append(_timed(lambda: asyncio.run(engine.embed(texts, Heads.DENSE))))
        for name in ("float", "base64"):
            form = DenseForm(as_base64=name == "base64")
            seconds[name].append(_timed(lambda: dense_answer(answer, model, form)))  # noqa: B023
    engine.stop()

    embed = statistics.median(seconds["embed"])
    print(f"embedding {TEXTS} short texts: {embed * 1e3:.1f} ms")
    for name in ("float", "base64"):
        median = statistics.median(seconds[name])
        print(
            f"writing {TEXTS} x {DIMENSIONS} as {name}: {median * 1e3:.1f} ms, "
            f"{median / embed:.1%} of it"
        )


def _timed(work) -> float:  # noqa: ANN001
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
