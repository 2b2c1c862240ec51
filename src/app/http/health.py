"""Liveness, readiness and health from a snapshot, and deep health from real work.

Only the last one asks the engine to do anything.
"""

from typing import Any, Literal, TypeVar

import attrs
from litestar import Response, get
from litestar.di import NamedDependency
from msgspec import UNSET, structs

from ...domain.errors import UnavailableError
from ..service import ServiceStatus, Tuning
from .docs import (
    DEEP_HEALTH_EXAMPLE,
    DEEPLY_UNHEALTHY,
    HEALTH_EXAMPLE,
    NOT_READY,
    READY_EXAMPLE,
    UNHEALTHY,
    documented,
)
from .embedding_door import EmbeddingDoor
from .errors import NOT_READY_RETRY_SECONDS, retry_after
from .schemas import (
    CacheReport,
    DeepHealthReport,
    HealthReport,
    LiveReport,
    ModelHealth,
    QueueReport,
    ReadyReport,
    TuningReport,
    WorkerCounts,
)

Report = TypeVar("Report")


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
    "/ready",
    summary="Readiness",
    description="200 while work should be sent here; an unloaded model is ready.",
    tags=["operations"],
    responses=NOT_READY,
    operation_class=documented(answer=READY_EXAMPLE),
    sync_to_thread=False,
)
def ready(door: NamedDependency[EmbeddingDoor]) -> Response[ReadyReport]:
    """Whether to send work here."""
    status = door.service.status()
    reason = unready_reason(status)
    if reason is None:
        return Response(ReadyReport(status="ready"))
    return _down(ReadyReport(status="not ready", reason=reason), status)


@get(
    "/health",
    summary="Health",
    description=(
        "`loading` (503; `reason` where it was loaded before), `fail` (503: no worker is alive, "
        "or `reason`), `idle` (200: the next request loads the model again), `warn` (200: some "
        "workers are gone, or may hang: `reason`) or `ok` (200)."
    ),
    tags=["operations"],
    responses=UNHEALTHY,
    operation_class=documented(answer=HEALTH_EXAMPLE),
    sync_to_thread=False,
)
def health(door: NamedDependency[EmbeddingDoor]) -> Response[HealthReport]:
    """The first of the five states that holds."""
    status = door.service.status()
    report = health_report(status)
    return _down(report, status) if report.status in {"loading", "fail"} else Response(report)


@get(
    "/health/deep",
    summary="Deep health",
    description=(
        "Embeds a few tokens before all waiting work, at most once in some seconds: `ok` or "
        "`idle` (200), `loading` or `fail` (503)."
    ),
    tags=["operations"],
    responses=DEEPLY_UNHEALTHY,
    operation_class=documented(answer=DEEP_HEALTH_EXAMPLE),
)
async def deep_health(door: NamedDependency[EmbeddingDoor]) -> Response[DeepHealthReport]:
    """Whether real work is answered."""
    status = door.service.status()
    if reason := unready_reason(status):
        is_loading = health_report(status).status == "loading"
        state: Literal["fail", "loading"] = "loading" if is_loading else "fail"
        return _down(DeepHealthReport(status=state, reason=reason), status)
    try:
        report = await door.service.canary()
    except UnavailableError as error:  # it has been given up, or stopped, just now
        return _down(DeepHealthReport(status="fail", reason=str(error)), status)
    if not report.is_healthy:
        return _down(DeepHealthReport(status="fail", reason=report.reason or UNSET), status)
    return Response(
        DeepHealthReport(
            status="idle" if health_report(status).status == "idle" else "ok",
            elapsed_ms=UNSET if report.elapsed_ms is None else report.elapsed_ms,
            reason=report.reason or UNSET,
        )
    )


def _down(report: Report, status: ServiceStatus) -> Response[Report]:
    """A 503; while the server loads or stops it says when to ask again."""
    is_passing = status.draining or not status.ready or status.delay is not None
    headers = retry_after(NOT_READY_RETRY_SECONDS) if is_passing else {}
    return Response(report, status_code=503, headers=headers)


def unready_reason(status: ServiceStatus) -> str | None:
    """Why no work should be sent here; None when it should."""
    if status.draining:
        return "the server is stopping"
    if not status.ready:
        return "the model is loading"
    if status.failure is not None:
        return status.failure
    if status.live_workers == 0:
        return "no worker is alive"
    return status.delay


def health_report(status: ServiceStatus) -> HealthReport:
    """State and figures of a snapshot."""
    if not status.ready and not status.draining:
        return HealthReport(status="loading")
    counts = WorkerCounts(live=status.live_workers, total=status.total_workers)
    if status.queue:
        counts = structs.replace(
            counts,
            busy=status.busy_workers,
            suspect=status.suspect_workers,
            replaced=status.replaced_workers,
        )
    report = HealthReport(
        status="fail",
        workers=counts,
        queue=QueueReport(**attrs.asdict(status.queue)) if status.queue else UNSET,
        cache=CacheReport(**attrs.asdict(status.cache)) if status.cache else UNSET,
    )
    if reason := _stopping(status) or status.failure:
        return structs.replace(report, reason=reason)
    if status.live_workers == 0:
        return report
    if status.delay:
        return structs.replace(report, status="loading", reason=status.delay)
    if status.loaded_workers == 0:
        return structs.replace(report, status="idle")
    model, suspicion = status.model, _suspicion(status)
    return structs.replace(
        report,
        status="warn" if suspicion or status.live_workers < status.total_workers else "ok",
        reason=suspicion or UNSET,
        max_seq_length=UNSET if model is None else model.max_tokens,
        model=UNSET
        if model is None
        else ModelHealth(
            id=model.model_id, dimensions=model.dimensions, notice=model.notice or UNSET
        ),
        tuning=_tuning(status.tuning),
    )


def _stopping(status: ServiceStatus) -> str | None:
    return "the server is stopping" if status.draining else None


def _suspicion(status: ServiceStatus) -> str | None:
    if not status.suspect_workers:
        return None
    count = f"{status.suspect_workers} of {status.total_workers}"
    return f"{count} workers take far longer than expected"


def _tuning(tuning: Tuning | None) -> TuningReport:
    if tuning is None:
        return TuningReport()
    figures: dict[str, Any] = attrs.asdict(tuning)
    return TuningReport(**figures | {"probe_status": tuning.probe_status.value})
