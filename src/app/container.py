"""The single composition root: the only place that names concrete adapters."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dependency_injector import containers, providers

from .. import __version__
from ..adapters.gpu.procfs import ProcfsGpuInfo
from ..adapters.memory.cgroup import CgroupV1Probe, CgroupV2Probe
from ..adapters.memory.meminfo import MeminfoProbe
from ..adapters.memory.rss import resident_bytes
from ..adapters.memory.sysctl import SysctlProbe
from ..adapters.memory.trim import trim_heap
from ..adapters.models.files import ModelFiles
from ..adapters.models.hub import fetch_model
from ..adapters.models.local import local_model
from ..adapters.models.preview import PREVIEW_MODEL_ID, PREVIEW_NOTICE, build_preview
from ..adapters.models.torch_weights import read_linear
from ..adapters.ort.coreml import coreml_providers
from ..adapters.ort.cpu import cpu_providers
from ..adapters.ort.cuda import cuda_providers
from ..adapters.ort.session import Provider, SessionSettings, load_backend, require_installed
from ..adapters.ort.tensorrt import tensorrt_providers
from ..adapters.telemetry.logging import configure_logging
from ..adapters.telemetry.otel import build_telemetry, shut_down
from ..adapters.tokenizer import load_tokenizer
from ..domain.budget import first_limit
from ..domain.cost_model import BGE_M3_ATTENTION_HEADS, CostModel
from ..domain.errors import ConfigError
from ..domain.ports import GpuInfo, InferenceBackend, MemoryProbe
from ..domain.types import HeadProjections, ModelContract
from .config import MAX_SEQ_LENGTH_LIMIT, Config, ExecutionProvider, LogFormat, ModelVariant
from .engine import Engine, EngineSettings
from .http.application import HttpLimits, create_app
from .loading import LoadedModel, ProcessMemory
from .result_cache import CachedService
from .service import EmbeddingService, ModelInfo, ProbeStatus, Tuning
from .supervisor import SupervisorSettings

logger = logging.getLogger(__name__)

BGE_M3_DIMENSIONS = 1024

QUIET_LOGGERS = {"httpx": logging.WARNING, "httpx2": logging.WARNING}
"""The hub client's own lines per request; ours tell what is being downloaded."""

ORT_PROVIDERS: Mapping[ExecutionProvider, Callable[[SessionSettings], Sequence[Provider]]] = {
    ExecutionProvider.CPU: cpu_providers,
    ExecutionProvider.CUDA: cuda_providers,
    ExecutionProvider.TENSORRT: tensorrt_providers,
    ExecutionProvider.COREML: coreml_providers,
}


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


def find_files(config: Config) -> ModelFiles:
    """Where the configured model lies, after downloading or building it if need be.

    Raises:
        ModelError: the model cannot be obtained.
    """
    if config.model_dir:
        return local_model(config.model_dir, config.model.value if config.model else None)
    if config.hub_variant is ModelVariant.PREVIEW:
        return build_preview(config.cache_dir)
    return fetch_model(config.hub_variant.value, config.cache_dir, progress=sys.stderr.isatty())


def device_count(config: Config, gpus: GpuInfo) -> int:
    """Devices that each get a session of their own."""
    if not config.execution_provider.is_gpu:
        return 1
    return config.gpu_count or len(gpus.devices()) or 1


def worker_count(config: Config, gpus: GpuInfo) -> int:
    """Workers, one per device at most: a second one would only wait for the first."""
    if not config.execution_provider.is_gpu:
        return config.workers
    devices = device_count(config, gpus)
    if config.workers > devices:
        logger.warning(
            "BGE_M3_WORKERS exceeds BGE_M3_GPU_COUNT for GPU EP — clamping",
            extra={"fields": {"requested": config.workers, "clamped": devices}},
        )
    return min(config.workers, devices)


def engine_settings(config: Config, gpus: GpuInfo) -> EngineSettings:
    """The engine's share of the configuration."""
    return EngineSettings(
        workers=worker_count(config, gpus),
        queue_tokens=config.queue_tokens,
        queue_bytes=config.queue_bytes,
        hang_timeout_seconds=config.hang_timeout_seconds,
        request_timeout_seconds=(config.request_timeout_ms or 0) / 1e3 or None,
        supervisor=SupervisorSettings(
            idle_timeout_seconds=config.idle_timeout_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
        ),
    )


def with_cache(engine: Engine, limit_bytes: int) -> EmbeddingService:
    """What the doors talk to: the engine, behind a cache if there is one."""
    return CachedService(engine, limit_bytes) if limit_bytes else engine


