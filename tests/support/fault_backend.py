"""A backend that fails on demand, and takes the time that a real one would."""

import enum
import threading
import time
from collections import deque

import attrs
import numpy as np
from bge_m3_server.domain.errors import InferenceError, OutOfMemoryError
from bge_m3_server.domain.testing import FakeBackend


class Fault(enum.Enum):
    """What can happen to a forward pass."""

    RAISE = "the engine reports an error"
    DIE = "the worker's thread ends"
    HANG = "the call does not return until it is released"
    OUT_OF_MEMORY = "an allocation fails"
    NON_FINITE = "every number is NaN"


@attrs.define(eq=False)
class FaultBackend(FakeBackend):
    """A `FakeBackend` with faults.

    `poison`: a batch with one of these ids suffers its fault.
    `next_faults`: the next runs suffer these, whatever they hold.
    `calculating`: runs that take their time and can still be struck by one of `next_faults`.
    `memory_positions`: rows × length beyond which memory runs out.
    `seconds_per_run`, `seconds_per_position`: how long a run takes.
    `released`: lets hanging runs go on.
    `hanging_since`: when each run that hangs began to, by the clock of `time.monotonic`.
    `attempts`: runs so far, failed ones included.
    """

    poison: dict[int, Fault] = attrs.field(factory=dict)
    next_faults: deque[Fault] = attrs.field(factory=deque)
    memory_positions: int | None = None
    seconds_per_run: float = 0.0
    seconds_per_position: float = 0.0
    released: threading.Event = attrs.field(factory=threading.Event)
    hanging_since: list[float] = attrs.field(factory=list, init=False)
    attempts: int = attrs.field(default=0, init=False)
    calculating: int = attrs.field(default=0, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def run(self, batch, outputs):
        """Suffer a fault, or behave as usual."""
        self.attempts += 1
        seconds = self.seconds_per_run + self.seconds_per_position * batch.ids.size
        if seconds:
            self._count(1)
            time.sleep(seconds)
            self._count(-1)
        fault = self._fault(batch)
        match fault:
            case Fault.RAISE:
                raise InferenceError("injected failure")
            case Fault.DIE:
                raise SystemExit("injected death")
            case Fault.HANG:
                self.hanging_since.append(time.monotonic())
                self.released.wait(timeout=60)
            case Fault.OUT_OF_MEMORY:
                raise OutOfMemoryError("injected: memory ran out")
        answer = FakeBackend.run(self, batch, outputs)
        if fault is Fault.NON_FINITE:
            return {name: np.full_like(values, np.nan) for name, values in answer.items()}
        return answer

    def _count(self, change):
        with self._lock:
            self.calculating += change

    def _fault(self, batch):
        if self.memory_positions is not None and batch.ids.size > self.memory_positions:
            return Fault.OUT_OF_MEMORY
        for token_id, fault in self.poison.items():
            if token_id in batch.ids:
                return fault
        try:
            return self.next_faults.popleft()
        except IndexError:
            return None
