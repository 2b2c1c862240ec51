"""Workers raise, die and hang at random while clients ask.

.venv/bin/python -m benchmarks.faults [seconds]
"""

import argparse
import asyncio
import json
import logging
import math
import random
import sys
import time

import attrs
from bge_m3_server.domain import CostModel
from bge_m3_server.domain.testing import FakeTokenizer

from benchmarks.harness import (
    TYPED_ERRORS,
    Client,
    Corpus,
    ForgetfulBackend,
    Tally,
    closed_loop,
    served_engine,
)
from tests.support.fault_backend import Fault
from tests.support.serve import Address

COST = CostModel(1.0, 0.0, 512)
FAULTS = {
    Fault.RAISE: 10,
    Fault.DIE: 10,
    Fault.OUT_OF_MEMORY: 10,
    Fault.NON_FINITE: 10,
    Fault.HANG: 1,
}
"""And how often each comes, compared with the others: a hang keeps its worker for seconds."""

MEAN_SECONDS_BETWEEN_FAULTS = 0.1
HANG_SECONDS = 3.0
TRUTH_SECONDS = 2.0
"""So long after a worker began to hang, `/health` must know of it."""

CLIENTS = 16
RECOVERY_LIMIT_SECONDS = 30.0


@attrs.define
class FaultReport:
    """What clients and a prober saw.

    `faults`: how many were injected.
    `poisoned`: answers to requests with a text that kills its worker whenever it runs.
    `hangs_told`, `hangs_hidden`: looks at `/health` while a worker had hung for longer than
    `TRUTH_SECONDS`, by whether it was told.
    `slowest_probe_seconds`: of `/live` and `/health`.
    `recovery_seconds`: from the last fault until `/health` and `/health/deep` are ok.
    """

    tally: Tally = attrs.field(factory=Tally)
    poisoned: Tally = attrs.field(factory=Tally)
    faults: int = 0
    hangs_told: int = 0
    hangs_hidden: int = 0
    slowest_probe_seconds: float = 0.0
    recovery_seconds: float = 0.0

    def problems(self) -> list[str]:
        """What an operator could not accept."""
        found = []
        for tally in (self.tally, self.poisoned):
            if tally.wrong or tally.resets:
                found.append(f"{tally.wrong} wrong answers, {tally.resets} resets")
            if untyped := set(tally.answers) - TYPED_ERRORS - {200}:
                found.append(f"answers {untyped}")
        if not self.tally.answers[200] or not self.poisoned.answers[500]:
            found.append("too little happened")
        if self.hangs_hidden or not self.hangs_told:
            found.append(f"of hanging workers, {self.hangs_hidden} were hidden")
        if self.slowest_probe_seconds > 2:
            found.append(f"a probe took {self.slowest_probe_seconds:.2f} s")
        if self.recovery_seconds > 10:
            found.append(f"recovery took {self.recovery_seconds:.2f} s")
        return found


def run(seconds: float, seed: int = 1) -> FaultReport:
    """Inject faults for so long under load, then let it recover."""
    backend = ForgetfulBackend(seconds_per_position=20e-6)
    report = FaultReport()
    with served_engine(backend, COST, hang_timeout_seconds=HANG_SECONDS) as (_, address):
        backend.poison = {FakeTokenizer().word_id("poison"): Fault.DIE}

        async def campaign() -> None:
            corpus, until = Corpus(200, (5, 10, 20, 40)), time.monotonic() + seconds
            clients = [
                closed_loop(address, corpus, report.tally, until, backend.calculated_seconds)
                for _ in range(CLIENTS)
            ]
            await asyncio.gather(
                *clients,
                _inject(backend, report, random.Random(seed), until),
                _send_poison(address, report, until),
                _probe(address, backend, report, until),
            )
            backend.next_faults.clear()
            report.recovery_seconds = await _recovery_seconds(address)

        asyncio.run(campaign())
    return report


async def _inject(
    backend: ForgetfulBackend, report: FaultReport, chance: random.Random, until: float
) -> None:
    kinds, weights = list(FAULTS), list(FAULTS.values())
    drawn, pause = Fault.HANG, 0.0  # the very first chunk hangs, before anything was measured
    while time.monotonic() < until:
        await asyncio.sleep(pause)
        # Only what runs can fail: faults must not wait for a model that is being loaded again.
        if backend.calculating > len(backend.next_faults):
            backend.next_faults.append(drawn)
            report.faults += 1
            (drawn,) = chance.choices(kinds, weights)
        if report.faults:
            pause = chance.expovariate(1 / MEAN_SECONDS_BETWEEN_FAULTS)


async def _send_poison(address: Address, report: FaultReport, until: float) -> None:
    client = Client(address)
    while time.monotonic() < until:
        status, _ = await client.embed(["harmless", "poison"])
        report.poisoned.answers[status] += 1
        await asyncio.sleep(0.3)
    client.close()


async def _probe(
    address: Address, backend: ForgetfulBackend, report: FaultReport, until: float
) -> None:
    client = Client(address)
    while time.monotonic() < until:
        started = time.monotonic()
        await client.ask("GET", "/live")
        _, _, body = await client.ask("GET", "/health")
        took = time.monotonic() - started
        report.slowest_probe_seconds = max(report.slowest_probe_seconds, took)
        # A worker that is about to be replaced may be so between our look and the server's.
        hanging = sum(
            TRUTH_SECONDS < started - since < HANG_SECONDS - took - 0.2
            for since in backend.hanging_since
        )
        health = json.loads(body)
        told = 0 if health["status"] == "ok" else health["workers"]["suspect"]
        report.hangs_told += min(told, hanging)
        report.hangs_hidden += max(hanging - told, 0)
        await asyncio.sleep(0.05)
    client.close()


async def _recovery_seconds(address: Address) -> float:
    client, started = Client(address), time.monotonic()
    while not await _is_healthy(client):
        if time.monotonic() - started > RECOVERY_LIMIT_SECONDS:
            return math.inf
        await asyncio.sleep(0.05)
    client.close()
    return time.monotonic() - started


async def _is_healthy(client: Client) -> bool:
    status, _, body = await client.ask("GET", "/health")
    deep, _, _ = await client.ask("GET", "/health/deep")
    return (status, deep, json.loads(body)["status"]) == (200, 200, "ok")


def main() -> None:
    """Print the figures; exit code 1 when something is not acceptable."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("seconds", type=float, nargs="?", default=600)
    seconds = parser.parse_args().seconds
    logging.disable()  # each fault would be told
    report = run(seconds)
    print(f"faults: {report.faults}")
    print(f"answers: {dict(report.tally.answers)}, to poison: {dict(report.poisoned.answers)}")
    print(f"hanging workers in /health: {report.hangs_told} told, {report.hangs_hidden} hidden")
    print(f"slowest probe: {report.slowest_probe_seconds:.3f} s")
    print(f"recovery: {report.recovery_seconds:.3f} s")
    print("\n".join(report.problems()) or "all as it must be")
    sys.exit(bool(report.problems()))


if __name__ == "__main__":
    main()
