"""An `EmbeddingService` without an engine: its results, states and failures are given to it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from bge_m3_server.app.service import (
    CanaryReport,
    JobReport,
    JobResult,
    ModelInfo,
    ProbeStatus,
    ServiceStatus,
    Tuning,
)
from bge_m3_server.domain.statistics import LengthStats
from bge_m3_server.domain.types import Embedding, Heads, SparseVector

MODEL = ModelInfo(
    model_id="bge-m3", heads=Heads.DENSE | Heads.SPARSE, dimensions=3, max_tokens=8192
)
TUNING = Tuning(
    a_bytes_per_token=16384.0,
    b_bytes_per_token_sq=8.0,
    max_workspace_bytes=2147483648,
    probe_status=ProbeStatus.DISABLED,
    memory_source="cgroup_v2",
)

HEALTHY = CanaryReport(is_healthy=True, elapsed_ms=1.5)

LOADING = ServiceStatus(ready=False, live_workers=0, loaded_workers=0, total_workers=2)
OK = ServiceStatus(
    ready=True, live_workers=2, loaded_workers=2, total_workers=2, model=MODEL, tuning=TUNING
)
WARN = attrs.evolve(OK, live_workers=1, loaded_workers=1)
IDLE = attrs.evolve(OK, loaded_workers=0)
FAIL = attrs.evolve(OK, live_workers=0, loaded_workers=0)


def embedding(
    dense: Sequence[float] = (0.1, 0.2, 0.3),
    sparse: dict[int, float] | None = None,
    tokens: int = 4,
    *,
    truncated: bool = False,
) -> Embedding:
    """One text's result with both heads; the default sparse result is ``{42: 0.5}``."""
    weights = {42: 0.5} if sparse is None else sparse
    return Embedding(
        token_count=tokens,
        truncated=truncated,
        dense=np.array(dense, dtype=np.float32),
        sparse=SparseVector(
            indices=np.array(list(weights), dtype=np.int64),
            values=np.array(list(weights.values()), dtype=np.float32),
        ),
    )


@attrs.define
class FakeService:
    """`result` scripts the embedding of a text at a place; `failure` is raised instead of it.

    `calls` records what reached the engine, `inputs` where clients have the texts of held requests.
    With `stuck`, a call sets `entered` and never ends by
    itself; `abandoned` is set when it is cancelled.
    """

    state: ServiceStatus = OK
    result: Callable[[int, str], Embedding] = lambda _index, _text: embedding()
    failure: Exception | None = None
    stuck: bool = False
    canary_report: CanaryReport = HEALTHY
    timeouts: list[float | None] = attrs.field(factory=list)
    calls: list[tuple[list[str], Heads]] = attrs.field(factory=list)
    inputs: list[list[int]] = attrs.field(factory=list)
    entered: threading.Event = attrs.field(factory=threading.Event)
    abandoned: threading.Event = attrs.field(factory=threading.Event)

    def reset(self) -> None:
        """Forget every script and record."""
        self.__init__()

    async def canary(self) -> CanaryReport:
        if self.failure is not None:
            raise self.failure
        return self.canary_report

    async def embed(
        self, texts: Sequence[str], heads: Heads, *, timeout_seconds: float | None = None
    ) -> JobResult:
        self.calls.append((list(texts), heads))
        self.timeouts.append(timeout_seconds)
        self.entered.set()
        if self.stuck:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.abandoned.set()
                raise
        if self.failure is not None:
            raise self.failure
        results = [_only(heads, self.result(index, text)) for index, text in enumerate(texts)]
        lengths = LengthStats.of([result.token_count for result in results])
        return JobResult(
            results,
            JobReport(
                chunks=1,
                max_chunk_tokens=lengths.maximum,
                lengths=lengths,
                tokenize_ms=1.5,
                queue_wait_ms=0.25,
                inference_ms=20.0,
            ),
        )

    def hold(self, _texts: Sequence[str], _heads: Heads) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def embed_held(
        self,
        texts: Sequence[str],
        heads: Heads,
        *,
        inputs: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> JobResult:
        self.inputs.append(list(inputs or range(len(texts))))
        return await self.embed(texts, heads, timeout_seconds=timeout_seconds)

    def status(self) -> ServiceStatus:
        return self.state


def _only(heads: Heads, result: Embedding) -> Embedding:
    return attrs.evolve(
        result,
        dense=result.dense if Heads.DENSE in heads else None,
        sparse=result.sparse if Heads.SPARSE in heads else None,
    )
