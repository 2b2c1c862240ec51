"""BGE-M3 from the Hugging Face hub, at pinned revisions, into the hub's own cache layout.

huggingface-hub says where files are and carries the requests, so HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE and proxies mean what they mean everywhere. The download itself is done here, because
that library no longer continues a file after a restart, and takes a file as it comes.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import attrs
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from ...domain.errors import CorruptFileError, DownloadError
from .download import RETRY_PAUSES_SECONDS, RemoteFile, TransportError, download, retrying
from .files import (
    COLBERT_HEAD,
    MODEL_ID,
    SPARSE_HEAD,
    TOKENIZER,
    FileRecord,
    ModelFiles,
    read_record,
    verify_file,
    write_record,
)
from .published import HEADS, VARIANTS, Source
from .stores import HASH, CacheStore, DirectoryStore, make_writable

logger = logging.getLogger(__name__)

_REFUSED_STATUSES = {401, 403}


def fetch_model(  # noqa: PLR0913 (what may be chosen, all but two with a default)
    variant: str,
    cache_dir: Path,
    *,
    progress: bool = False,
    repair: bool = False,
    directory: Path | None = None,
    retry_pauses_seconds: Sequence[float] = RETRY_PAUSES_SECONDS,
) -> ModelFiles:
    """Find a variant's files in the cache, download what is missing, and verify all of them.

    Nothing is asked of the network when every file is there. `progress` draws bars, for a
    terminal; otherwise progress is logged. With `repair` a corrupt file is downloaded again
    instead of refused. With `directory` the files go there, not into `cache_dir`, with the record
    that `local_model` checks them against.

    Raises:
        CacheDirectoryError: the directory cannot be created or written; the network was not used.
        DownloadError: the hub did not deliver a file.
        CorruptFileError: a file is truncated or its hash differs.
    """
    wanted = VARIANTS[variant]
    roots: list[Path] = []
    for source in (wanted.source, HEADS):
        store = (
            DirectoryStore(directory) if directory is not None else CacheStore(cache_dir, source)
        )
        roots.append(store.root)
        if repair or not all(_is_file(store.root / name) for name in source.names):
            make_writable(directory or cache_dir)
        _obtain_all(source, store, _Manner(progress, repair, tuple(retry_pauses_seconds)))
    model_root, heads_root = roots
    return ModelFiles(
        model_id=MODEL_ID,
        graph_path=model_root / wanted.graph,
        tokenizer_path=model_root / TOKENIZER,
        sparse_path=heads_root / SPARSE_HEAD,
        colbert_path=heads_root / COLBERT_HEAD,
        precision=wanted.precision,
        is_published=True,
    )


@attrs.frozen
class _Manner:
    progress: bool
    repair: bool
    retry_pauses_seconds: tuple[float, ...]


_Store = CacheStore | DirectoryStore


def _obtain_all(source: Source, store: _Store, manner: _Manner) -> None:
    records = read_record(store.root)
    for name in source.names:
        known = records.get(name)
        if known is not None and known.source not in {"", str(source)}:
            known = None  # it tells of another revision's file
        record = _obtain(name, source, store, known, manner)
        if records.get(name) != record:
            records[name] = record
            write_record(store.root, records)


def _obtain(
    name: str, source: Source, store: _Store, known: FileRecord | None, manner: _Manner
) -> FileRecord:
    """Make sure that one file is there and whole."""
    path = store.root / name
    if _is_file(path) and (known is not None or isinstance(store, CacheStore)):
        if known is not None and manner.repair:
            known = attrs.evolve(known, mtime_ns=0)  # who asks for repair wants every byte read
        try:
            return verify_file(path, known, store.expected_hash(name))
        except CorruptFileError as error:
            if not manner.repair:
                raise
            logger.warning("fetching %s again: %s", name, error)
    try:
        remote = _locate(name, source, manner)
        with store.destination(remote) as destination:
            record = _whole(destination, remote) or download(
                remote,
                destination,
                bar=manner.progress,
                retry_pauses_seconds=manner.retry_pauses_seconds,
            )
    except OfflineModeIsEnabled as error:
        raise _failed(
            name, source, f"it is not in {store.root} and HF_HUB_OFFLINE forbids the network"
        ) from error
    except (TransportError, OSError) as error:
        raise _failed(name, source, _reason(error)) from error
    return attrs.evolve(record, source=str(source))


def _locate(name: str, source: Source, manner: _Manner) -> RemoteFile:
    if not _is_address(constants.ENDPOINT):
        raise _failed(name, source, "HF_ENDPOINT is no http:// or https:// address")
    url = hf_hub_url(source.repository, name, revision=source.revision)
    metadata = retrying(lambda: get_hf_file_metadata(url), manner.retry_pauses_seconds)
    if metadata.etag is None or not HASH.fullmatch(metadata.etag):
        raise _failed(
            name, source, f"the endpoint gave no hash to verify the file by (ETag {metadata.etag})"
        )
    return RemoteFile(name=name, url=url, hash=metadata.etag, size_bytes=metadata.size)


def _whole(path: Path, remote: RemoteFile) -> FileRecord | None:
    """The record of `path` if it already is `remote`."""
    if not path.is_file():
        return None
    try:
        return verify_file(path, expected_hash=remote.hash)
    except CorruptFileError:
        return None


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and " " not in parts.netloc


def _failed(name: str, source: Source, reason: str) -> DownloadError:
    return DownloadError(
        f"cannot download {name} of {source} from {constants.ENDPOINT}: {reason}. Ways out: set "
        "HF_ENDPOINT to a mirror that can be reached; run `bge-m3-server fetch` where there is a "
        "network and copy the cache; or `bge-m3-server fetch --dir DIR` there, and set "
        "BGE_M3_MODEL_DIR to the copied directory"
    )


def _reason(error: Exception) -> str:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSED_STATUSES:
        return f"{reason} (is HF_TOKEN needed, and valid?)"
    return reason


def _is_file(path: Path) -> bool:
    """Whether `path` is a file that can be asked about at all."""
    try:
        return path.is_file()
    except OSError:
        return False
