"""Which engine runs the model, and how it is loaded."""

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ...adapters.memory.cpu_count import cpu_count
from ...adapters.openvino import backend as openvino
from ...adapters.openvino.choice import prefers_openvino
from ...adapters.openvino.package import engine_version, import_openvino, is_installed
from ...adapters.ort.coreml import coreml_providers
from ...adapters.ort.cpu import cpu_providers
from ...adapters.ort.cuda import cuda_providers
from ...adapters.ort.session import (
    ENGINE_VERSION,
    Provider,
    SessionSettings,
    load_backend,
    require_installed,
)
from ...adapters.ort.tensorrt import tensorrt_providers
from ...adapters.processor import has_int8_products, read_cpu_flags
from ...domain.padding import GPU_PADDING, PaddingRule, cpu_padding
from ...domain.ports import GpuInfo, InferenceBackend
from ...domain.types import HeadProjections
from ..config import Config, ExecutionProvider, ModelVariant

logger = logging.getLogger(__name__)

CPUS_PER_WORKER = 8
"""One forward pass keeps so many busy; with fewer, a second worker only halves the threads of the
first."""

CHOSEN_BY_RULE = "auto"

ROUNDED = {ModelVariant.W8.value, ModelVariant.FP16.value, ModelVariant.INT8.value}
"""Precisions that are not the model's own."""

ORT_PROVIDERS: Mapping[ExecutionProvider, Callable[[SessionSettings], Sequence[Provider]]] = {
    ExecutionProvider.CPU: cpu_providers,
    ExecutionProvider.CUDA: cuda_providers,
    ExecutionProvider.TENSORRT: tensorrt_providers,
    ExecutionProvider.COREML: coreml_providers,
}


@attrs.frozen
class Engine:
    """Loads a graph for one device.

    `name`, `version`: under which measurements of memory are remembered.
    `load`: graph, heads outside the graph, device, and what the source calls the precision.
    """

    name: str
    version: str
    load: Callable[[Path, HeadProjections, int, str | None], InferenceBackend]


def settle(config: Config) -> Config:
    """The configuration with an engine where it says ``auto``."""
    if config.execution_provider is not ExecutionProvider.AUTO:
        return config
    preference = prefers_openvino(
        is_installed=is_installed(),
        architecture=platform.machine(),
        cpu_flags=read_cpu_flags(),
        max_isa=config.onednn_max_isa,
    )
    chosen = ExecutionProvider.OPENVINO if preference.is_preferred else ExecutionProvider.CPU
    return attrs.evolve(
        config,
        execution_provider=chosen,
        execution_provider_reason=f"{CHOSEN_BY_RULE}: {preference.reason}",
    )


def fallback_of(config: Config) -> Config | None:
    """With ONNX Runtime instead of an engine that nobody asked for by name; else None."""
    was_chosen = config.execution_provider_reason.startswith(CHOSEN_BY_RULE)
    if not was_chosen or config.execution_provider is ExecutionProvider.CPU:
        return None
    return attrs.evolve(config, execution_provider=ExecutionProvider.CPU)


def require_engine(config: Config) -> None:
    """Raise `ProviderError` before gigabytes are downloaded for an engine that is not there."""
    if config.execution_provider is ExecutionProvider.OPENVINO:
        import_openvino()
        return
    settings = SessionSettings(intra_threads=1, cache_dir=config.cache_dir)
    require_installed(ORT_PROVIDERS[config.execution_provider](settings))


def device_count(config: Config, gpus: GpuInfo) -> int:
    """Devices that each get a model of their own."""
    if not config.execution_provider.is_gpu:
        return 1
    return config.gpu_count or len(gpus.devices()) or 1


def worker_count(config: Config, gpus: GpuInfo) -> int:
    """Workers: as set, or one per 8 CPUs; on NVIDIA one per device at most."""
    if not config.execution_provider.is_gpu:
        return config.workers or -(-cpu_count().count // CPUS_PER_WORKER)
    devices = device_count(config, gpus)
    if config.workers is not None and config.workers > devices:
        logger.warning(
            "BGE_M3_WORKERS exceeds BGE_M3_GPU_COUNT for GPU EP — clamping",
            extra={"fields": {"requested": config.workers, "clamped": devices}},
        )
    return min(config.workers or devices, devices)


def intra_threads(config: Config, workers: int) -> int:
    """Threads of one forward pass: as set, or the CPUs shared out among the workers."""
    if config.intra_threads is not None:
        return config.intra_threads
    cpus = cpu_count()
    threads = max(1, cpus.count // workers)
    logger.info(
        "threads of one forward pass",
        extra={"fields": {"intra_threads": threads, "cpus": cpus.count, "source": cpus.source}},
    )
    return threads


def padding_rule(config: Config, threads: int) -> PaddingRule:
    """Which lengths may share a chunk on the configured engine."""
    if config.execution_provider.is_gpu:
        return GPU_PADDING
    is_openvino = config.execution_provider is ExecutionProvider.OPENVINO
    return cpu_padding(threads, are_masks_free=is_openvino)


def engine_for(config: Config, threads: int, workers: int) -> Engine:
    """The configured engine; its models serve all workers of a device."""
    if config.execution_provider is ExecutionProvider.OPENVINO:
        return _openvino(threads, workers)
    return _onnxruntime(config, config.execution_provider, threads)


def reference_engine(config: Config, threads: int) -> Engine:
    """ONNX Runtime on the CPU, which runs the source of a prepared model."""
    return _onnxruntime(config, ExecutionProvider.CPU, threads)


def _onnxruntime(config: Config, provider: ExecutionProvider, threads: int) -> Engine:
    def load(
        graph: Path, projections: HeadProjections, device: int, precision: str | None
    ) -> InferenceBackend:
        settings = SessionSettings(
            intra_threads=threads,
            cache_dir=config.cache_dir,
            has_int8_products=has_int8_products(read_cpu_flags()),
            device_id=device,
            gpu_mem_limit_bytes=config.gpu_mem_limit_bytes,
            trt_max_workspace_bytes=config.trt_max_workspace_bytes,
            coreml_strategy=config.coreml_strategy,
        )
        providers = ORT_PROVIDERS[provider](settings)
        return load_backend(graph, projections, settings, providers, precision)

    return Engine(f"onnxruntime {provider.value}", ENGINE_VERSION, load)


def _openvino(threads: int, workers: int) -> Engine:
    def load(
        graph: Path, projections: HeadProjections, _device: int, precision: str | None
    ) -> InferenceBackend:
        # What is rounded already, and judged as it runs, may use bf16 where the processor has it.
        settings = openvino.OpenVinoSettings(
            intra_threads=threads,
            streams=workers,
            precision_hint=None if precision in ROUNDED else "f32",
        )
        return openvino.load_openvino_backend(graph, projections, settings, precision)

    return Engine("openvino", engine_version(), load)
