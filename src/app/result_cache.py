"""Texts that were embedded before are not embedded again."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import attrs
from numpy.typing import NDArray

from ..domain.errors import InferenceError
from ..domain.statistics import LengthStats
from ..domain.types import Embedding, Heads
from .service import (
    CacheStatus,
    CanaryReport,
    EmbeddingService,
    JobReport,
    JobResult,
    ServiceStatus,
)

_Key = tuple[str, int, bytes]
"""Model, heads, and a hash of the text that no two texts share in practice."""

_ENTRY_BYTES = 600
"""Key, objects and array headers of one entry."""


class CachedService:
    """An `EmbeddingService` in front of another one; belongs to one event loop.

    What was used longest ago goes first when `limit_bytes` are full.
    """

    def __init__(self, service: EmbeddingService, limit_bytes: int) -> None:
        self._service = service
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._hits = 0
        self._misses = 0
        self._entries: OrderedDict[_Key, Embedding] = OrderedDict()

    async def embed(
        self, texts: Sequence[str], heads: Heads, *, timeout_seconds: float | None = None
    ) -> JobResult:
        """As the service behind; only texts that are not in the cache reach it.

        Raises:
            UnavailableError, InvalidInputError, InferenceError: as the service behind.
        """
        model = self._service.status().model
        if model is None:
            return await self._service.embed(texts, heads, timeout_seconds=timeout_seconds)
        keys = [_key(model.model_id, heads, text) for text in texts]
        found = {i: entry for i, key in enumerate(keys) if (entry := self._find(key))}
        missing = [index for index in range(len(texts)) if index not in found]
        self._hits += len(found)
        self._misses += len(missing)
        report = JobReport(0, 0, LengthStats(), 0.0, 0.0, 0.0)
        if missing:
            try:
                result = await self._service.embed(
                    [texts[index] for index in missing], heads, timeout_seconds=timeout_seconds
                )
            except InferenceError as error:
                if error.index is None:
                    raise
                # The service behind counts only the texts that it was given.
                raise type(error)(str(error), index=missing[error.index]) from error
            report = result.report
            for index, embedding in zip(missing, result.embeddings, strict=True):
                found[index] = embedding
                self._keep(keys[index], embedding)
        embeddings = [found[index] for index in range(len(texts))]
        lengths = LengthStats.of([embedding.token_count for embedding in embeddings])
        return JobResult(embeddings, attrs.evolve(report, lengths=lengths))

    async def canary(self) -> CanaryReport:
        """As the service behind: a canary that is not computed would tell nothing.

        Raises:
            UnavailableError: as the service behind.
        """
        return await self._service.canary()

    def status(self) -> ServiceStatus:
        """That of the service behind, with the cache's figures."""
        cache = CacheStatus(self._hits, self._misses, self._held_bytes, self._limit_bytes)
        return attrs.evolve(self._service.status(), cache=cache)

    def _find(self, key: _Key) -> Embedding | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def _keep(self, key: _Key, embedding: Embedding) -> None:
        embedding = _alone(embedding)
        self._drop(key)
        self._entries[key] = embedding
        self._held_bytes += _size_bytes(embedding)
        while self._held_bytes > self._limit_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: _Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._held_bytes -= _size_bytes(entry)


def _key(model_id: str, heads: Heads, text: str) -> _Key:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
    return model_id, heads.value, digest


def _alone(embedding: Embedding) -> Embedding:
    """Without the arrays of the whole chunk that its own may be views of."""
    dense, sparse, colbert = embedding.dense, embedding.sparse, embedding.colbert
    return attrs.evolve(
        embedding,
        dense=None if dense is None else dense.copy(),
        sparse=None
        if sparse is None
        else attrs.evolve(sparse, indices=sparse.indices.copy(), values=sparse.values.copy()),
        colbert=None if colbert is None else colbert.copy(),
    )


def _size_bytes(embedding: Embedding) -> int:
    arrays: list[NDArray[Any] | None] = [embedding.dense, embedding.colbert]
    if embedding.sparse is not None:
        arrays += [embedding.sparse.indices, embedding.sparse.values]
    return _ENTRY_BYTES + sum(array.nbytes for array in arrays if array is not None)
