"""Texts that were embedded before, or are being embedded, are not embedded again."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
from numpy.typing import NDArray

from ..domain.errors import InferenceError
from ..domain.statistics import LengthStats
from ..domain.types import Embedding, Heads
from .deadline import within
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


class HoldingService(EmbeddingService, Protocol):
    """An `EmbeddingService` that counts a request also while others compute its texts."""

    def hold(self, texts: Sequence[str], heads: Heads) -> AbstractContextManager[None]:
        """Count the bytes of a request while it is under way.

        Raises:
            UnavailableError, InvalidInputError: as `embed`.
        """
        ...

    async def embed_held(
        self,
        texts: Sequence[str],
        heads: Heads,
        *,
        inputs: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> JobResult:
        """Embed some texts of a request that `hold` counts; the client has them at `inputs`.

        Raises:
            UnavailableError, InvalidInputError, InferenceError: as `embed`.
        """
        ...


class CachedService:
    """An `EmbeddingService` in front of another one; belongs to one event loop.

    What was used longest ago goes first when `limit_bytes` are full. A text that another request
    is waiting for is not computed again: both wait for the same result, and where the one that has
    it computed leaves, one other takes over. `request_timeout_seconds` is the deadline of requests
    that bring none.
    """

    def __init__(
        self,
        service: HoldingService,
        limit_bytes: int,
        request_timeout_seconds: float | None = None,
    ) -> None:
        self._service = service
        self._limit_bytes = limit_bytes
        self._request_timeout_seconds = request_timeout_seconds
        self._held_bytes = 0
        self._hits = 0
        self._misses = 0
        self._entries: OrderedDict[_Key, Embedding] = OrderedDict()
        self._pending: dict[_Key, asyncio.Future[Embedding]] = {}

    async def embed(
        self, texts: Sequence[str], heads: Heads, *, timeout_seconds: float | None = None
    ) -> JobResult:
        """As the service behind; only texts that are neither kept nor under way reach it.

        Raises:
            UnavailableError, InvalidInputError, InferenceError: as the service behind.
        """
        timeout = timeout_seconds or self._request_timeout_seconds
        model = self._service.status().model
        if model is None:
            return await self._service.embed(texts, heads, timeout_seconds=timeout)
        with self._service.hold(texts, heads):
            keys = [_key(model.model_id, heads, text) for text in texts]
            request = _Request(texts, heads, timeout, keys)
            async with within(timeout):
                report = await self._answer(request)
        embeddings = [request.found[index] for index in range(len(texts))]
        lengths = LengthStats.of([embedding.token_count for embedding in embeddings])
        return JobResult(embeddings, attrs.evolve(report, lengths=lengths))

    async def _answer(self, request: "_Request") -> JobReport:
        """Find, compute or wait for every text."""
        report = JobReport(0, 0, LengthStats(), 0.0, 0.0, 0.0)
        computed = 0
        open_indices: Sequence[int] = range(len(request.keys))
        while open_indices:
            missing, shared = self._claim(request, open_indices)
            if missing:
                report = await self._compute(request, missing)
                computed += len(missing)
            if shared:  # whoever leaves here does not end it for others
                await asyncio.wait(set(shared.values()), return_when=asyncio.FIRST_COMPLETED)
            open_indices = [
                index for index, result in shared.items() if not request.take(index, result)
            ]
        self._hits += len(request.keys) - computed
        return report

    def _claim(
        self, request: "_Request", indices: Sequence[int]
    ) -> tuple[list[int], dict[int, asyncio.Future[Embedding]]]:
        """Which texts this request has to compute, and the results of others to wait for.

        From now on others wait for this request: nothing may come between this and `_compute`.
        """
        missing: list[int] = []
        shared: dict[int, asyncio.Future[Embedding]] = {}
        for index in indices:
            key = request.keys[index]
            if (entry := self._find(key)) is not None:
                request.found[index] = entry
            elif key in self._pending:
                shared[index] = self._pending[key]
            else:
                missing.append(index)
                self._pending[key] = asyncio.get_running_loop().create_future()
        return missing, shared

    async def _compute(self, request: "_Request", indices: Sequence[int]) -> JobReport:
        """Embed claimed texts, keep them, and tell those who wait for them."""
        self._misses += len(indices)
        try:
            result = await self._service.embed_held(
                [request.texts[index] for index in indices],
                request.heads,
                inputs=indices,
                timeout_seconds=request.timeout_seconds,
            )
            for index, embedding in zip(indices, result.embeddings, strict=True):
                request.found[index] = embedding
                self._keep(request.keys[index], embedding)
                self._pending[request.keys[index]].set_result(embedding)
        except InferenceError as error:
            if error.index is not None:
                guilty = self._pending[request.keys[error.index]]
                guilty.set_exception(error)
                guilty.exception()  # it is no news where nobody else waits
            raise
        finally:
            for index in indices:  # what has no result by now is for one of those who wait
                self._pending.pop(request.keys[index]).cancel()
        return result.report

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

    def figures(self) -> Mapping[str, int]:
        """For the heartbeat: totals since the start."""
        return {
            "cache_hits": self._hits,
            "cache_misses": self._misses,
            "cache_bytes": self._held_bytes,
        }

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


@attrs.frozen
class _Request:
    texts: Sequence[str]
    heads: Heads
    timeout_seconds: float | None
    keys: Sequence[_Key]
    found: dict[int, Embedding] = attrs.field(factory=dict)

    def take(self, index: int, result: asyncio.Future[Embedding]) -> bool:
        """Whether another request's result is there for text `index`.

        Raises:
            InferenceError: the engine fails on this text.
        """
        if not result.done() or result.cancelled():
            return False
        try:
            self.found[index] = result.result()
        except InferenceError as error:
            message = f"input[{index}]: the engine failed on it for another request"
            raise type(error)(message, index=index) from error
        return True


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
