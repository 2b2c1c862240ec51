"""A model on its way back, loaded in a thread of its own."""

import logging
import threading
from collections.abc import Callable

from ..domain.ports import Clock
from .loading import LoadedModel

logger = logging.getLogger(__name__)

RELOAD_LIMIT = 3
"""So many vain tries in a row end it; what keeps a file or a device for a moment does not."""


class Reload:
    """Tries to load a model, with pauses between; only `stop` blocks.

    `pause_seconds`: before the second try; before the third, twice as long.
    `on_end`: called in the loading thread when `has_ended`.
    """

    def __init__(
        self,
        load_model: Callable[[], LoadedModel],
        pause_seconds: float,
        clock: Clock,
        on_end: Callable[[], None],
    ) -> None:
        self._load_model = load_model
        self._pause_seconds = pause_seconds
        self._clock = clock
        self._on_end = on_end
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)
        self.started_at = clock()
        self.model: LoadedModel | None = None
        self.load_seconds = 0.0
        self.failed_tries = 0
        self.has_ended = False

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def stop(self) -> None:
        """Try no more, and wait for the end of a try that is under way."""
        self._stopping.set()
        self._thread.join()

    def delay(self, usual_seconds: float) -> str | None:
        """Why the model is not there yet; None as long as all goes as usual."""
        if self.failed_tries:
            return (
                "the model is being loaded again: "
                f"{self.failed_tries} of {RELOAD_LIMIT} tries have failed"
            )
        seconds = self._clock() - self.started_at
        if seconds < usual_seconds:
            return None
        return f"the model is being loaded again, for {seconds:.0f} s so far"

    def _run(self) -> None:
        for attempt in range(RELOAD_LIMIT):
            if self._stopping.wait(attempt * self._pause_seconds):
                break
            started = self._clock()
            try:
                self.model = self._load_model()
            except BaseException:  # a thread that ended silently would be waited for
                logger.exception("the model could not be loaded again")
                self.failed_tries += 1
                continue
            self.load_seconds = self._clock() - started
            break
        self.has_ended = True
        self._on_end()
