"""From the configuration to a model with a cost model: what happens at every load."""

import logging
import platform
import sys
from collections.abc import Callable, Mapping, Sequence

from ... import __version__
from ...adapters.coefficient_store import model_fingerprint
from ...adapters.memory.cpu_count import cpu_count, cpu_model
from ...adapters.memory.peak import peak_memory
from ...adapters.memory.rss import resident_bytes
from ...adapters.memory.trim import trim_heap
from ...adapters.models.files import ModelFiles
from ...adapters.models.hub import fetch_model
from ...adapters.models.local import local_model
from ...adapters.models.preview import PREVIEW_MODEL_ID, PREVIEW_NOTICE, build_preview
from ...adapters.models.torch_weights import read_linear
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
from ...adapters.tokenizer import load_tokenizer
from ...domain.budget import Budget, conservative_coefficients, tightest_limit
from ...domain.budget_override import Pins
from ...domain.ports import GpuInfo, InferenceBackend, MemoryProbe
from ...domain.types import HeadProjections, MemoryLimit, ModelContract, ProbeKey
from ..config import MAX_SEQ_LENGTH_LIMIT, Config, ExecutionProvider, ModelVariant
from ..loading import LoadedModel
from ..service import ModelInfo
from ..tuning import Tuner
from ..tuning_state import Situation

logger = logging.getLogger(__name__)

BGE_M3_DIMENSIONS = 1024

UNKNOWN_MEMORY = MemoryLimit(4 * 1024**3, "host_ram")
"""What is assumed where nothing tells how much memory there is."""

FP16_BYTES, FP32_BYTES = 2, 4

ORT_PROVIDERS: Mapping[ExecutionProvider, Callable[[SessionSettings], Sequence[Provider]]] = {
    ExecutionProvider.CPU: cpu_providers,
    ExecutionProvider.CUDA: cuda_providers,
    ExecutionProvider.TENSORRT: tensorrt_providers,
    ExecutionProvider.COREML: coreml_providers,
}


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


def load_model(
    config: Config, gpus: GpuInfo, workers: int, probes: Sequence[MemoryProbe], tuner: Tuner
) -> LoadedModel:
    """Everything that serving needs, from files to sessions and the cost model.

    Raises:
        ModelError: the model cannot be obtained, does not fit or does not load.
        ConfigError: the memory does not suffice, or pinned coefficients are impossible.
    """
    memory = memory_limit(config, probes)  # what others hold counts, so not this model yet
    _require_engine(config)
    files = find_files(config)
    projections = HeadProjections(
        sparse=read_linear(files.sparse_path) if files.sparse_path else None,
        colbert=read_linear(files.colbert_path) if files.colbert_path else None,
    )
    threads = intra_threads(config, workers)
    backends: list[InferenceBackend] = []
    for device in range(device_count(config, gpus)):
        settings = SessionSettings(
            intra_threads=threads,
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
    situation = Situation(
        memory=memory,
        budget=Budget(
            available_bytes=memory.limit_bytes,
            model_bytes=resident_bytes() or 0,
            workers=workers,
            safety_factor=config.memory_safety_factor,
        ),
        pins=pins(config),
        conservative=conservative_coefficients(contract, _bytes_per_value(config, contract)),
        max_tokens=tokenizer.max_tokens,
        peaks=peak_memory(),
        trim=trim_heap,
        key=probe_key(config, files, contract, threads, tokenizer.max_tokens),
        use_cache=not config.disable_probe_cache,
    )
    cost_model, tuning, backends[0] = tuner.prepare(situation, backends[0])
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
        tuning=tuning,
        # A model of another width can pass for BGE-M3 nowhere, so only this width is compared.
        is_verified_bge_m3=files.is_published and contract.hidden_size == BGE_M3_DIMENSIONS,
    )


def memory_limit(config: Config, probes: Sequence[MemoryProbe]) -> MemoryLimit:
    """What this process may use: as stated, or the least that any source says."""
    if config.available_memory_bytes is not None:
        return MemoryLimit(config.available_memory_bytes, "override")
    return tightest_limit(probes) or UNKNOWN_MEMORY


def pins(config: Config) -> Pins:
    """The settings that stand in for a measurement."""
    return Pins(
        is_gpu=config.execution_provider.is_gpu,
        vram_budget_bytes=config.gpu_vram_budget_bytes,
        disable_auto_budget=config.disable_auto_budget,
        token_budget=config.token_budget,
        onnx_batch_size=config.onnx_batch_size,
        cost_model_a=config.cost_model_a,
        cost_model_b=config.cost_model_b,
        available_memory_bytes=config.available_memory_bytes,
    )


def probe_key(
    config: Config, files: ModelFiles, contract: ModelContract, threads: int, max_tokens: int
) -> ProbeKey:
    """Under what conditions a measurement of this model holds."""
    return ProbeKey(
        server_version=__version__,
        model_id=files.model_id,
        model_fingerprint=model_fingerprint(files.graph_path),
        precision=contract.precision,
        engine=f"onnxruntime {config.execution_provider.value}, no arena",
        engine_version=ENGINE_VERSION,
        intra_threads=threads,
        max_tokens=max_tokens,
        cpu_model=cpu_model(),
        architecture=platform.machine(),
    )


def _bytes_per_value(config: Config, contract: ModelContract) -> int:
    """CPUs compute fp16 models in float32."""
    is_half = config.execution_provider.is_gpu and contract.precision == ModelVariant.FP16.value
    return FP16_BYTES if is_half else FP32_BYTES


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
