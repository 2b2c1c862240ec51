"""What the doors (HTTP, CLI) see of the engine: one call, its result, and a snapshot."""

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs

from ..domain.statistics import LengthStats
from ..domain.types import Embedding, Heads


@attrs.frozen
class JobReport:
    """Figures of one finished request, for its log line.

    Stage times are in milliseconds; `inference_ms` is the sum over chunks, `queue_wait_ms` the
    wait of the chunk that started last.
    """

    chunks: int
    max_chunk_tokens: int
    lengths: LengthStats
    tokenize_ms: float
    queue_wait_ms: float
    inference_ms: float


@attrs.frozen(eq=False)
class JobResult:
    """Embeddings in the order of the texts."""

    embeddings: Sequence[Embedding]
    report: JobReport

    @property
    def prompt_tokens(self) -> int:
        """Tokens the model read, special tokens included."""
        return sum(embedding.token_count for embedding in self.embeddings)

    @property
    def truncated_indices(self) -> tuple[int, ...]:
        """Places of the texts that were cut to the model's limit."""
        return tuple(i for i, embedding in enumerate(self.embeddings) if embedding.truncated)


@attrs.frozen
class ModelInfo:
    """The served model as clients see it; `notice` is a sentence for a model that is a stand-in."""

    model_id: str
    heads: Heads
    dimensions: int
    max_tokens: int
    notice: str | None = None


class ProbeStatus(enum.Enum):
    """State of the start-up measurement of workspace."""

    DISABLED = "disabled"
    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"
    CACHE_HIT = "cache_hit"


@attrs.frozen
class Tuning:
    """Where the workspace budget comes from; None means not measured.

    `max_workspace_bytes`: of one forward pass. `total_workspace_bytes`: of all that run at the same
    time, so a text that does not fit into one share may have it alone; None where a setting pins
    the ceiling, which is then obeyed as it is.
    `coefficients_source`: ``conservative``, ``probe``, ``cache`` or the setting that pins them;
    `reason` says why they are used, and why the probe stopped.
    `longest_text_tokens`: a longer text is refused.
    `fixed_bytes`: what any pass needs on top of a and b.
    `excess_passes`: passes that needed over 20 % more than estimated.
    `fit_r_squared`, `fit_worst_relative_error`, `fit_margin`: how well the measurements fit.
    """

    a_bytes_per_token: float
    b_bytes_per_token_sq: float
    max_workspace_bytes: int
    probe_status: ProbeStatus
    memory_source: str | None = None
    available_bytes: int | None = None
    model_rss_bytes_per_worker: int | None = None
    worst_case_peak_bytes: int | None = None
    utilization_pct: float | None = None
    total_workspace_bytes: int | None = None
    coefficients_source: str | None = None
    reason: str | None = None
    longest_text_tokens: int | None = None
    fixed_bytes: int = 0
    excess_passes: int = 0
    fit_r_squared: float | None = None
    fit_worst_relative_error: float | None = None
    fit_margin: float | None = None


@attrs.frozen
class QueueStatus:
    """The queue, its bounds and how fast it moves.

    `held_bytes`: bodies, texts, ids and answers of all requests that are under way.
    `drain_tokens_per_second`: None until work has been measured.
    """

    waiting_texts: int
    waiting_tokens: int
    limit_tokens: int
    held_bytes: int
    limit_bytes: int
    drain_tokens_per_second: float | None = None


@attrs.frozen
class CacheStatus:
    """Texts that were, and were not, in the result cache; and how full it is."""

    hits: int
    misses: int
    held_bytes: int
    limit_bytes: int


@attrs.frozen
class ServiceStatus:
    """A snapshot that never waits for the engine.

    `draining`: work is still taken, but nothing new should be sent: the server is about to stop.
    `busy_workers`: workers that run a chunk, or wait until others leave room for theirs.
    `suspect_workers`: busy ones whose chunk takes so much longer than expected that they may hang.
    `replaced_workers`: workers that died or hung and were replaced since the start.
    `failure`: why the answers cannot be trusted at present; None when all is well.
    `delay`: why an unloaded model that is wanted again is not there yet; None as long as that
    takes no longer than usual.
    `model`, `tuning` and `queue` are None while the model is loading for the first time, `cache`
    where there is none.
    """

    ready: bool
    live_workers: int
    loaded_workers: int
    total_workers: int
    draining: bool = False
    busy_workers: int = 0
    suspect_workers: int = 0
    replaced_workers: int = 0
    failure: str | None = None
    delay: str | None = None
    model: ModelInfo | None = None
    tuning: Tuning | None = None
    queue: QueueStatus | None = None
    cache: CacheStatus | None = None


@attrs.frozen
class CanaryReport:
    """How a small piece of real work fared; `reason` says why it was not answered."""

    is_healthy: bool
    elapsed_ms: float | None = None
    reason: str | None = None


class EmbeddingService(Protocol):
    """The engine as the doors use it."""

    async def embed(
        self, texts: Sequence[str], heads: Heads, *, timeout_seconds: float | None = None
    ) -> JobResult:
        """Embed texts that passed `validate_texts`.

        Cancelling the call removes its work that has not started, and so does the deadline.

        Args:
            texts: what to embed.
            heads: outputs that are wanted.
            timeout_seconds: how long the caller waits; None leaves it to the server.

        Raises:
            UnavailableError: not ready, no worker is alive, the queue is full, or the deadline has
                passed.
            InvalidInputError: the model lacks one of `heads`, or the request can never fit.
            InferenceError: the engine failed.
        """
        ...

    async def canary(self) -> CanaryReport:
        """Run a few tokens before all waiting work; a recent report is given again.

        Raises:
            UnavailableError: not ready, or no worker is alive.
        """
        ...

    def status(self) -> ServiceStatus:
        """The present state, at once."""
        ...
