"""Where fetched files go: huggingface-hub's cache layout, or a plain directory."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but loaded lazily
    WeakFileLock,
)

from ...domain.errors import CacheDirectoryError
from .download import RemoteFile
from .published import Source

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""git's blob sha1, or a sha256."""


@attrs.frozen
class CacheStore:
    """huggingface-hub's layout: ``blobs/<hash>``, and links to them in ``snapshots/<revision>``."""

    cache_dir: Path
    source: Source

    @property
    def root(self) -> Path:
        """Where the files lie under their own names."""
        return self._folder / "snapshots" / self.source.revision

    @property
    def _folder(self) -> Path:
        return self.cache_dir / self.source.cache_folder

    def expected_hash(self, name: str) -> str | None:
        """A blob is named by its hash; where links are impossible the cache cannot tell."""
        blob = (self.root / name).resolve().name
        return blob if HASH.fullmatch(blob) else None

    @contextlib.contextmanager
    def destination(self, remote: RemoteFile) -> Iterator[Path]:
        """Where to put the file; it is linked into the snapshot afterwards."""
        lock = self.cache_dir / ".locks" / self.source.cache_folder / f"{remote.hash}.lock"
        blob = self._folder / "blobs" / remote.hash
        path = self.root / remote.name
        for needed in (lock.parent, blob.parent, path.parent):
            needed.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            yield blob
            if path.resolve() != blob.resolve():
                path.unlink(missing_ok=True)
                try:
                    path.symlink_to(f"{'../' * len(Path(remote.name).parents)}../blobs/{blob.name}")
                except OSError:  # a file system without links
                    blob.replace(path)


@attrs.frozen
class DirectoryStore:
    """A plain directory with the names of the repository."""

    root: Path

    def expected_hash(self, name: str) -> str | None:
        """Only the record and the hub can tell."""
        del name
        return None

    @contextlib.contextmanager
    def destination(self, remote: RemoteFile) -> Iterator[Path]:
        """Where to put the file: its final place."""
        path = self.root / remote.name
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path


def make_writable(directory: Path) -> None:
    """Create `directory` and write into it once.

    Raises:
        CacheDirectoryError: that failed.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CacheDirectoryError(
            f"Cannot create or access model cache directory {directory}: "
            f"{error.strerror or error}; set BGE_M3_CACHE_DIR, or --dir of fetch, to a directory "
            "that can be written"
        ) from error
