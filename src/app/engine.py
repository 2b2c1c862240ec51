"""The worker pool: loads the model, spreads chunks over worker threads, reports health.

Tokenising and inference never run on the event loop: texts are tokenised in a small thread pool,
chunks wait in one queue and any free worker takes the next one.
"""

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

import attrs

from ..domain.binpack import bin_pack
from ..domain.cost_model import CostModel
from ..domain.embedder import embed_chunk, require_heads
from ..domain.errors import (
    BgeM3Error,
    InferenceError,
    NonFiniteOutputError,
    NotReadyError,
    NoWorkersError,
)
from ..domain.ports import Clock, InferenceBackend, Telemetry, Tokenizer
from ..domain.self_test import self_test
from ..domain.statistics import LengthStats
from ..domain.types import Chunk, Embedding, Heads, TokenizedText
from .service import JobReport, JobResult, ModelInfo, ServiceStatus, Tuning

logger = logging.getLogger(__name__)

NON_FINITE_LIMIT = 3
"""So many texts in a row without one finite result mean that the model is broken, not the texts."""


@attrs.frozen
class LoadedModel:
    """Everything the pool needs to serve: worker i uses backend i modulo their number.

    `is_verified_bge_m3`: the files are the published ones, so their golden numbers must come out.
    """

    info: ModelInfo
    tokenizer: Tokenizer
    backends: tuple[InferenceBackend, ...]
    cost_model: CostModel
    tuning: Tuning
    is_verified_bge_m3: bool = False


@attrs.define(eq=False)
class _Job:
    """One request on its way: chunks report here, the last one completes `done`."""

    texts: list[TokenizedText]
    heads: Heads
    remaining: int
    done: Future[None] = attrs.field(factory=Future)
    results: dict[int, Embedding] = attrs.field(factory=dict)
    queue_wait_seconds: float = 0.0
    inference_seconds: float = 0.0
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def fail(self, error: BgeM3Error) -> None:
        with contextlib.suppress(InvalidStateError):  # failed elsewhere, or abandoned
            self.done.set_exception(error)

    def finish_chunk(
        self, results: dict[int, Embedding], waited_seconds: float, inference_seconds: float
    ) -> None:
        with self.lock:
            self.results |= results
            self.queue_wait_seconds = max(self.queue_wait_seconds, waited_seconds)
            self.inference_seconds += inference_seconds
            self.remaining -= 1
            is_last = self.remaining == 0
        if is_last:
            with contextlib.suppress(InvalidStateError):  # abandoned by its client
                self.done.set_result(None)


@attrs.frozen(eq=False)
class _Task:
    """One chunk of a job, with the tracing context of its request."""

    job: _Job
    chunk: Chunk
    estimated_bytes: int
    queued_at: float
    context: contextvars.Context


