"""A request on its way through the engine, and the forward passes that its texts take part in."""

import contextlib
import contextvars
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError

import attrs

from ..domain.errors import BgeM3Error, InferenceError
from ..domain.statistics import LengthStats
from ..domain.types import Embedding, Heads, TokenizedText
from .service import JobReport

MAX_FAILURES = 2
"""A chunk is tried once more, elsewhere; after that it is split."""


@attrs.define(eq=False)
class Job:
    """One request: chunks leave results here, the last one completes `done`.

    `texts`: each different text once. `inputs`: the place in the request where each comes first;
    their own if left out. Only the pool changes a job, under its lock.
    """

    texts: Sequence[TokenizedText]
    heads: Heads
    submitted_at: float
    is_canary: bool = False
    inputs: Sequence[int] | None = None
    context: contextvars.Context = attrs.field(factory=contextvars.copy_context)
    done: Future[None] = attrs.field(factory=Future)
    results: dict[int, Embedding] = attrs.field(factory=dict)
    chunks: int = 0
    max_chunk_tokens: int = 0
    queue_wait_seconds: float = 0.0
    inference_seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        """Answered, failed, or abandoned by its client."""
        return self.done.done()

    def input_of(self, index: int) -> int:
        """Where the client has text `index`."""
        return index if self.inputs is None else self.inputs[index]

    def fail(self, error: BgeM3Error) -> None:
        """Answer with `error`, unless the job is over."""
        with contextlib.suppress(InvalidStateError):
            self.done.set_exception(error)

    def finish_if_complete(self) -> None:
        """Answer when every text has its result."""
        if len(self.results) == len(self.texts):
            with contextlib.suppress(InvalidStateError):
                self.done.set_result(None)

    def report(self, tokenize_seconds: float) -> JobReport:
        """Figures for the log line."""
        return JobReport(
            chunks=self.chunks,
            max_chunk_tokens=self.max_chunk_tokens,
            lengths=LengthStats.of([len(text) for text in self.texts]),
            tokenize_ms=tokenize_seconds * 1e3,
            queue_wait_ms=self.queue_wait_seconds * 1e3,
            inference_ms=self.inference_seconds * 1e3,
        )


@attrs.frozen(eq=False)
class Task:
    """One forward pass to run: texts of one or several jobs, by their places.

    `failures`: how often a pass with these texts has failed.
    `estimated_bytes`: workspace by the cost model.
    """

    rows: tuple[tuple[Job, int], ...]
    heads: Heads
    estimated_bytes: int
    failures: int = 0

    @property
    def texts(self) -> list[TokenizedText]:
        """What the rows hold."""
        return [job.texts[index] for job, index in self.rows]

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that the rows belong to, each once."""
        return tuple(dict.fromkeys(job for job, _ in self.rows))

    @property
    def is_canary(self) -> bool:
        """Whether it is a health check's; those share no chunk with others."""
        return self.rows[0][0].is_canary

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(map(len, self.texts))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.texts))

    @property
    def positions(self) -> int:
        """Tokens and padding."""
        return len(self.rows) * self.max_tokens

    def without_finished_jobs(self) -> "Task | None":
        """What is still worth running."""
        rows = tuple(row for row in self.rows if not row[0].is_over)
        return attrs.evolve(self, rows=rows) if rows else None


def after_failure(task: Task, *, is_out_of_memory: bool) -> tuple[Task, ...]:
    """What to run instead of a pass that failed; nothing when its one text has had its chances.

    A pass that failed is tried again as it is. When that fails too, or memory ran out, its halves
    are tried, and so on until the text that makes the engine fail is alone.
    """
    failures = task.failures + 1
    if len(task.rows) == 1:
        return () if failures >= MAX_FAILURES else (attrs.evolve(task, failures=failures),)
    if failures < MAX_FAILURES and not is_out_of_memory:
        return (attrs.evolve(task, failures=failures),)
    middle = len(task.rows) // 2
    halves = (task.rows[:middle], task.rows[middle:])
    estimate = task.estimated_bytes // 2
    failures = 0 if is_out_of_memory else MAX_FAILURES - 1
    return tuple(Task(rows, task.heads, estimate, failures) for rows in halves)


def blame(task: Task, error: Exception) -> InferenceError:
    """The error of the one text that `task` consists of, without internals of the engine."""
    ((job, own_index),) = task.rows
    index = job.input_of(own_index)
    known = error if isinstance(error, BgeM3Error) else f"unexpected {type(error).__name__}"
    return InferenceError(f"input[{index}]: the engine failed: {known}", index=index)
