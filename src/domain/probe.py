"""The start-up measurement of workspace: which shapes, in which order, and when to stop."""

import enum
from collections.abc import Callable, Sequence

import attrs

from .errors import InferenceError
from .ports import Clock, WorkspaceMeter
from .probe_fit import Coefficients, ShapePeak

Shape = tuple[int, int]
"""Batch and tokens of one forward pass."""

PROBE_SHAPES: tuple[Shape, ...] = (
    (1, 64),
    (4, 64),
    (1, 256),
    (8, 128),
    (1, 512),
    (1, 1024),
    (4, 512),
    (1, 2048),
    (1, 4096),
)
"""Short and long texts, alone and together: both terms of the cost model dominate somewhere."""

SHORT_TEXT_TOKENS = 1024
SHORT_TEXT_POSITIONS = 4096
"""Tokens of the largest pass where no text is as long as `SHORT_TEXT_TOKENS`: in small passes, what
the allocator keeps outweighs what the model needs."""

LEAST_TRIES = 2
"""For passes that take longer than patience lasts."""

GROWTH_MARGIN = 1.1
"""On top of the growth bound: the peaks it starts from scatter."""


@attrs.frozen(kw_only=True)
class ProbeLimits:
    """What the probe may use.

    `memory_bytes`: resident memory of the process that must not be passed; None if unlimited.
    `workspace_bytes`: the most that any forward pass will be allowed: no use measuring above.
    `shape_seconds`: of one forward pass. `total_seconds`: of the whole probe.
    `retry_seconds`: pause after a measurement that other work disturbed.
    `patience_seconds`: how long to hope for an undisturbed moment for one shape.
    `alone_seconds`: of a pass for which other work may be held back once patience is over.
    `repeats`: measurements of a shape, the largest of which counts; fewer where they would take
    longer than `repeat_seconds`.
    """

    memory_bytes: int | None
    workspace_bytes: int
    shape_seconds: float = 60.0
    total_seconds: float = 300.0
    retry_seconds: float = 1.0
    patience_seconds: float = 10.0
    alone_seconds: float = 4.0
    repeats: int = 3
    repeat_seconds: float = 1.0


