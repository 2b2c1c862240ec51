"""From the configuration to a model with a cost model: what happens at every load."""

import logging
import platform
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ... import __version__
from ...adapters.coefficient_store import model_fingerprint
from ...adapters.memory.cpu_count import cpu_model
from ...adapters.memory.mapped import drop_mapped_pages
from ...adapters.memory.peak import peak_memory
from ...adapters.memory.rss import resident_bytes
from ...adapters.memory.trim import trim_heap
from ...adapters.models.files import ModelFiles
from ...adapters.models.preview import PREVIEW_MODEL_ID, PREVIEW_NOTICE
from ...adapters.tokenizer import load_tokenizer
from ...domain.budget import OVERRIDE_SOURCE, Budget, conservative_coefficients, tightest_limit
from ...domain.budget_override import Pins
from ...domain.errors import EngineError, InferenceError, ProviderError, SelfTestError
from ...domain.ports import GpuInfo, InferenceBackend, MemoryProbe, Tokenizer
from ...domain.self_test import self_test
from ...domain.types import MemoryLimit, ModelContract, ProbeKey
from ..config import MAX_SEQ_LENGTH_LIMIT, Config, ExecutionProvider, ModelVariant
from ..loading import LoadedModel, run_self_test
from ..metering import probe_batch
from ..service import ModelInfo
from ..tuning import Tuner
from ..tuning_state import Situation
from .engines import (
    Engine,
    device_count,
    engine_for,
    fallback_of,
    intra_threads,
    padding_rule,
    require_engine,
)
from .preparation import served_model

logger = logging.getLogger(__name__)

BGE_M3_DIMENSIONS = 1024

UNKNOWN_MEMORY = MemoryLimit(4 * 1024**3, "host_ram")
"""What is assumed where nothing tells how much memory there is."""

FP16_BYTES, FP32_BYTES = 2, 4

_PACE_TOKENS = 32


def load_model(
    config: Config, gpus: GpuInfo, workers: int, probes: Sequence[MemoryProbe], tuner: Tuner
) -> LoadedModel:
    """Everything that serving needs, from files to sessions and the cost model.

    Every backend has passed its self-test. An engine that was chosen by rule and cannot run the
    model here gives way to the plain one.

    Raises:
        ModelError: it cannot be obtained, does not fit, does not load or fails its self-test.
        ConfigError: the memory does not suffice, or pinned coefficients are impossible.
    """
    fallback = fallback_of(config)
    try:
        return _load(config, gpus, workers, probes, tuner)
    except (EngineError, InferenceError, ProviderError, SelfTestError) as error:
        if fallback is None:
            raise
        logger.warning("the engine that was chosen does not run here, ONNX Runtime does: %s", error)
    # Not above: while the error is handled it holds what was loaded, which would count as memory.
    return _load(fallback, gpus, workers, probes, tuner)


def _load(
    config: Config, gpus: GpuInfo, workers: int, probes: Sequence[MemoryProbe], tuner: Tuner
) -> LoadedModel:
    memory = memory_limit(config, probes)  # what others hold counts, so not this model yet
    require_engine(config)
    threads = intra_threads(config, workers)
    engine = engine_for(config, threads, workers)
    model = served_model(config, engine, threads)
    backends: list[InferenceBackend] = [
        engine.load(model.files.graph_path, model.projections, device, model.files.precision)
        for device in range(device_count(config, gpus))
    ]
    files = model.files
    contract = backends[0].contract
    _warn_of_slow_fp16(config, contract)
    tokenizer = load_tokenizer(files.tokenizer_path, _max_tokens(config, contract))
    # A model of another width can pass for BGE-M3 nowhere, so only this width is compared.
    is_bge_m3 = files.is_published and contract.hidden_size == BGE_M3_DIMENSIONS
    paces = [
        run_self_test(
            partial(_tested_pace, tokenizer, backend, is_bge_m3=is_bge_m3),
            config.hang_timeout_seconds,
        )
        for backend in backends
    ]
    # Only now: the tuner remembers the engine, and the first pass of some takes memory for good.
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
        key=probe_key(engine, files, contract, threads, tokenizer.max_tokens),
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
        padding=padding_rule(config, threads),
        seconds_per_position=max(paces),
        rest=partial(_rest, backends, list(files.graph_path.parent.iterdir())),
    )


def _tested_pace(tokenizer: Tokenizer, backend: InferenceBackend, *, is_bge_m3: bool) -> float:
    """Run the self-test; returns seconds per position of a short pass after it.

    Not of the self-test's own passes: in the first one some engines bring weights into their form.
    """
    self_test(tokenizer, backend, is_bge_m3=is_bge_m3)
    batch = probe_batch(1, _PACE_TOKENS)
    started = time.perf_counter()
    backend.run(batch, backend.contract.outputs_for(backend.contract.heads))
    return (time.perf_counter() - started) / batch.ids.size


def _rest(backends: Sequence[InferenceBackend], mapped_files: Sequence[Path]) -> None:
    for backend in backends:
        backend.release()
    drop_mapped_pages(mapped_files)


def memory_limit(config: Config, probes: Sequence[MemoryProbe]) -> MemoryLimit:
    """What this process may use: as stated, or the least that any source says."""
    if config.available_memory_bytes is not None:
        return MemoryLimit(config.available_memory_bytes, OVERRIDE_SOURCE)
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
    engine: Engine, files: ModelFiles, contract: ModelContract, threads: int, max_tokens: int
) -> ProbeKey:
    """Under what conditions a measurement of this model holds."""
    return ProbeKey(
        server_version=__version__,
        model_id=files.model_id,
        model_fingerprint=model_fingerprint(files.graph_path),
        precision=contract.precision,
        engine=engine.name,
        engine_version=engine.version,
        intra_threads=threads,
        max_tokens=max_tokens,
        cpu_model=cpu_model(),
        architecture=platform.machine(),
    )


def _bytes_per_value(config: Config, contract: ModelContract) -> int:
    """CPUs compute fp16 models in float32."""
    is_half = config.execution_provider.is_gpu and contract.precision == ModelVariant.FP16.value
    return FP16_BYTES if is_half else FP32_BYTES


def _warn_of_slow_fp16(config: Config, contract: ModelContract) -> None:
    """ONNX Runtime's CPU provider converts between fp16 and float32 around every operation."""
    is_cpu = config.execution_provider is ExecutionProvider.CPU
    if is_cpu and contract.precision == ModelVariant.FP16.value:
        logger.warning(
            "fp16 on ONNX Runtime's CPU provider is 6 to 9 times slower than fp32: "
            "leave BGE_M3_MODEL unset, or choose w8 or fp32"
        )


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
