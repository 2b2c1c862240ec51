"""Workspace that running chunks leave to the next one."""

import math
from collections.abc import Iterable

import attrs

from .jobs import Task
from .worker import Worker


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