class ProbeOutcome(enum.Enum):
    """How a probe ended."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    ENGINE_FAILED = "engine_failed"


BUSY_REASON = "other work ran all the time"


@attrs.frozen
class SkippedShape:
    """A shape that was not measured, and why; `is_for_memory`: with more of it, it would be."""

    shape: Shape
    reason: str
    is_for_memory: bool = False


@attrs.frozen
class ProbeResult:
    """What was measured, in ascending order of cost; `reason` says why the probe stopped."""

    peaks: tuple[ShapePeak, ...]
    skipped: tuple[SkippedShape, ...]
    outcome: ProbeOutcome
    reason: str

    @property
    def was_limited(self) -> bool:
        """Whether more memory would have shown more."""
        return any(skipped.is_for_memory for skipped in self.skipped)

    @property
    def was_disturbed(self) -> bool:
        """Whether a quieter machine would have shown more."""
        return self.outcome is ProbeOutcome.TIMED_OUT or any(
            skipped.reason == BUSY_REASON for skipped in self.skipped
        )


def probe_shapes(max_tokens: int, conservative: Coefficients) -> tuple[Shape, ...]:
    """Shapes of texts up to `max_tokens`, the longest one among them, cheapest first.

    Where no text is long, many of the longest together stand in for it.
    """
    shapes = [shape for shape in PROBE_SHAPES if shape[1] <= max_tokens]
    if all(tokens != max_tokens for _, tokens in shapes):
        shapes.append((1, max_tokens))
    if max_tokens < SHORT_TEXT_TOKENS:
        shapes.append((SHORT_TEXT_POSITIONS // max_tokens, max_tokens))
    return tuple(sorted(shapes, key=lambda shape: conservative.cost_bytes(*shape)))


def growth(smaller: ShapePeak, shape: Shape) -> float:
    """How many times more than `smaller` a shape can cost at most, for any a and b >= 0."""
    batch, tokens = shape
    positions = batch * tokens / (smaller.batch * smaller.tokens)
    return positions * max(1.0, tokens / smaller.tokens)


@attrs.define(eq=False)
class Probe:
    """Measures `shapes` one after the other.

    Nothing is run that could breach a limit: what a shape needs is bounded by the shapes measured
    before it, and by `conservative` for the first one. A pass that is running cannot be stopped,
    so time is bounded in the same way.

    `cancelled` is asked before every pass. `pause` waits for so many seconds, and may return
    early when the probe is cancelled.
    """

    shapes: Sequence[Shape]
    meter: WorkspaceMeter
    conservative: Coefficients
    limits: ProbeLimits
    clock: Clock
    cancelled: Callable[[], bool]
    pause: Callable[[float], object]

    _peaks: list[ShapePeak] = attrs.field(factory=list, init=False)
    _skipped: list[SkippedShape] = attrs.field(factory=list, init=False)
    _is_busy: bool = attrs.field(default=False, init=False)

    def run(self) -> ProbeResult:
        """Measure until done, cancelled or out of time; an engine that fails ends the probe."""
        deadline = self.clock() + self.limits.total_seconds
        try:
            self.meter.warm_up()
            for shape in self.shapes:
                stop = self._probe(shape, deadline)
                if stop is not None:
                    return self._result(*stop)
        except InferenceError as error:
            return self._result(ProbeOutcome.ENGINE_FAILED, str(error))
        reason = f"{len(self._peaks)} of {len(self.shapes)} shapes were measured"
        if self._skipped:
            batch, tokens = self._skipped[0].shape
            reason += f"; {batch}x{tokens}: {self._skipped[0].reason}"
        return self._result(ProbeOutcome.COMPLETE, reason)

    def _probe(self, shape: Shape, deadline: float) -> tuple[ProbeOutcome, str] | None:
        """Measure or skip one shape; the result says that the probe is over."""
        if too_large := self._too_large(shape):
            self._skipped.append(SkippedShape(shape, too_large, is_for_memory=True))
            return None
        if too_long := self._too_long(shape):
            self._skipped.append(SkippedShape(shape, too_long))
            return None
        began, seconds, tries = self.clock(), self._seconds(shape), 0
        readings: list[ShapePeak] = []
        while not readings and self._is_patient(tries, began):
            if tries:
                self.pause(self.limits.retry_seconds)
            stop = self._must_stop(shape, seconds, deadline)
            if stop is not None:
                return stop
            started = self.clock()
            readings = self._readings(shape)
            seconds = self.clock() - started
            tries += 1
        self._is_busy = not readings
        if self._is_busy and seconds <= self.limits.alone_seconds:
            with self.meter.alone() as is_alone:
                readings = self._readings(shape) if is_alone else []
        if readings:
            self._peaks.append(max(readings, key=lambda reading: reading.peak_bytes))
        else:
            self._skipped.append(SkippedShape(shape, BUSY_REASON))
        return None

    def _is_patient(self, tries: int, began: float) -> bool:
        if self._is_busy:  # one try tells whether that has changed, and how long a pass takes
            return tries < 1
        return tries < LEAST_TRIES or self.clock() - began < self.limits.patience_seconds

    def _must_stop(
        self, shape: Shape, seconds: float, deadline: float
    ) -> tuple[ProbeOutcome, str] | None:
        """Why a pass that may take `seconds` must not begin any more."""
        batch, tokens = shape
        if self.cancelled():
            return ProbeOutcome.CANCELLED, f"cancelled by shutdown before {batch}x{tokens}"
        if self.clock() + seconds > deadline:
            return ProbeOutcome.TIMED_OUT, (
                f"{batch}x{tokens} would not end within the "
                f"{self.limits.total_seconds:.0f} s of the whole probe"
            )
        return None

    def _readings(self, shape: Shape) -> list[ShapePeak]:
        """One measurement, and more of them if they are cheap; none if other work ran."""
        limits, began = self.limits, self.clock()
        readings: list[ShapePeak] = []
        while len(readings) < limits.repeats:
            started = self.clock()
            peak_bytes = self.meter.peak_bytes(*shape)
            ended = self.clock()
            if peak_bytes is None:
                break
            readings.append(ShapePeak(*shape, peak_bytes, ended - started))
            if ended - began + readings[-1].seconds > limits.repeat_seconds:
                break
        return readings

    def _too_large(self, shape: Shape) -> str | None:
        """What memory a shape may lack; None if it has enough."""
        limits = self.limits
        need_bytes = self._need_bytes(shape)
        if need_bytes > limits.workspace_bytes:
            return (
                f"may need {_mib(need_bytes)} of workspace, "
                f"one pass may use {_mib(limits.workspace_bytes)}"
            )
        resident_bytes = self.meter.resident_bytes()
        if limits.memory_bytes is not None and resident_bytes + need_bytes > limits.memory_bytes:
            return (
                f"may need {_mib(need_bytes)} beside the {_mib(resident_bytes)} in use, "
                f"the limit is {_mib(limits.memory_bytes)}"
            )
        return None

    def _too_long(self, shape: Shape) -> str | None:
        seconds, most = self._seconds(shape), self.limits.shape_seconds
        if seconds <= most:
            return None
        return f"may take {seconds:.0f} s, one pass may take {most:.0f} s"

    def _need_bytes(self, shape: Shape) -> float:
        bounds = [peak.peak_bytes * growth(peak, shape) for peak in self._peaks if peak.peak_bytes]
        bound = min(bounds) * GROWTH_MARGIN if bounds else self.conservative.cost_bytes(*shape)
        return max(bound, max((peak.peak_bytes for peak in self._peaks), default=0))

    def _seconds(self, shape: Shape) -> float:
        return min((peak.seconds * growth(peak, shape) for peak in self._peaks), default=0.0)

    def _result(self, outcome: ProbeOutcome, reason: str) -> ProbeResult:
        return ProbeResult(tuple(self._peaks), tuple(self._skipped), outcome, reason)


def _mib(count_bytes: float) -> str:
    return f"{count_bytes / 2**20:.0f} MiB"
