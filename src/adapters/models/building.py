"""A directory that appears when it is whole: filled under another name, then moved."""

import contextlib
import errno
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_CANNOT_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EROFS}
"""What file systems say that have no way to do so."""

_BUILDING = ".building-"
_LOCKED_SECONDS = 10
"""Within them whoever builds has locked the directory that it made."""


@contextlib.contextmanager
def building_beside(target: Path) -> Iterator[Path]:
    """A new directory to fill, beside `target`; unless it is moved it is removed at the end.

    Raises:
        OSError: there cannot be a directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
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

    What was written is on the disk before it has that name: a loss of power leaves all or nothing.

    `is_there`: whether what lies at `target` serves as well; if not, it is replaced.

    Raises:
        OSError: it cannot be moved.
    """
    for path in (*building.iterdir(), building):
        _flush(path)
    with _one_at_a_time(target.parent):  # else one could replace what another has just moved
        if is_there():
            return
        with contextlib.suppress(FileNotFoundError):
            replaced = _new_name(target)
            target.rename(replaced)
            _remove(replaced)
        try:
            building.rename(target)
        except OSError:
            if not is_there():
                raise
        _flush(target.parent)


def clear(directory: Path) -> None:
    """Remove the files of `directory`."""
    for path in directory.iterdir():
        path.unlink()


def _new_name(target: Path) -> Path:
    return target.with_name(f"{_BUILDING}{uuid.uuid4().hex}")


def sweep(directory: Path) -> None:
    """Remove what builds that were killed have left behind; those at work hold a lock."""
    for leftover in directory.glob(f"{_BUILDING}*"):
        with contextlib.suppress(FileNotFoundError):  # another build ends just now
            if leftover.is_symlink() or not leftover.is_dir():
                _remove(leftover)
                continue
            is_old = time.time() - leftover.stat().st_mtime > _LOCKED_SECONDS
            lock = _lock(leftover) if is_old else None
            if lock is not None:
                _remove(leftover)
                os.close(lock)


def _remove(path: Path) -> None:
    """A directory with all that is in it, a file or a link, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if sys.platform == "win32":  # directories cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            raise
    finally:
        os.close(descriptor)


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
