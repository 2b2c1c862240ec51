"""Liveness and readiness, from a snapshot: the engine is never asked to do anything."""

from typing import Any

import attrs
from litestar import Response, get
from litestar.di import NamedDependency
from msgspec import UNSET

from ..service import ServiceStatus, Tuning
from .docs import HEALTH_EXAMPLE, NOT_READY, documented
from .embedding_door import EmbeddingDoor
from .schemas import HealthReport, LiveReport, ModelHealth, TuningReport, WorkerCounts


@get(
    "/live",
    summary="Liveness",
    description="200 as long as the process answers.",
    tags=["operations"],
    sync_to_thread=False,
)
def live() -> LiveReport:
    """The process answers."""
    return LiveReport()


@get(
    "/health",
    summary="Readiness",
    description=(
        "`loading` (503), `fail` (503: no worker is alive, or `reason`), `idle` (200: the next "
        "request loads the model again), `warn` (200: some workers are gone) or `ok` (200)."
    ),
    tags=["operations"],
    responses=NOT_READY,
    operation_class=documented(answer=HEALTH_EXAMPLE),
    sync_to_thread=False,
)
def health(door: NamedDependency[EmbeddingDoor]) -> Response[HealthReport]:
    """The first of the five states that holds."""
    report = health_report(door.service.status())
    is_down = report.status in {"loading", "fail"}
    return Response(report, status_code=503 if is_down else 200)


def health_report(status: ServiceStatus) -> HealthReport:
    """State and figures of a snapshot."""
    if not status.ready:
        return HealthReport(status="loading")
    workers = WorkerCounts(status.live_workers, status.total_workers)
    if status.live_workers == 0:
        return HealthReport(status="fail", workers=workers)
    if status.failure is not None:
        return HealthReport(status="fail", workers=workers, reason=status.failure)
    if status.loaded_workers == 0:
        return HealthReport(status="idle", workers=workers)
    model = status.model
    return HealthReport(
        status="warn" if status.live_workers < status.total_workers else "ok",
        workers=workers,
        max_seq_length=UNSET if model is None else model.max_tokens,
        model=UNSET
        if model is None
        else ModelHealth(
            id=model.model_id, dimensions=model.dimensions, notice=model.notice or UNSET
        ),
        tuning=_tuning(status.tuning),
    )


def _tuning(tuning: Tuning | None) -> TuningReport:
    if tuning is None:
        return TuningReport()
    figures: dict[str, Any] = attrs.asdict(tuning)
    return TuningReport(**figures | {"probe_status": tuning.probe_status.value})