class Engine:
    """An `EmbeddingService` on a fixed pool of worker threads."""

    def __init__(
        self,
        load_model: Callable[[], LoadedModel],
        workers: int,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._load_model = load_model
        self._workers = workers
        self._telemetry = telemetry
        self._clock = clock
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._tokenizer_pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._threads: list[threading.Thread] = []
        self._model: LoadedModel | None = None
        self._live_workers = 0
        self._lock = threading.Lock()
        self._ready = False
        self._non_finite_in_a_row = 0

    def load(self) -> None:
        """Load the model, test it, start the workers. Blocks; run it in a thread of its own.

        Raises:
            ModelError: the model cannot be obtained, or fails its self-test.
        """
        model = self._load_model()
        for backend in model.backends:
            self_test(model.tokenizer, backend, is_bge_m3=model.is_verified_bge_m3)
        with self._lock:
            self._model = model
            self._live_workers = self._workers
        for number in range(self._workers):
            thread = threading.Thread(
                target=self._work,
                args=(model.backends[number % len(model.backends)],),
                name=f"worker-{number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        self._ready = True

    def status(self) -> ServiceStatus:
        """The present state, at once."""
        model = self._model
        live = self._live_workers
        return ServiceStatus(
            ready=self._ready,
            live_workers=live,
            loaded_workers=live if model else 0,
            total_workers=self._workers,
            waiting_chunks=self._tasks.qsize(),
            failure=self._failure(),
            model=model.info if model else None,
            tuning=model.tuning if model else None,
        )

    def _failure(self) -> str | None:
        count = self._non_finite_in_a_row
        if count < NON_FINITE_LIMIT:
            return None
        return f"the model returned non-finite values for the last {count} texts"

    async def embed(self, texts: Sequence[str], heads: Heads) -> JobResult:
        """Embed texts that passed `validate_texts`; cancelling drops what has not started.

        Raises:
            UnavailableError: not ready, or no worker is alive.
            InvalidInputError: the model lacks one of `heads`.
            InferenceError: the engine failed.
        """
        model = self._model
        if model is None or not self._ready:
            raise NotReadyError("model not ready")
        require_heads(model.backends[0].contract, heads)
        started = self._clock()
        loop = asyncio.get_running_loop()
        tokenized = await loop.run_in_executor(self._tokenizer_pool, model.tokenizer.encode, texts)
        tokenize_seconds = self._clock() - started
        lengths = [len(text) for text in tokenized]
        chunks = bin_pack(lengths, model.cost_model)
        job = _Job(texts=tokenized, heads=heads, remaining=len(chunks))
        self._enqueue(job, chunks, model.cost_model)
        await asyncio.wrap_future(job.done)
        return JobResult(
            embeddings=[job.results[index] for index in range(len(tokenized))],
            report=JobReport(
                chunks=len(chunks),
                max_chunk_tokens=max(chunk.max_tokens for chunk in chunks),
                lengths=LengthStats.of(lengths),
                tokenize_ms=tokenize_seconds * 1e3,
                queue_wait_ms=job.queue_wait_seconds * 1e3,
                inference_ms=job.inference_seconds * 1e3,
            ),
        )

    def stop(self) -> None:
        """Take no more work, let the workers finish what is queued, give the memory back."""
        self._ready = False
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._tokenizer_pool.shutdown()
        if self._model:
            for backend in self._model.backends:
                backend.close()

    def _enqueue(self, job: _Job, chunks: Sequence[Chunk], cost_model: CostModel) -> None:
        # The lock pairs with the last worker's farewell: a task is either seen by it or refused.
        with self._lock:
            if self._live_workers == 0:
                raise NoWorkersError("no workers available")
            now = self._clock()
            for chunk in chunks:
                estimate = cost_model.chunk_cost_bytes(len(chunk), chunk.max_tokens)
                context = contextvars.copy_context()
                self._tasks.put(_Task(job, chunk, estimate, now, context))

    def _work(self, backend: InferenceBackend) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                if not task.job.done.done():  # neither failed elsewhere nor abandoned by its client
                    task.context.run(self._run, task, backend)
        except BaseException:
            logger.exception("worker died")
        finally:
            self._farewell()

    def _run(self, task: _Task, backend: InferenceBackend) -> None:
        job, started = task.job, self._clock()
        try:
            outcomes = embed_chunk(
                [job.texts[index] for index in task.chunk.indices],
                job.heads,
                backend,
                self._telemetry,
                task.estimated_bytes,
            )
        except BgeM3Error as error:
            job.fail(error)
            return
        except Exception as error:
            logger.exception("worker failed on a chunk")
            job.fail(InferenceError(f"unexpected {type(error).__name__} in the engine"))
            return
        except BaseException:
            job.fail(InferenceError("the worker died while it ran this request"))
            raise
        self._watch(outcomes)
        results: dict[int, Embedding] = {}
        for index, outcome in zip(task.chunk.indices, outcomes, strict=True):
            if isinstance(outcome, NonFiniteOutputError):
                job.fail(NonFiniteOutputError(f"input[{index}]: {outcome}", index=index))
                return
            results[index] = outcome
        job.finish_chunk(results, started - task.queued_at, self._clock() - started)

    def _watch(self, outcomes: Sequence[Embedding | NonFiniteOutputError]) -> None:
        """Count texts without a finite result; any finite one shows that the model works."""
        with self._lock:
            if any(isinstance(outcome, Embedding) for outcome in outcomes):
                self._non_finite_in_a_row = 0
            else:
                self._non_finite_in_a_row += len(outcomes)

    def _farewell(self) -> None:
        """Count a worker out; the last one fails whatever is still queued."""
        with self._lock:
            self._live_workers -= 1
            if self._live_workers:
                return
            while True:
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    return
                if task is not None:
                    task.job.fail(NoWorkersError("no workers available"))
