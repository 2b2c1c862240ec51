"""What the domain needs from the outside, as small as its callers allow."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from .probe_fit import Fit
from .types import (
    ChunkStats,
    Floats,
    GpuDevice,
    HeadProjections,
    MemoryLimit,
    ModelContract,
    ProbeKey,
    ResidentMemory,
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

    def release(self) -> None:
        """Give back what the engine keeps from one pass for the next; not while passes run."""
        ...

    def close(self) -> None:
        """Give the model's memory back; the backend is not used afterwards."""
        ...


class MemoryProbe(Protocol):
    """One place that may know this process's memory limit."""

    def limit(self) -> MemoryLimit | None:
        """The limit, or None where this source has nothing to say."""
        ...


class PeakMemory(Protocol):
    """The high-water mark of this process's resident memory."""

    def resident(self) -> ResidentMemory:
        """What is resident now."""
        ...

    def reset_peak(self) -> None:
        """Forget everything above what is resident now."""
        ...

    def peak_bytes(self) -> int:
        """The most that was resident since `reset_peak`."""
        ...


class WorkspaceMeter(Protocol):
    """Runs forward passes of exact shapes and tells what they needed."""

    def warm_up(self) -> None:
        """Run a tiny pass, and take what is resident after it for the loaded model.

        Raises:
            InferenceError: the engine failed.
        """
        ...

    def resident_bytes(self) -> int:
        """What is resident now."""
        ...

    def alone(self) -> AbstractContextManager[bool]:
        """Hold other work back; False if what was running did not end soon enough."""
        ...

    def peak_bytes(self, batch: int, tokens: int) -> int | None:
        """Peak above the loaded model of one pass; None if other work ran meanwhile.

        Raises:
            InferenceError: the engine failed.
        """
        ...


class CoefficientStore(Protocol):
    """Keeps a fit from one start of the server to the next."""

    def load(self, key: ProbeKey) -> Fit | str:
        """The fit of `key`, or why there is none that can be used."""
        ...

    def save(self, key: ProbeKey, fit: Fit) -> str | None:
        """Keep `fit`; returns why that failed, None when it did not."""
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
