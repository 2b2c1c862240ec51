"""A line in the log at regular times: what the engine did since the last one, and how it is."""

import logging
from collections.abc import Callable, Mapping

from ..domain.ports import Clock
from .loading import ProcessMemory
from .pace import Passed
from .service import Tuning
from .worker import PoolStatus

logger = logging.getLogger(__name__)


class Heartbeat:
    """Belongs to one thread, but for `report`; an interval of 0 seconds is none."""

    def __init__(self, interval_seconds: float, clock: Clock, memory: ProcessMemory) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._memory = memory
        self._beat_at = clock()
        self._passed = Passed()
        self._more_figures: list[Callable[[], Mapping[str, int]]] = []

    def report(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Log these figures with every heartbeat, too."""
        self._more_figures.append(figures)

    def start(self) -> None:
        """The interval begins now."""
        self._beat_at = self._clock()

    def beat(self, status: PoolStatus, tuning: Tuning | None, *, is_loaded: bool) -> None:
        """Log if it is time."""
        now = self._clock()
        if not self._interval_seconds or now - self._beat_at < self._interval_seconds:
            return
        self._beat_at = now
        before, self._passed = self._passed, status.passed
        positions = self._passed.positions - before.positions
        tokens = self._passed.tokens - before.tokens
        resident = self._memory.resident_bytes()
        fields = {
            "rss_mb": None if resident is None else resident // 1024**2,
            "live_workers": status.live_workers,
            "loaded_workers": status.live_workers if is_loaded else 0,
            "busy_workers": status.busy_workers,
            "suspect_workers": status.suspect_workers,
            "replaced_workers": status.replaced_workers,
            "queue_depth": status.waiting_texts,
            "queue_tokens": status.waiting_tokens,
            "available_permits": status.live_workers - status.busy_workers,
            "probe_status": tuning.probe_status.value if tuning else None,
            "chunks": self._passed.chunks - before.chunks,
            "chunk_texts": self._passed.texts - before.texts,
            "chunk_tokens": tokens,
            "padding_pct": round(100 * (1 - tokens / positions), 1) if positions else 0.0,
            "busy_seconds": round(self._passed.seconds - before.seconds, 3),
        }
        for figures in self._more_figures:
            fields |= figures()
        logger.info("heartbeat", extra={"fields": fields})
