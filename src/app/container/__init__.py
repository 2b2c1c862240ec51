"""The single composition root: the only package that names concrete adapters."""

import logging
import os
import sys
import time
from pathlib import Path

from dependency_injector import containers, providers

from ... import __version__
from ...adapters.coefficient_store import JsonCoefficientStore
from ...adapters.gpu.procfs import ProcfsGpuInfo
from ...adapters.memory.cgroup import CgroupV1Probe, CgroupV2Probe
from ...adapters.memory.meminfo import MeminfoProbe
from ...adapters.memory.rss import resident_bytes
from ...adapters.memory.sysctl import SysctlProbe
from ...adapters.memory.trim import trim_heap
from ...adapters.models.files import ModelFiles
from ...adapters.models.hub import fetch_model
from ...adapters.models.preview import build_preview
from ...adapters.probe_plot import plot_probe
from ...adapters.telemetry.logging import configure_logging
from ...adapters.telemetry.otel import build_telemetry, shut_down
from ...domain.errors import ConfigError
from ..config import Config, LogFormat, ModelVariant
from ..engine import Engine, EngineSettings
from ..http.application import HttpLimits, create_app
from ..loading import ProcessMemory
from ..result_cache import CachedService
from ..service import EmbeddingService
from ..supervisor import SupervisorSettings
from ..tuning import Tuner
from .engines import settle, worker_count
from .model import load_model
from .preparation import prepare_model

QUIET_LOGGERS = dict.fromkeys(
    ("httpx", "httpx2", "fusion_base", "onnx_model", "onnx_model_bert"), logging.WARNING
)
"""Lines per request of the hub client, and per step of ONNX Runtime's optimiser; ours tell what is
being downloaded and prepared."""


def set_up_logging(config: Config) -> None:
    """Send all log lines to standard output in the configured shape."""
    is_json = config.log_format is LogFormat.JSON or (
        config.log_format is LogFormat.AUTO and not sys.stdout.isatty()
    )
    configure_logging(
        "json" if is_json else "text",
        {**QUIET_LOGGERS, **config.log_levels},
        "cuda" if config.execution_provider.is_gpu else "cpu",
        sys.stdout,
    )


def fetch(config: Config, variant: ModelVariant, directory: Path | None) -> ModelFiles:
    """Obtain and verify a model; a corrupt file is downloaded again.

    Raises:
        ConfigError: the preview was asked into a directory.
        ModelError: the model cannot be obtained.
    """
    if variant is ModelVariant.PREVIEW:
        if directory:
            raise ConfigError("the preview is built in BGE_M3_CACHE_DIR; leave --dir out")
        return build_preview(config.cache_dir)
    return fetch_model(
        variant.value,
        config.cache_dir,
        directory=directory,
        progress=sys.stderr.isatty(),
        repair=True,
    )


def request_timeout_seconds(config: Config) -> float | None:
    """The deadline of requests that bring none."""
    return config.request_timeout_ms / 1e3 if config.request_timeout_ms else None


def engine_settings(config: Config, workers: int) -> EngineSettings:
    """The engine's share of the configuration."""
    return EngineSettings(
        workers=workers,
        queue_tokens=config.queue_tokens,
        queue_bytes=config.queue_bytes,
        hang_timeout_seconds=config.hang_timeout_seconds,
        request_timeout_seconds=request_timeout_seconds(config),
        supervisor=SupervisorSettings(
            idle_timeout_seconds=config.idle_timeout_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
        ),
    )


def with_cache(engine: Engine, config: Config) -> EmbeddingService:
    """What the doors talk to: the engine, behind a cache if there is one."""
    if not config.result_cache_bytes:
        return engine
    cached = CachedService(engine, config.result_cache_bytes, request_timeout_seconds(config))
    engine.report_in_heartbeat(cached.figures)
    return cached


class Container(containers.DeclarativeContainer):
    """What is made once per process, and of what."""

    config = providers.Dependency(instance_of=Config)

    clock = providers.Object(time.monotonic)
    telemetry = providers.Singleton(build_telemetry, os.environ, __version__)
    gpus = providers.Singleton(ProcfsGpuInfo)
    memory_probes = providers.List(
        providers.Factory(CgroupV2Probe),
        providers.Factory(CgroupV1Probe),
        providers.Factory(MeminfoProbe),
        providers.Factory(SysctlProbe),
    )

    workers = providers.Singleton(worker_count, config, gpus)
    tuner = providers.Singleton(
        Tuner,
        store=providers.Factory(JsonCoefficientStore, config.provided.cache_dir),
        clock=clock,
    )
    load_model = providers.Callable(load_model, config, gpus, workers, memory_probes, tuner)

    set_up_logging = providers.Callable(set_up_logging, config)
    fetch = providers.Callable(fetch, config)
    prepare = providers.Callable(prepare_model, config, workers)
    engine = providers.Singleton(
        Engine,
        load_model=load_model.provider,
        settings=providers.Callable(engine_settings, config, workers),
        telemetry=telemetry,
        clock=clock,
        memory=providers.Object(ProcessMemory(trim_heap, resident_bytes)),
    )
    service = providers.Singleton(with_cache, engine, config)
    application = providers.Singleton(
        create_app,
        service=service,
        limits=providers.Factory(
            HttpLimits,
            max_batch=config.provided.max_batch,
            max_body_bytes=config.provided.max_body_bytes,
            receiving=engine.provided.receiving,
        ),
        telemetry=telemetry,
        version=__version__,
        clock=clock,
    )
    plot_probe = providers.Callable(plot_probe)
    shut_down_telemetry = providers.Callable(shut_down, telemetry)


def build_container(config: Config) -> Container:
    """The container of one process."""
    return Container(config=providers.Object(settle(config)))
