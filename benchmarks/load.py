"""Many small clients and a bulk one, all of them checking their answers.

.venv/bin/python -m benchmarks.load [seconds]
"""

import argparse
import asyncio
import sys
import time

import attrs
import numpy as np
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
WORKERS = 2
BULK_TEXTS = 256


P95_LIMIT_SECONDS = 2 * CHUNK_SECONDS + 0.05
"""Of a query: the chunk that runs when it comes, and its own."""

LEAST_SHARE = 0.95
"""Of the engine's direct rate."""

GROWTH_LIMIT_BYTES = 32 * 2**20


@attrs.frozen
class Rate:
    """So many texts and tokens in so many seconds, and in so many that a worker calculated."""

    texts: int
    tokens: int
    seconds: float
    calculated_seconds: float

    @property
    def texts_per_second(self) -> float:
        """By the wall clock."""
        return self.texts / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """By the wall clock."""
        return self.tokens / self.seconds

    @property
    def tokens_per_calculated(self) -> float:
        """Per second of calculation: less where chunks are padded. No busy machine stretches it."""
        return self.tokens / self.calculated_seconds


@attrs.frozen
class LoadReport:
    """What the clients saw, and the rates with and without HTTP.

    `growth_bytes`: of resident memory, clients included, from a quarter of the time to its end.
    """

    small: Tally
    bulk: Tally
    served: Rate
    direct: Rate
    growth_bytes: int

    @property
    def p95_seconds(self) -> float:
        """Within which 95 % of the queries are answered."""
        return float(np.percentile(self.small.seconds, 95))

    @property
    def p95_calculated_seconds(self) -> float:
        """The same by the time that both workers calculated: a busy machine does not stretch it."""
        return float(np.percentile(self.small.calculated_seconds, 95)) / WORKERS

    def problems(self) -> list[str]:
        """What an operator could not accept, whatever the machine does meanwhile."""
        found = []
        for tally in (self.small, self.bulk):
            if set(tally.answers) != {200}:
                found.append(f"answers {dict(tally.answers)}")
            if tally.wrong or tally.resets:
                found.append(f"{tally.wrong} wrong answers, {tally.resets} resets")
        if self.p95_calculated_seconds > P95_LIMIT_SECONDS:
            found.append(f"p95 of {self.p95_calculated_seconds:.3f} s, calculated")
        served, direct = self.served.tokens_per_calculated, self.direct.tokens_per_calculated
        if served < LEAST_SHARE * direct:
            found.append(
                f"{served:.0f} tokens in a second of calculation over HTTP, {direct:.0f} without"
            )
        if self.growth_bytes > GROWTH_LIMIT_BYTES:
            found.append(f"memory grew by {self.growth_bytes / 2**20:.0f} MiB")
        return found


def run(seconds: float) -> LoadReport:
    """Load the server, then the engine alone, with as many callers, for a quarter of that time."""
    corpus = Corpus(500, LENGTHS)
    backend = ForgetfulBackend(seconds_per_position=SECONDS_PER_POSITION)
    small, bulk = Tally(), Tally()
    with served_engine(backend, COST) as (engine, address):

        async def load() -> int:
            until = time.monotonic() + seconds
            calculated = backend.calculated_seconds
            clients = [
                closed_loop(address, corpus, small, until, calculated) for _ in range(CLIENTS)
            ]
            bulky = closed_loop(address, corpus, bulk, until, calculated, BULK_TEXTS)
            everybody = asyncio.gather(*clients, bulky)
            await asyncio.sleep(seconds / 4)
            warm_bytes = resident_bytes() or 0
            await everybody
            return (resident_bytes() or 0) - warm_bytes

        async def direct() -> list[int]:
            until = time.monotonic() + seconds / 4
            tokens = []

            async def ask(texts: int) -> None:
                while time.monotonic() < until:
                    places = corpus.pick(texts)
                    await engine.embed([corpus.texts[place] for place in places], Heads.DENSE)
                    tokens.extend(corpus.tokens[place] for place in places)

            await asyncio.gather(*(ask(1) for _ in range(CLIENTS)), ask(BULK_TEXTS))
            return tokens

        started, calculated = time.monotonic(), backend.calculated_seconds()
        growth_bytes = asyncio.run(load())
        turned, half = time.monotonic(), backend.calculated_seconds()
        tokens = asyncio.run(direct())
        ended, whole = time.monotonic(), backend.calculated_seconds()
        alone = Rate(len(tokens), sum(tokens), ended - turned, whole - half)
        served = Rate(
            small.texts + bulk.texts,
            small.tokens + bulk.tokens,
            turned - started,
            half - calculated,
        )
        return LoadReport(small, bulk, served, alone, growth_bytes)


def main() -> None:
    """Print the figures; exit code 1 when something is not acceptable."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("seconds", type=float, nargs="?", default=600)
    report = run(parser.parse_args().seconds)
    print(f"small: {dict(report.small.answers)}, bulk: {dict(report.bulk.answers)}")
    print(f"wrong: {report.small.wrong + report.bulk.wrong}")
    print(f"resets: {report.small.resets + report.bulk.resets}")
    p50 = np.percentile(report.small.seconds, 50)
    print(f"one chunk: {CHUNK_SECONDS:.3f} s, p95 may take {P95_LIMIT_SECONDS:.3f} s")
    print(f"one-text p50 {p50:.3f} s, p95 {report.p95_seconds:.3f} s")
    print(f"p95 by the time that was calculated: {report.p95_calculated_seconds:.3f} s")
    print(f"growth of memory: {report.growth_bytes / 2**20:.1f} MiB")
    for where, rate in (("over HTTP", report.served), ("of the engine alone", report.direct)):
        print(
            f"texts/s {where}: {rate.texts_per_second:.0f}, "
            f"tokens/s: {rate.tokens_per_second:.0f}, "
            f"in a second of calculation: {rate.tokens_per_calculated:.0f}"
        )
    problems = report.problems()
    if report.served.tokens_per_second < LEAST_SHARE * report.direct.tokens_per_second:
        problems.append("HTTP slows the engine, if this machine did nothing else")
    if report.p95_seconds > P95_LIMIT_SECONDS:
        problems.append(f"p95 of {report.p95_seconds:.3f} s, if this machine did nothing else")
    print("\n".join(problems) or "all as it must be")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
