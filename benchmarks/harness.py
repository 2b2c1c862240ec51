"""A server over a fake model that takes time, and clients that check every answer.

The fake's vectors follow from the text alone: an answer that was lost, doubled or mixed up shows.
"""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np
from bge_m3_server.app.engine import Engine, EngineSettings
from bge_m3_server.app.http.application import HttpLimits, create_app
from bge_m3_server.app.server import keep_for_good
from bge_m3_server.domain import CostModel, Embedder, NoTelemetry
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer
from bge_m3_server.domain.types import Floats, TokenBatch

from tests.support.engines import TICK, loaded_model
from tests.support.fault_backend import FaultBackend
from tests.support.serve import Address, serve

TYPED_ERRORS = {429, 500, 503, 504}


@attrs.define(eq=False)
class ForgetfulBackend(FaultBackend):
    """Keeps no record of its runs, for tests that last, but of the time they should take."""

    _asked_seconds: float = attrs.field(default=0.0, init=False)
    _asked_lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _begun: dict[int, tuple[float, float]] = attrs.field(factory=dict, init=False)

    def run(self, batch: TokenBatch, outputs: Sequence[str]) -> Mapping[str, Floats]:
        """As usual, without the record."""
        seconds = self.seconds_per_run + self.seconds_per_position * batch.ids.size
        worker = threading.get_ident()
        with self._asked_lock:
            self._begun[worker] = (time.monotonic(), seconds)
        try:
            return FaultBackend.run(self, batch, outputs)
        finally:
            self.runs.clear()
            with self._asked_lock:
                del self._begun[worker]
                self._asked_seconds += seconds

    def calculated_seconds(self) -> float:
        """What all runs so far should have taken together: time that no busy machine stretches."""
        with self._asked_lock:
            now = time.monotonic()
            running = sum(min(now - began, seconds) for began, seconds in self._begun.values())
            return self._asked_seconds + running


@contextlib.contextmanager
def served_engine(
    backend: FaultBackend, cost_model: CostModel, **settings: float
) -> Iterator[tuple[Engine, Address]]:
    """A real HTTP server over `backend`; hanging runs are released at the end."""
    engine = Engine(
        lambda: loaded_model(
            backend,
            cost_model=cost_model,
            seconds_per_position=backend.seconds_per_position,  # as a loader would measure it
        ),
        EngineSettings(**{"supervisor": TICK, **settings}),
        NoTelemetry(),
        time.monotonic,
    )
    engine.load()
    app = create_app(engine, HttpLimits(256, 1 << 25), NoTelemetry(), "0", time.monotonic)
    try:
        with serve(app) as address:
            keep_for_good()
            yield engine, address
    finally:
        backend.released.set()
        engine.stop()


@attrs.define
class Client:
    """One keep-alive connection; requests follow one another."""

    address: Address
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict, bytes]:
        """Status, headers and body; `ConnectionError` when the server hangs up."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                self.address.host, self.address.port
            )
        content = b"" if body is None else json.dumps(body).encode()
        self.writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        answer = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, answer

    async def embed(self, texts: list[str]) -> tuple[int, list]:
        """Status, and the vectors of a 200."""
        status, _, answer = await self.ask("POST", "/v1/embeddings", {"input": texts})
        if status != 200:
            return status, []
        return status, [item["embedding"] for item in json.loads(answer)["data"]]

    def close(self) -> None:
        """Hang up."""
        if self.writer:
            self.writer.close()


class Corpus:
    """Texts of mixed length and the vectors they must get."""

    def __init__(self, count: int, lengths: tuple[int, ...], seed: int = 7) -> None:
        chance = random.Random(seed)
        self.texts = [
            f"text {number} " + "word " * (chance.choice(lengths) - 4) for number in range(count)
        ]
        self.tokens = [len(text.ids) for text in FakeTokenizer().encode(self.texts)]
        alone = Embedder(FakeTokenizer(), FakeBackend(), CostModel.conservative())
        self.vectors = [alone.embed([text])[0].dense for text in self.texts]
        self._chance = chance

    def pick(self, count: int) -> list[int]:
        """So many places, by chance."""
        return self._chance.choices(range(len(self.texts)), k=count)

    def is_right(self, places: list[int], vectors: list) -> bool:
        """Whether each text got its own vector."""
        return len(places) == len(vectors) and all(
            np.allclose(self.vectors[place], vector, atol=1e-6)
            for place, vector in zip(places, vectors, strict=True)
        )


@attrs.define
class Tally:
    """What clients saw.

    `seconds`, `calculated_seconds`: from each request to its answer, by the wall clock and by
    `ForgetfulBackend.calculated_seconds`.
    """

    answers: Counter = attrs.field(factory=Counter)
    wrong: int = 0
    resets: int = 0
    texts: int = 0
    tokens: int = 0
    seconds: list[float] = attrs.field(factory=list)
    calculated_seconds: list[float] = attrs.field(factory=list)


async def closed_loop(  # noqa: PLR0913, PLR0917  what a client is
    address: Address,
    corpus: Corpus,
    tally: Tally,
    until: float,
    calculated_seconds: Callable[[], float],
    texts_per_request: int = 1,
) -> None:
    """Ask again as soon as the answer is there."""
    client = Client(address)
    while time.monotonic() < until:
        places = corpus.pick(texts_per_request)
        started, calculated = time.monotonic(), calculated_seconds()
        try:
            status, vectors = await client.embed([corpus.texts[place] for place in places])
        except (ConnectionError, asyncio.IncompleteReadError):
            tally.resets += 1
            client = Client(address)
            continue
        tally.seconds.append(time.monotonic() - started)
        tally.calculated_seconds.append(calculated_seconds() - calculated)
        tally.answers[status] += 1
        if status == 200:
            tally.texts += len(places)
            tally.tokens += sum(corpus.tokens[place] for place in places)
            tally.wrong += not corpus.is_right(places, vectors)
    client.close()
