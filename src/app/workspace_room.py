"""Workspace for texts: whether there is any at all, and what running chunks leave at present."""

import math
from collections.abc import Iterable, Sequence

import attrs

from ..domain.budget import require_fits
from ..domain.cost_model import CostModel
from ..domain.errors import NotReadyError, RequestTooLargeError
from .jobs import Task
from .service import ProbeStatus, Tuning
from .worker import Worker

PROBE_RETRY_SECONDS = 10.0
"""A text that is too long for conservative figures may fit once the probe has ended."""


def require_room(
    lengths: Sequence[int], tuning: Tuning, inputs: Sequence[int] | None = None
) -> None:
    """Refuse texts that do not fit even while nothing else runs; a GPU's memory nobody knows.

    `inputs`: where the client has the texts; their own places if left out.

    Raises:
        RequestTooLargeError: with what is needed, what there is, and what would fit.
        NotReadyError: the same, but the figures are conservative and soon to be replaced.
    """
    if tuning.total_workspace_bytes is None:
        return
    cost_model = CostModel(
        tuning.a_bytes_per_token,
        tuning.b_bytes_per_token_sq,
        tuning.total_workspace_bytes,
        tuning.fixed_bytes,
    )
    try:
        require_fits(lengths, cost_model, inputs)
    except RequestTooLargeError as error:
        if tuning.probe_status is not ProbeStatus.RUNNING:
            raise
        raise NotReadyError(
            f"{error}; the need is being measured and may prove smaller: try again then",
            retry_after_seconds=PROBE_RETRY_SECONDS,
        ) from error


@attrs.frozen
class Room:
    """Bytes beside what runs; infinite where nothing limits them, or nothing runs.

    `free_bytes`: at present.
    `later_bytes`: once all chunks have ended but those that may hang, for which nobody should wait.
    """

    free_bytes: float = math.inf
    later_bytes: float = math.inf

    def is_for(self, task: Task) -> bool:
        """Whether `task` may begin now."""
        return task.estimated_bytes <= self.free_bytes

    def is_to_come_for(self, task: Task) -> bool:
        """Whether `task` only has to wait for chunks that will end soon."""
        return self.free_bytes < task.estimated_bytes <= self.later_bytes


def room_beside(workers: Iterable[Worker], total_bytes: int | None, now: float) -> Room:
    """What `workers` leave of `total_bytes`; None is no limit, and an idle engine has none."""
    if total_bytes is None:
        return Room()
    running = [
        (worker.task.estimated_bytes, worker.is_suspect(now)) for worker in workers if worker.task
    ]
    return Room(
        _left(total_bytes, [held for held, _ in running]),
        _left(total_bytes, [held for held, is_suspect in running if is_suspect]),
    )


def _left(total_bytes: int, held: list[int]) -> float:
    return total_bytes - sum(held) if held else math.inf
