"""What each forward pass really needed, told by the process's peak memory.

The peak belongs to the whole process, so a reading counts only when no other pass ran meanwhile.
A pass that shares its time simply has no reading. Nothing waits for one, except for the few short
passes of a probe that found no undisturbed moment.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from ..domain.embedder import PAD_ID
from ..domain.padding import LONGEST_PADDED_TOKENS
from ..domain.ports import InferenceBackend, PeakMemory
from ..domain.types import (
    Floats,
    HeadProjections,
    ModelContract,
    ResidentMemory,
    TokenBatch,
)

WARM_UP_TOKENS = 8

ALONE_WAIT_SECONDS = 10.0
"""So long may what is running take to end before a probe gives up being alone; nothing else begins
meanwhile."""

_BOS_ID, _EOS_ID, _UNKNOWN_ID = 0, 2, 3


@attrs.define(eq=False)
class Reading:
    """One pass: what was resident before it, and the peak; None if it was not alone."""

    before: ResidentMemory
    peak_bytes: int | None = None
    file_bytes_after: int = 0

    @property
    def rise_bytes(self) -> int | None:
        """The rise above what was resident before, without mapped files that came in meanwhile."""
        if self.peak_bytes is None:
            return None
        file_bytes = max(self.before.file_bytes, self.file_bytes_after)
        return max(0, self.peak_bytes - self.before.anonymous_bytes - file_bytes)


@attrs.define(eq=False)
class PassMeter:
    """Watches all forward passes of the process; safe to share between threads."""

    memory: PeakMemory
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _only: int | None = attrs.field(default=None, init=False)
    _running: int = attrs.field(default=0, init=False)
    _started: int = attrs.field(default=0, init=False)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[Reading]:
        """Around one pass; the reading is complete afterwards, also when the pass failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._only in {None, threading.get_ident()})
            was_idle = self._running == 0
            self._running += 1
            self._started += 1
            number = self._started
            reading = Reading(self.memory.resident())
            if was_idle:
                self.memory.reset_peak()
        try:
            yield reading
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
                if was_idle and self._started == number:
                    reading.peak_bytes = self.memory.peak_bytes()
                    reading.file_bytes_after = self.memory.resident().file_bytes

    @contextlib.contextmanager
    def alone(self, wait_seconds: float = ALONE_WAIT_SECONDS) -> Iterator[bool]:
        """Let only this thread begin passes; False if others still run after `wait_seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._only is None)
            self._only = threading.get_ident()
            is_alone = self._changed.wait_for(lambda: self._running == 0, wait_seconds)
            if not is_alone:
                self._release()
        try:
            yield is_alone
        finally:
            with self._changed:
                if is_alone:
                    self._release()

    def _release(self) -> None:
        self._only = None
        self._changed.notify_all()


Observe = Callable[[int, int, int], None]
"""Takes batch, tokens and measured bytes of a pass that was alone."""


@attrs.frozen(eq=False)
class MeteredBackend:
    """An `InferenceBackend` that reports what its passes needed to `observe`.

    What is reported is never more than the pass and other work at the same time took.
    """

    backend: InferenceBackend
    meter: PassMeter
    observe: Observe

    @property
    def contract(self) -> ModelContract:
        """The wrapped backend's."""
        return self.backend.contract

    @property
    def projections(self) -> HeadProjections:
        """The wrapped backend's."""
        return self.backend.projections

    def run(self, batch: TokenBatch, outputs: Sequence[str]) -> Mapping[str, Floats]:
        """Run, and report if the pass was alone.

        Raises:
            InferenceError: the engine failed.
        """
        with self.meter.forward_pass() as reading:
            result = self.backend.run(batch, outputs)
        if reading.rise_bytes is not None:
            rows, tokens = batch.ids.shape
            self.observe(rows, tokens, reading.rise_bytes)
        return result

    def release(self) -> None:
        """Release what the wrapped backend keeps."""
        self.backend.release()

    def close(self) -> None:
        """Close the wrapped backend."""
        self.backend.close()


@attrs.define(eq=False)
class ProbeMeter:
    """A `WorkspaceMeter` on a backend that is not metered itself.

    Anonymous memory counts from what was held after the warm-up, so that what the allocator keeps
    between passes is part of each peak; mapped files count from what was resident before the pass,
    since the kernel can drop them. Before a pass the engine gives back what it keeps, and `trim`
    lets the allocator do so as far as it can: how much they keep otherwise depends on what ran
    before.
    """

    backend: InferenceBackend
    meter: PassMeter
    trim: Callable[[], None]
    _loaded: ResidentMemory | None = attrs.field(default=None, init=False)

    def warm_up(self) -> None:
        """Run a tiny pass, and take what is held after it for the loaded model.

        Raises:
            InferenceError: the engine failed.
        """
        self._run(probe_batch(1, WARM_UP_TOKENS))
        self._trim()
        self._loaded = self.meter.memory.resident()

    def rest(self) -> None:
        """Give back what the last pass left."""
        self._trim()

    def alone(self) -> contextlib.AbstractContextManager[bool]:
        """Hold other work back; False if what was running did not end soon enough."""
        return self.meter.alone()

    def resident_bytes(self) -> int:
        """What is resident now."""
        return self.meter.memory.resident().total_bytes

    def peak_bytes(self, batch: int, tokens: int) -> int | None:
        """Peak above the loaded model of one pass; None if other work ran meanwhile.

        Raises:
            InferenceError: the engine failed.
        """
        peaks = [self._peak_bytes(each) for each in probe_batches(batch, tokens)]
        return max(peak for peak in peaks if peak is not None) if None not in peaks else None

    def _peak_bytes(self, batch: TokenBatch) -> int | None:
        loaded = self._loaded or self.meter.memory.resident()
        self._trim()
        with self.meter.forward_pass() as reading:
            self._run(batch)
        if reading.peak_bytes is None:
            return None
        floor_bytes = loaded.anonymous_bytes + reading.before.file_bytes
        return max(0, reading.peak_bytes - floor_bytes)

    def _trim(self) -> None:
        self.backend.release()
        self.trim()

    def _run(self, batch: TokenBatch) -> None:
        contract = self.backend.contract
        self.backend.run(batch, contract.outputs_for(contract.heads))


def probe_batches(batch: int, tokens: int) -> tuple[TokenBatch, ...]:
    """One without padding and, where a server may pad, one with: either can need more memory."""
    if batch > 1 and WARM_UP_TOKENS < tokens <= LONGEST_PADDED_TOKENS:
        return probe_batch(batch, tokens), probe_batch(batch, tokens, is_padded=True)
    return (probe_batch(batch, tokens),)


def probe_batch(batch: int, tokens: int, *, is_padded: bool = False) -> TokenBatch:
    """Rows of one id: values do not change the cost, and one row of the table is touched."""
    ids = np.full((batch, tokens), _UNKNOWN_ID, dtype=np.int64)
    ids[:, 0], ids[:, -1] = _BOS_ID, _EOS_ID
    mask, lengths = np.ones_like(ids), np.full(batch, tokens, dtype=np.int64)
    if is_padded:
        ids[-1, -2:], mask[-1, -1], lengths[-1] = (_EOS_ID, PAD_ID), 0, tokens - 1
    return TokenBatch(ids, mask, lengths)