def load_model(config: Config, gpus: GpuInfo, probes: Sequence[MemoryProbe]) -> LoadedModel:
    """Everything that serving needs, from files to sessions.

    Raises:
        ModelError: the model cannot be obtained, does not fit or does not load.
    """
    _require_engine(config)
    files = find_files(config)
    projections = HeadProjections(
        sparse=read_linear(files.sparse_path) if files.sparse_path else None,
        colbert=read_linear(files.colbert_path) if files.colbert_path else None,
    )
    backends: list[InferenceBackend] = []
    for device in range(device_count(config, gpus)):
        settings = SessionSettings(
            intra_threads=config.intra_threads,
            cache_dir=config.cache_dir,
            device_id=device,
            gpu_mem_limit_bytes=config.gpu_mem_limit_bytes,
            trt_max_workspace_bytes=config.trt_max_workspace_bytes,
            coreml_strategy=config.coreml_strategy,
        )
        ort_providers = ORT_PROVIDERS[config.execution_provider](settings)
        backends.append(
            load_backend(files.graph_path, projections, settings, ort_providers, files.precision)
        )
    contract = backends[0].contract
    tokenizer = load_tokenizer(files.tokenizer_path, _max_tokens(config, contract))
    cost_model = CostModel.conservative(
        attention_heads=contract.attention_heads or BGE_M3_ATTENTION_HEADS
    )
    memory = first_limit(probes)
    return LoadedModel(
        info=ModelInfo(
            model_id=_served_id(config, files, contract),
            heads=contract.heads,
            dimensions=contract.hidden_size,
            max_tokens=tokenizer.max_tokens,
            notice=PREVIEW_NOTICE if files.model_id == PREVIEW_MODEL_ID else None,
        ),
        tokenizer=tokenizer,
        backends=tuple(backends),
        cost_model=cost_model,
        tuning=Tuning(
            a_bytes_per_token=cost_model.a_bytes_per_token,
            b_bytes_per_token_sq=cost_model.b_bytes_per_token_sq,
            max_workspace_bytes=cost_model.max_workspace_bytes,
            probe_status=ProbeStatus.DISABLED,
            memory_source=memory.source if memory else None,
            available_bytes=memory.limit_bytes if memory else None,
        ),
        # A model of another width can pass for BGE-M3 nowhere, so only this width is compared.
        is_verified_bge_m3=files.is_published and contract.hidden_size == BGE_M3_DIMENSIONS,
    )


def _require_engine(config: Config) -> None:
    """Raise `ProviderError` before gigabytes are downloaded for an engine that is not there."""
    settings = SessionSettings(intra_threads=1, cache_dir=config.cache_dir)
    require_installed(ORT_PROVIDERS[config.execution_provider](settings))


def _served_id(config: Config, files: ModelFiles, contract: ModelContract) -> str:
    """The model's name; files that cannot be BGE-M3's go by the name of their directory."""
    if config.model_dir is None or files.is_published:
        return files.model_id
    if contract.hidden_size == BGE_M3_DIMENSIONS:
        logger.warning(
            "the model in BGE_M3_MODEL_DIR is served as bge-m3, but is not known to be it; "
            "`bge-m3-server fetch --dir` makes a directory that can be verified"
        )
        return files.model_id
    name = config.model_dir.resolve().name
    logger.warning("the model in BGE_M3_MODEL_DIR is not BGE-M3; it is served as %s", name)
    return name


def _max_tokens(config: Config, contract: ModelContract) -> int:
    positions = contract.max_tokens or MAX_SEQ_LENGTH_LIMIT
    if config.max_seq_length > positions:
        logger.info(
            "the model reads fewer tokens than BGE_M3_MAX_SEQ_LENGTH",
            extra={"fields": {"requested": config.max_seq_length, "max_tokens": positions}},
        )
    return min(config.max_seq_length, positions)


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

    set_up_logging = providers.Callable(set_up_logging, config)
    fetch = providers.Callable(fetch, config)
    engine = providers.Singleton(
        Engine,
        load_model=providers.Callable(load_model, config, gpus, memory_probes).provider,
        settings=providers.Callable(engine_settings, config, gpus),
        telemetry=telemetry,
        clock=clock,
        memory=providers.Object(ProcessMemory(trim_heap, resident_bytes)),
    )
    service = providers.Singleton(with_cache, engine, config.provided.result_cache_bytes)
    application = providers.Singleton(
        create_app,
        service=service,
        limits=providers.Factory(
            HttpLimits,
            max_batch=config.provided.max_batch,
            max_body_bytes=config.provided.max_body_bytes,
        ),
        telemetry=telemetry,
        version=__version__,
        clock=clock,
    )
    shut_down_telemetry = providers.Callable(shut_down, telemetry)


def build_container(config: Config) -> Container:
    """The container of one process."""
    return Container(config=providers.Object(config))
