"""The `EmbeddingService`: admission → tokenising → queue → workers → answer.

Tokenising and inference never run on the event loop. The parts are in modules of their own:
`admission` bounds the queue, the domain's `scheduling` orders it, `workers` run it, `supervisor`
keeps workers and model alive.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import attrs

from ..domain.cost_model import CostModel
from ..domain.embedder import distinct, require_heads
from ..domain.errors import NotReadyError, NoWorkersError
from ..domain.ports import Clock, Telemetry
from ..domain.types import Heads, ModelContract, TokenizedText
from .admission import Admission, guessed_tokens, size_bytes
from .canary import Canary, canary_job
from .deadline import within
from .jobs import Job
from .loading import LoadedModel, ProcessMemory
from .service import (
    CanaryReport,
    JobResult,
    ModelInfo,
    QueueStatus,
    ServiceStatus,
    Tuning,
)
from .supervisor import Supervisor, SupervisorSettings
from .workers import WorkerPool
from .workspace_room import require_room

TOKENIZE_CHARACTERS = 65_536
"""Long requests are tokenised in pieces of about this size, so that short ones get in between."""


@attrs.frozen
class EngineSettings:
    """Sizes and limits of the engine.

    `hang_timeout_seconds`: the least that is granted to a chunk before it is taken for hanging.
    `request_timeout_seconds`: deadline of requests that bring none; None lets them wait.
    """

    workers: int = 2
    queue_tokens: int = 4 * 1024**2
    queue_bytes: int = 128 * 1024**2
    hang_timeout_seconds: float = 60.0
    request_timeout_seconds: float | None = None
    supervisor: SupervisorSettings = attrs.field(factory=SupervisorSettings)


class Engine:
    """An `EmbeddingService` on a pool of worker threads; `embed` belongs to one event loop."""

    def __init__(
        self,
        load_model: Callable[[], LoadedModel],
        settings: EngineSettings,
        telemetry: Telemetry,
        clock: Clock,
        memory: ProcessMemory | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._pool = WorkerPool(settings.workers, settings.hang_timeout_seconds, telemetry, clock)
        self._supervisor = Supervisor(
            self._pool, load_model, settings.supervisor, clock, memory or ProcessMemory()
        )
        self._admission = Admission(
            settings.queue_tokens, settings.queue_bytes, clock, random.random
        )
        self._tokenizer_pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="tokenize")
        self._served: tuple[ModelInfo, ModelContract] | None = None
        self._is_draining = False
        self._is_stopped = False
        self._canary = Canary(self._run_canary, self._pool.status, clock)

    def load(self) -> None:
        """Load the model, start the workers. Blocks; run it in a thread of its own.

        Raises:
            ModelError: the model cannot be obtained, or fails its self-test.
            ConfigError: the memory does not suffice for it.
        """
        self._supervisor.start()
        model = self._supervisor.model
        assert model is not None  # noqa: S101  start() returned
        # What is known of the model even while it is unloaded; from now on requests are taken.
        self._served = model.info, model.backends[0].contract

    def set_cost_model(self, cost_model: CostModel, tuning: Tuning) -> None:
        """Use newly measured coefficients from the next chunk on; any thread may call this."""
        self._supervisor.set_cost_model(cost_model, tuning)

    def report_in_heartbeat(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Log these figures with every heartbeat, too."""
        self._supervisor.report_in_heartbeat(figures)

    def status(self) -> ServiceStatus:
        """The present state, at once."""
        pool = self._pool.status()
        is_loaded = self._supervisor.model is not None
        return ServiceStatus(
            ready=self._served is not None and not self._is_stopped,
            live_workers=pool.live_workers,
            loaded_workers=pool.live_workers if is_loaded else 0,
            total_workers=self._settings.workers,
            draining=self._is_draining,
            busy_workers=pool.busy_workers,
            suspect_workers=pool.suspect_workers,
            replaced_workers=pool.replaced_workers,
            failure=self._supervisor.trouble,
            delay=self._supervisor.delay,
            model=self._served[0] if self._served else None,
            tuning=self._supervisor.tuning,
            queue=QueueStatus(
                waiting_texts=pool.waiting_texts,
                waiting_tokens=pool.waiting_tokens,
                limit_tokens=self._settings.queue_tokens,
                held_bytes=self._admission.held_bytes,
                limit_bytes=self._settings.queue_bytes,
                drain_tokens_per_second=pool.tokens_per_second,
            )
            if self._served
            else None,
        )

    async def embed(
        self, texts: Sequence[str], heads: Heads, *, timeout_seconds: float | None = None
    ) -> JobResult:
        """Embed texts that passed `validate_texts`; cancelling drops what has not started.

        Raises:
            UnavailableError: not ready, no worker is alive, the queue is full, or the deadline has
                passed.
            InvalidInputError: the model lacks one of `heads`, or the request can never fit.
            InferenceError: the engine failed.
        """
        with self.hold(texts, heads):
            return await self.embed_held(texts, heads, timeout_seconds=timeout_seconds)

    @contextlib.contextmanager
    def hold(self, texts: Sequence[str], heads: Heads) -> Iterator[None]:
        """Count the bytes of a request while it is under way, whoever computes its texts.

        Raises:
            UnavailableError: not ready, no worker is alive, or the queue is full.
            InvalidInputError: the model lacks one of `heads`, or the request can never fit.
        """
        info, contract = self._require_ready()
        require_heads(contract, heads)
        demand = self._pool.demand()
        with self._admission.hold(
            size_bytes(texts, heads, info),
            guessed_tokens(texts, info),
            demand.waiting_tokens,
            demand.tokens_per_second,
        ):
            yield

    async def embed_held(
        self,
        texts: Sequence[str],
        heads: Heads,
        *,
        inputs: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> JobResult:
        """`embed` texts of a request that `hold` counts.

        `inputs`: where the client has them; their own places if left out.

        Raises:
            UnavailableError, InvalidInputError, InferenceError: as `embed`.
        """
        timeout = timeout_seconds or self._settings.request_timeout_seconds
        deadline = None if timeout is None else self._clock() + timeout
        async with within(timeout):
            return await self._embed(texts, heads, inputs or range(len(texts)), deadline)

    def receiving(self) -> AbstractContextManager[Callable[[int], None]]:
        """Bytes of bodies that are not decoded yet; see `Admission.receiving`."""
        demand = self._pool.demand()
        return self._admission.receiving(demand.waiting_tokens, demand.tokens_per_second)

    async def canary(self) -> CanaryReport:
        """Run a few tokens before all waiting work; a recent report is given again.

        An idle model is not woken up for it. Workers that are all at work are healthy, unless all
        take far longer than expected.

        Raises:
            UnavailableError: not ready, or no worker is alive.
        """
        self._require_ready()
        if self._supervisor.model is None:
            return CanaryReport(is_healthy=True, reason="the model is unloaded while idle")
        return await self._canary.report()

    def drain(self) -> None:
        """Report not ready from now on; work is taken and done all the same."""
        self._is_draining = True

    def abort(self) -> None:
        """Answer everything that waits or runs with an error, at once, and take nothing more."""
        self._is_draining = self._is_stopped = True
        self._pool.abort(NotReadyError("the server is stopping"))

    def stop(self) -> None:
        """Take no more work, let the workers finish what is queued, give the memory back."""
        self._is_draining = self._is_stopped = True
        self._pool.drain()
        self._pool.join()
        self._supervisor.stop()
        self._tokenizer_pool.shutdown()

    def _require_ready(self) -> tuple[ModelInfo, ModelContract]:
        if self._served is None:
            raise NotReadyError("model not ready")
        if self._is_stopped:
            raise NotReadyError("the server is stopping")
        if self._supervisor.failure:
            raise NoWorkersError("no workers available")
        return self._served

    async def _embed(
        self, texts: Sequence[str], heads: Heads, inputs: Sequence[int], deadline: float | None
    ) -> JobResult:
        info, _ = self._require_ready()
        demand = self._pool.demand()
        with self._admission.arriving(
            guessed_tokens(texts, info), demand.waiting_tokens, demand.tokens_per_second
        ):
            model = self._supervisor.model
            if model is None:
                # One future for all who wait: nobody who leaves may cancel it.
                model = await asyncio.shield(asyncio.wrap_future(self._supervisor.want_model()))
            started = self._clock()
            tokenized = await self._tokenize(texts, model)
        tokenize_seconds = self._clock() - started
        places, texts_once = distinct(tokenized)
        demand = self._pool.demand()
        needed_tokens = sum(map(len, texts_once))
        self._admission.require_tokens(
            needed_tokens, demand.waiting_tokens, demand.tokens_per_second
        )
        if tuning := self._supervisor.tuning:
            require_room([len(text) for text in tokenized], tuning, inputs)
        first_inputs: dict[int, int] = {}
        for place, index in zip(places, inputs, strict=True):  # numbered as they first appear
            first_inputs.setdefault(place, index)
        job = Job(texts_once, heads, self._clock(), inputs=tuple(first_inputs.values()))
        await self._run(job, deadline)
        return JobResult(
            embeddings=[job.results[place] for place in places],
            report=job.report(tokenize_seconds),
        )

    async def _run(self, job: Job, deadline: float | None = None) -> None:
        number = self._pool.submit(job, deadline)
        try:
            await asyncio.wrap_future(job.done)
        finally:
            self._pool.forget(number)

    async def _tokenize(self, texts: Sequence[str], model: LoadedModel) -> list[TokenizedText]:
        loop = asyncio.get_running_loop()
        tokenized: list[TokenizedText] = []
        for piece in pieces(texts, TOKENIZE_CHARACTERS):
            tokenized += await loop.run_in_executor(
                self._tokenizer_pool, model.tokenizer.encode, piece
            )
        return tokenized

    async def _run_canary(self) -> None:
        if model := self._supervisor.model:
            job = await asyncio.to_thread(
                canary_job, model.tokenizer, model.info.heads, self._clock
            )
            await self._run(job)


def pieces(texts: Sequence[str], characters: int) -> list[Sequence[str]]:
    """Cut a list into runs of at least one text and not many more than so many characters."""
    found, start, size = [], 0, 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= characters or end == len(texts):
            found.append(texts[start:end])
            start, size = end, 0
    return found
