"""One file from a URL to a path: resumed, retried, verified before it takes its name."""

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but loaded lazily
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    tqdm,
)

from ...domain.errors import CorruptFileError
from .files import FileRecord, verify_file

logger = logging.getLogger(__name__)

TransportError: type[Exception] = HfHubHTTPError.__bases__[0]
"""`HTTPError` of httpx or of httpx2, whichever the installed huggingface-hub is built on."""

Result = TypeVar("Result")

RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)
_LOG_EVERY_SECONDS = 5.0
_TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}
_NOTHING_LEFT_STATUS = 416
_PARTIAL_CONTENT = 206


@attrs.frozen
class RemoteFile:
    """A file as the hub describes it.

    `hash`: sha256 of a large file, git's blob sha1 of a small one.
    `size_bytes`: None where the hub does not say.
    """

    name: str
    url: str
    hash: str
    size_bytes: int | None


def download(
    remote: RemoteFile,
    destination: Path,
    *,
    bar: bool = False,
    retry_pauses_seconds: Sequence[float] = RETRY_PAUSES_SECONDS,
) -> FileRecord:
    """Bring `remote` to `destination`, which holds either the verified file or what it held before.

    What an earlier attempt left in ``<destination>.incomplete`` is continued. A file that arrives
    damaged is fetched once more from its beginning.

    Raises:
        CorruptFileError: the file is truncated or its hash differs, twice.
        TransportError: the hub cannot be reached or refuses.
    """
    partial = destination.with_name(f"{destination.name}.incomplete")
    try:
        return _download_once(remote, partial, destination, bar, retry_pauses_seconds)
    except CorruptFileError as error:
        logger.warning("%s arrived damaged, fetching it once more: %s", remote.name, error)
        return _download_once(remote, partial, destination, bar, retry_pauses_seconds)


def _download_once(
    remote: RemoteFile,
    partial: Path,
    destination: Path,
    bar: bool,  # noqa: FBT001 (private: both callers are above)
    retry_pauses_seconds: Sequence[float],
) -> FileRecord:
    with _progress(remote, bar=bar) as report:
        retrying(
            lambda: _stream(remote, partial, report),
            retry_pauses_seconds,
            lambda: _size_bytes(partial),
        )
    try:
        record = _verified(partial, remote)
    except CorruptFileError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(destination)
    return record


def _verified(partial: Path, remote: RemoteFile) -> FileRecord:
    size_bytes = _size_bytes(partial)
    if remote.size_bytes is not None and size_bytes != remote.size_bytes:
        raise CorruptFileError(
            f"{remote.name} from {remote.url} is truncated: {size_bytes} of {remote.size_bytes} "
            "bytes arrived; it was not kept"
        )
    try:
        return verify_file(partial, expected_hash=remote.hash)
    except CorruptFileError as error:
        raise CorruptFileError(
            f"{remote.name} from {remote.url} is corrupt: its hash is not {remote.hash}; it was "
            "not kept"
        ) from error


def _stream(remote: RemoteFile, partial: Path, report: Callable[[int], None]) -> None:
    """Append to `partial` what is missing of it."""
    start = _size_bytes(partial)
    if start == remote.size_bytes:
        return
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream(
        "GET", remote.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        if response.status_code == _NOTHING_LEFT_STATUS:
            return  # the caller sees by size or hash that this is not the file
        hf_raise_for_status(response)
        resumed = response.status_code == _PARTIAL_CONTENT
        done = start if resumed else 0
        with partial.open("ab" if resumed else "wb") as file:
            for block in response.iter_bytes():
                file.write(block)
                done += len(block)
                report(done)


def retrying(
    step: Callable[[], Result],
    pauses_seconds: Sequence[float],
    advance: Callable[[], int] = lambda: 0,
) -> Result:
    """Call `step` until it succeeds; after the last pause its error goes to the caller.

    An answer or a fault that the next attempt would meet again is not tried again: most refusals,
    a name that does not exist, a certificate that is not trusted.
    Whenever `advance` has grown since the last failure, the pauses begin anew.
    """
    pauses = iter(pauses_seconds)
    reached = advance()
    while True:
        try:
            return step()
        except TransportError as error:
            if advance() > reached:
                pauses = iter(pauses_seconds)
            reached = advance()
            pause_seconds = next(pauses, None)
            if pause_seconds is None or not _is_transient(error):
                raise
            logger.warning("%s; trying again in %g s", _shown(error), pause_seconds)
            time.sleep(pause_seconds)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT_STATUSES
    return not any(
        isinstance(cause, ssl.SSLCertVerificationError)
        or (isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME)
        for cause in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


@contextlib.contextmanager
def _progress(remote: RemoteFile, *, bar: bool) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the bytes that are there so far."""
    if bar:
        with tqdm(desc=remote.name, total=remote.size_bytes, unit="B", unit_scale=True) as line:  # type: ignore[no-untyped-call]  # the hub's bar has no types
            yield lambda done: line.update(done - line.n)
        return
    logged = time.monotonic()

    def report(done: int) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _LOG_EVERY_SECONDS:
            logged = time.monotonic()
            _log(remote, done)

    _log(remote, 0)
    yield report
    _log(remote, remote.size_bytes or 0)


def _log(remote: RemoteFile, done: int) -> None:
    total = remote.size_bytes
    percent = f"{100 * done // total} %" if total else "size unknown"
    logger.info("downloading %s: %s of %.1f MB", remote.name, percent, (total or 0) / 1e6)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
