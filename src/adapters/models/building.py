"""A directory that appears when it is whole: filled under another name, then moved."""

import contextlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_BUILDING = ".building-"
_LOCKED_SECONDS = 10
"""Within them whoever builds has locked the directory that it made."""


@contextlib.contextmanager
def building_beside(target: Path) -> Iterator[Path]:
    """A new directory to fill, beside `target`; unless it is moved it is removed at the end.

    What builds that were killed have left there is removed, too.

    Raises:
        OSError: there cannot be a directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    building = _new_name(target)
    building.mkdir()
    lock = _lock(building)
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def move_to(target: Path, building: Path, is_there: Callable[[], bool]) -> None:
    """Move `building` to `target`, unless another process was first: then its files stay.

    `is_there`: whether what lies at `target` serves as well; if not, it is replaced.

    Raises:
        OSError: it cannot be moved.
    """
    with _one_at_a_time(target.parent):  # else one could replace what another has just moved
        if is_there():
            return
        with contextlib.suppress(FileNotFoundError):
            replaced = _new_name(target)
            target.rename(replaced)
            shutil.rmtree(replaced, ignore_errors=True)
        try:
            building.rename(target)
        except OSError:
            if not is_there():
                raise


def clear(directory: Path) -> None:
    """Remove the files of `directory`."""
    for path in directory.iterdir():
        path.unlink()


def _new_name(target: Path) -> Path:
    return target.with_name(f"{_BUILDING}{uuid.uuid4().hex}")


def _sweep(directory: Path) -> None:
    """Remove what builds that were killed have left behind; those at work hold a lock."""
    for leftover in directory.glob(f"{_BUILDING}*"):
        with contextlib.suppress(FileNotFoundError):  # another build ends just now
            is_old = time.time() - leftover.stat().st_mtime > _LOCKED_SECONDS
            lock = _lock(leftover) if is_old else None
            if lock is not None:
                shutil.rmtree(leftover, ignore_errors=True)
                os.close(lock)


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Wait until nobody else is in here with `directory`, where that can be locked."""
    if sys.platform == "win32":  # nothing locks directories
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(directory: Path) -> int | None:
    """A descriptor that locks `directory` until it is closed or the process ends; None if taken."""
    if sys.platform == "win32":  # nothing locks directories
        return None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # taken, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor
