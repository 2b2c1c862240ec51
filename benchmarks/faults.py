"""Workers raise, die and hang at random while clients ask.

.venv/bin/python -m benchmarks.faults [seconds]
"""

import asyncio
import json
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

COST = CostModel(1.0, 0.0, 512)
FAULTS = (Fault.RAISE, Fault.DIE, Fault.HANG, Fault.OUT_OF_MEMORY, Fault.NON_FINITE)
MEAN_SECONDS_BETWEEN_FAULTS = 0.1
HANG_SECONDS = 0.3
CLIENTS = 16


@attrs.define
class FaultReport:
    """What clients and a prober saw.

    `faults`: how many were injected.
    `poisoned`: answers to requests with a text that kills its worker whenever it runs.
    `slowest_probe_seconds`: of `/live` and `/health`.
    `recovery_seconds`: from the last fault until `/health` and `/health/deep` are ok.
    """

    tally: Tally = attrs.field(factory=Tally)
    poisoned: Tally = attrs.field(factory=Tally)
    faults: int = 0
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
        if self.slowest_probe_seconds > 2:
            found.append(f"a probe took {self.slowest_probe_seconds:.2f} s")
        if self.recovery_seconds > 10:
            found.append(f"recovery took {self.recovery_seconds:.2f} s")
        return found


def run(seconds: float, seed: int = 1) -> FaultReport:
    """Inject faults for so long under load, then let it recover."""
    corpus = Corpus(200, (5, 10, 20, 40))
    backend = ForgetfulBackend(seconds_per_position=20e-6)
    report = FaultReport()
    with served_engine(backend, COST, hang_timeout_seconds=HANG_SECONDS) as (_, address):
        backend.poison = {FakeTokenizer().word_id("poison"): Fault.DIE}

        async def inject(until: float) -> None:
            chance = random.Random(seed)
            while time.monotonic() < until:
                await asyncio.sleep(chance.expovariate(1 / MEAN_SECONDS_BETWEEN_FAULTS))
                backend.next_faults.append(chance.choice(FAULTS))
                report.faults += 1

        async def poison(until: float) -> None:
            client = Client(address)
            while time.monotonic() < until:
                status, _ = await client.embed(["harmless", "poison"])
                report.poisoned.answers[status] += 1
                await asyncio.sleep(0.3)
            client.close()

        async def probe(until: float) -> None:
            client = Client(address)
            while time.monotonic() < until:
                started = time.monotonic()
                await client.ask("GET", "/live")
                await client.ask("GET", "/health")
                took = time.monotonic() - started
                report.slowest_probe_seconds = max(report.slowest_probe_seconds, took)
                await asyncio.sleep(0.05)
            client.close()

        async def campaign() -> None:
            until = time.monotonic() + seconds
            clients = [closed_loop(address, corpus, report.tally, until) for _ in range(CLIENTS)]
            await asyncio.gather(*clients, inject(until), poison(until), probe(until))
            backend.next_faults.clear()
            started = time.monotonic()
            client = Client(address)
            while not await _is_healthy(client):  # noqa: ASYNC110  the server tells nobody
                await asyncio.sleep(0.05)
            report.recovery_seconds = time.monotonic() - started
            client.close()

        asyncio.run(campaign())
    return report


async def _is_healthy(client: Client) -> bool:
    status, _, body = await client.ask("GET", "/health")
    deep, _, _ = await client.ask("GET", "/health/deep")
    return (status, deep, json.loads(body)["status"]) == (200, 200, "ok")


def main() -> None:
    """Print the figures; exit code 1 when something is not acceptable."""
    report = run(float(sys.argv[1]) if len(sys.argv) > 1 else 600)
    print(f"faults: {report.faults}")
    print(f"answers: {dict(report.tally.answers)}, to poison: {dict(report.poisoned.answers)}")
    print(f"slowest probe: {report.slowest_probe_seconds:.3f} s")
    print(f"recovery: {report.recovery_seconds:.3f} s")
    print("\n".join(report.problems()) or "all as it must be")
    sys.exit(bool(report.problems()))


if __name__ == "__main__":
    main()
