"""Many small clients and a bulk one, all of them checking their answers.

.venv/bin/python -m benchmarks.load [seconds]
"""

import asyncio
import sys
import time

import attrs
from bge_m3_server.adapters.memory.rss import resident_bytes
from bge_m3_server.domain import CostModel
from bge_m3_server.domain.types import Heads

from benchmarks.harness import Corpus, ForgetfulBackend, Tally, closed_loop, served_engine

CHUNK_POSITIONS = 1024
SECONDS_PER_POSITION = 200e-6
CHUNK_SECONDS = CHUNK_POSITIONS * SECONDS_PER_POSITION
COST = CostModel(1.0, 0.0, CHUNK_POSITIONS)
LENGTHS = (5, 8, 13, 21, 34, 55, 89)
CLIENTS = 64
BULK_TEXTS = 256


@attrs.frozen
class LoadReport:
    """What the clients saw, and texts per second with and without HTTP.

    `growth_bytes`: of resident memory, clients included, from a quarter of the time to its end.
    """

    small: Tally
    bulk: Tally
    served_texts_per_second: float
    direct_texts_per_second: float
    growth_bytes: int


def run(seconds: float) -> LoadReport:
    """Load the server, then measure the engine alone for a quarter of that time."""
    corpus = Corpus(500, LENGTHS)
    backend = ForgetfulBackend(seconds_per_position=SECONDS_PER_POSITION)
    small, bulk = Tally(), Tally()
    with served_engine(backend, COST) as (engine, address):

        async def load() -> int:
            until = time.monotonic() + seconds
            clients = [closed_loop(address, corpus, small, until) for _ in range(CLIENTS)]
            bulky = closed_loop(address, corpus, bulk, until, BULK_TEXTS)
            everybody = asyncio.gather(*clients, bulky)
            await asyncio.sleep(seconds / 4)
            warm_bytes = resident_bytes() or 0
            await everybody
            return (resident_bytes() or 0) - warm_bytes

        async def direct() -> float:
            until = time.monotonic() + seconds / 4
            texts = 0
            started = time.monotonic()
            while time.monotonic() < until:
                places = corpus.pick(BULK_TEXTS)
                await asyncio.gather(
                    *(engine.embed([corpus.texts[place]], Heads.DENSE) for place in places)
                )
                texts += len(places)
            return texts / (time.monotonic() - started)

        started = time.monotonic()
        growth_bytes = asyncio.run(load())
        served = (small.texts + bulk.texts) / (time.monotonic() - started)
        return LoadReport(small, bulk, served, asyncio.run(direct()), growth_bytes)


def main() -> None:
    """Print the figures."""
    report = run(float(sys.argv[1]) if len(sys.argv) > 1 else 600)
    print(f"small: {dict(report.small.answers)}, bulk: {dict(report.bulk.answers)}")
    print(f"wrong: {report.small.wrong + report.bulk.wrong}")
    print(f"resets: {report.small.resets + report.bulk.resets}")
    print(f"one chunk: {CHUNK_SECONDS:.3f} s")
    print(
        f"one-text p50 {report.small.percentile(50):.3f} s, p95 {report.small.percentile(95):.3f} s"
    )
    print(f"growth of memory: {report.growth_bytes / 1024**2:.1f} MiB")
    print(f"texts/s over HTTP: {report.served_texts_per_second:.0f}")
    print(f"texts/s of the engine alone: {report.direct_texts_per_second:.0f}")


if __name__ == "__main__":
    main()
