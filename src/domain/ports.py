"""What the domain needs from the outside, as small as its callers allow."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from .types import (
    ChunkStats,
    Floats,
    GpuDevice,
    HeadProjections,
    MemoryLimit,
    ModelContract,
    TokenBatch,
    TokenizedText,
)


class Tokenizer(Protocol):
    """Turns text into vocabulary ids, special tokens included, cut to the model's limit."""

    def encode(self, texts: Sequence[str]) -> list[TokenizedText]:
        """One result per text, in order; never raises for any `str` without lone surrogates."""
        ...


class InferenceBackend(Protocol):
    """One loaded model on one engine. `run` may be called from several threads at once."""

    @property
    def contract(self) -> ModelContract:
        """What the graph takes and gives."""
        ...

    @property
    def projections(self) -> HeadProjections:
        """Heads that are applied outside the graph."""
        ...

    def run(self, batch: TokenBatch, outputs: Sequence[str]) -> Mapping[str, Floats]:
        """Compute only `outputs` (graph output names) for one padded batch.

        Raises:
            InferenceError: the engine failed.
        """
        ...

    def close(self) -> None:
        """Give the model's memory back; the backend is not used afterwards."""
        ...


class MemoryProbe(Protocol):
    """One place that may know this process's memory limit."""

    def limit(self) -> MemoryLimit | None:
        """The limit, or None where this source has nothing to say."""
        ...


class GpuInfo(Protocol):
    """Accelerators of this machine."""

    def devices(self) -> tuple[GpuDevice, ...]:
        """All devices; empty where there is none."""
        ...


class Clock(Protocol):
    """Seconds on a clock that never goes backwards."""

    def __call__(self) -> float:
        """Now."""
        ...


class Telemetry(Protocol):
    """Where spans go. Both methods give a context manager that lasts as long as the work."""

    def request(
        self, route: str, attributes: Mapping[str, str | int]
    ) -> AbstractContextManager[None]:
        """The span of one request; a chunk opened in a copy of its context is its child."""
        ...

    def chunk(self, stats: ChunkStats, /) -> AbstractContextManager[None]:
        """The span of one forward pass."""
        ...
