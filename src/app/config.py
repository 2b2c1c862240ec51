"""Environment variables → one frozen `Config`; every message about a bad value is made here."""

import enum
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs

from ..domain.budget_override import LEGACY_TEXT_TOKENS
from ..domain.errors import ConfigError
from .environment import MAX_SECONDS, EnvironmentReader
from .ignored_settings import of_other_engines, unknown, without_effect
from .log_filter import ROOT, parse_log_filter

MAX_SEQ_LENGTH_LIMIT = 8192
"""BGE-M3 reads 8192 tokens: 8194 positions, two of which XLM-RoBERTa reserves."""

MAX_TOKEN_BUDGET = 1_000_000_000
"""A pass of so many tokens would need a thousand TiB."""

MAX_COEFFICIENT = 10**12
"""Bytes per token, or token pair; no machine has room for one text of that."""

DEFAULT_WARMUP_SHAPES = tuple(
    (batch, tokens) for batch in (1, 2, 4, 8, 16, 32) for tokens in (128, 512, 2048, 8192)
)


class ModelVariant(enum.Enum):
    """What `BGE_M3_MODEL` may name.

    W8 is prepared from FP32; AUTO is the fastest that is as good as FP32.
    """

    AUTO = "auto"
    W8 = "w8"
    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    PREVIEW = "preview"


class ExecutionProvider(enum.Enum):
    """What `BGE_M3_EP` may name: ONNX Runtime's providers, OpenVINO, or AUTO for the fastest."""

    AUTO = "auto"
    OPENVINO = "openvino"
    CPU = "cpu"
    CUDA = "cuda"
    TENSORRT = "tensorrt"
    COREML = "coreml"

    @property
    def is_gpu(self) -> bool:
        """Runs on NVIDIA devices, one worker each."""
        return self in {ExecutionProvider.CUDA, ExecutionProvider.TENSORRT}

    @property
    def is_cpu(self) -> bool:
        """Runs on CPUs, which models are prepared for; AUTO chooses among those engines only."""
        names = {ExecutionProvider.AUTO, ExecutionProvider.OPENVINO, ExecutionProvider.CPU}
        return self in names


class LogFormat(enum.Enum):
    """What `BGE_M3_LOG_FORMAT` may name; AUTO is text on a terminal and JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


CoremlStrategy = Literal["FastPrediction", "Default"]
_FAST_PREDICTION: CoremlStrategy = "FastPrediction"
_DEFAULT: CoremlStrategy = "Default"


@attrs.frozen(kw_only=True)
class Config:
    """Everything an operator can set. See README for what each variable does."""

    cache_dir: Path
    model: ModelVariant
    model_dir: Path | None
    execution_provider: ExecutionProvider
    execution_provider_reason: str
    onednn_max_isa: str
    host: str
    port: int
    workers: int | None
    intra_threads: int | None
    max_batch: int
    max_seq_length: int
    max_body_bytes: int
    idle_timeout_seconds: int
    heartbeat_seconds: int
    queue_tokens: int
    queue_bytes: int
    result_cache_bytes: int
    request_timeout_ms: int | None
    read_timeout_seconds: int
    hang_timeout_seconds: int
    shutdown_grace_seconds: int
    drain_timeout_seconds: int
    gpu_count: int | None
    gpu_vram_budget_bytes: int | None
    gpu_mem_limit_bytes: int | None
    trt_max_workspace_bytes: int | None
    trt_warmup_shapes: tuple[tuple[int, int], ...]
    warmup_only: bool
    coreml_strategy: CoremlStrategy
    disable_auto_budget: bool
    disable_probe_cache: bool
    available_memory_bytes: int | None
    memory_safety_factor: float
    token_budget: int | None
    onnx_batch_size: int | None
    cost_model_a: float | None
    cost_model_b: float | None
    log_format: LogFormat
    log_levels: Mapping[str, int]
    notices: tuple[str, ...]

    @property
    def hub_variant(self) -> ModelVariant:
        """The variant to fetch: fp16 for NVIDIA; elsewhere fp32, from which `w8` is prepared."""
        if self.model is ModelVariant.AUTO and self.execution_provider.is_gpu:
            return ModelVariant.FP16
        if self.model in {ModelVariant.AUTO, ModelVariant.W8}:
            return ModelVariant.FP32
        return self.model


def load_config(environment: Mapping[str, str], platform: str) -> Config:
    """Read and check every variable.

    Args:
        environment: usually `os.environ`.
        platform: usually `sys.platform`; macOS defaults to CoreML.

    Raises:
        ConfigError: one message with all values that cannot be obeyed.
    """
    read = EnvironmentReader(environment)
    provider = read.choice(
        "BGE_M3_EP",
        ExecutionProvider.COREML if platform == "darwin" else ExecutionProvider.AUTO,
        {provider.value: provider for provider in ExecutionProvider},
    )
    host, port = read.parsed("BGE_M3_BIND", ("0.0.0.0", 8081), _parse_bind)  # noqa: S104  a server
    config = Config(
        cache_dir=Path(read.text("BGE_M3_CACHE_DIR", "/cache")).expanduser(),
        model=read.choice(
            "BGE_M3_MODEL",
            ModelVariant.AUTO,
            {variant.value: variant for variant in ModelVariant},
        ),
        model_dir=read.parsed("BGE_M3_MODEL_DIR", None, _parse_directory),
        execution_provider=provider,
        execution_provider_reason="BGE_M3_EP, or the default of this system",
        # oneDNN reads both names, in this order.
        onednn_max_isa=read.text("ONEDNN_MAX_CPU_ISA", read.text("DNNL_MAX_CPU_ISA", "")),
        host=host,
        port=port,
        workers=read.count("BGE_M3_WORKERS", None),
        intra_threads=read.count("BGE_M3_INTRA_THREADS", None),
        max_batch=read.count("BGE_M3_MAX_BATCH", 256),
        max_seq_length=_max_seq_length(read),
        max_body_bytes=read.integer("BGE_M3_MAX_BODY_BYTES", 32 * 1024**2, minimum=1),
        idle_timeout_seconds=read.seconds("BGE_M3_IDLE_TIMEOUT_SECS", 300),
        heartbeat_seconds=read.seconds("BGE_M3_HEARTBEAT_SECS", 60),
        queue_tokens=read.integer("BGE_M3_QUEUE_TOKENS", 4 * 1024**2, minimum=1),
        queue_bytes=read.integer("BGE_M3_QUEUE_BYTES", 128 * 1024**2, minimum=1),
        result_cache_bytes=read.integer("BGE_M3_RESULT_CACHE_BYTES", 0),
        request_timeout_ms=read.integer(
            "BGE_M3_REQUEST_TIMEOUT_MS", None, minimum=1, maximum=1000 * MAX_SECONDS
        ),
        read_timeout_seconds=read.seconds("BGE_M3_READ_TIMEOUT_SECS", 30, minimum=1),
        # TensorRT builds an engine inside the first chunk of a shape.
        hang_timeout_seconds=read.seconds(
            "BGE_M3_HANG_TIMEOUT_SECS",
            1800 if provider is ExecutionProvider.TENSORRT else 60,
            minimum=1,
        ),
        shutdown_grace_seconds=read.seconds("BGE_M3_SHUTDOWN_GRACE_SECS", 5),
        drain_timeout_seconds=read.seconds("BGE_M3_DRAIN_TIMEOUT_SECS", 30),
        gpu_count=read.count("BGE_M3_GPU_COUNT", None),
        gpu_vram_budget_bytes=read.integer("BGE_M3_GPU_VRAM_BUDGET_BYTES", None, minimum=1),
        gpu_mem_limit_bytes=read.integer("BGE_M3_GPU_MEM_LIMIT_BYTES", None, minimum=1),
        trt_max_workspace_bytes=read.integer("BGE_M3_TRT_MAX_WORKSPACE_BYTES", None, minimum=1),
        trt_warmup_shapes=_warmup_shapes(read),
        warmup_only=read.flag("BGE_M3_WARMUP_ONLY"),
        coreml_strategy=read.choice(
            "BGE_M3_COREML_STRATEGY",
            _FAST_PREDICTION,
            {"default": _DEFAULT, "fast": _FAST_PREDICTION},
        ),
        disable_auto_budget=read.flag("BGE_M3_DISABLE_AUTO_BUDGET"),
        disable_probe_cache=read.flag("BGE_M3_DISABLE_PROBE_CACHE"),
        available_memory_bytes=read.integer("BGE_M3_AVAILABLE_MEMORY_BYTES", None, minimum=1),
        memory_safety_factor=_memory_safety_factor(read),
        token_budget=read.integer("BGE_M3_TOKEN_BUDGET", None, minimum=1, maximum=MAX_TOKEN_BUDGET),
        onnx_batch_size=read.integer(
            "BGE_M3_ONNX_BATCH_SIZE",
            None,
            minimum=1,
            maximum=MAX_TOKEN_BUDGET // LEGACY_TEXT_TOKENS,
        ),
        cost_model_a=read.number("BGE_M3_COST_MODEL_A", None, minimum=0, maximum=MAX_COEFFICIENT),
        cost_model_b=read.number("BGE_M3_COST_MODEL_B", None, minimum=0, maximum=MAX_COEFFICIENT),
        log_format=read.choice(
            "BGE_M3_LOG_FORMAT",
            LogFormat.AUTO,
            {"json": LogFormat.JSON, "text": LogFormat.TEXT, "pretty": LogFormat.TEXT},
        ),
        log_levels=read.parsed("RUST_LOG", {ROOT: logging.INFO}, parse_log_filter),
        notices=(),
    )
    if config.model is ModelVariant.PREVIEW and config.model_dir:
        read.problems.append("BGE_M3_MODEL=preview and BGE_M3_MODEL_DIR: set only one of them")
    if config.model is ModelVariant.W8 and not provider.is_cpu:
        read.problems.append(
            f"BGE_M3_MODEL=w8 is made for CPUs, not for BGE_M3_EP={provider.value}: set "
            f"BGE_M3_MODEL to auto, fp16 or fp32 for {provider.value}, or BGE_M3_EP to cpu or "
            "openvino"
        )
    if config.cost_model_a == config.cost_model_b == 0:
        read.problems.append(
            "BGE_M3_COST_MODEL_A=0 and BGE_M3_COST_MODEL_B=0: a pass cannot cost nothing; set what "
            "was measured, or leave both unset to have it measured"
        )
    if read.problems:
        raise ConfigError("invalid configuration:\n  " + "\n  ".join(read.problems))
    return attrs.evolve(
        config,
        notices=(
            *read.notices,
            *of_other_engines(environment, provider.value),
            *without_effect(environment),
            *unknown(environment, read.asked),
        ),
    )


def _parse_bind(raw: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})", raw)
    if not match:
        raise ValueError("expected host:port, e.g. 0.0.0.0:8081 or [::1]:8081")
    if int(match[3]) > 65535:  # noqa: PLR2004  the largest TCP port
        raise ValueError("expected a port between 0 and 65535")
    return match[1] or match[2], int(match[3])


def _parse_directory(raw: str) -> Path:
    path = Path(raw).expanduser()
    if not path.is_dir():
        raise ValueError("expected an existing directory, e.g. one made by `bge-m3-server fetch`")
    return path


def _max_seq_length(read: EnvironmentReader) -> int:
    name = "BGE_M3_MAX_SEQ_LENGTH"
    requested = read.integer(name, MAX_SEQ_LENGTH_LIMIT, minimum=-math.inf, maximum=math.inf)
    if 1 <= requested <= MAX_SEQ_LENGTH_LIMIT:
        return requested
    read.notices.append(
        f"{name} out of range [1, {MAX_SEQ_LENGTH_LIMIT}]; clamping {requested} "
        f"to {MAX_SEQ_LENGTH_LIMIT}"
    )
    return MAX_SEQ_LENGTH_LIMIT


def _memory_safety_factor(read: EnvironmentReader) -> float:
    name = "BGE_M3_MEMORY_SAFETY_FACTOR"
    requested = read.number(name, 0.7)
    factor = min(max(requested, 0.1), 1.0)
    if factor != requested:
        read.notices.append(f"{name} out of range [0.1, 1.0]; clamping {requested} to {factor}")
    return factor


def _warmup_shapes(read: EnvironmentReader) -> tuple[tuple[int, int], ...]:
    """``BxL`` tokens, comma-separated; bad ones are skipped with a notice."""
    name = "BGE_M3_TRT_WARMUP_SHAPES"
    shapes = []
    for token in filter(None, map(str.strip, read.text(name, "").split(","))):
        if match := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", token):
            shapes.append((int(match[1]), int(match[2])))
        else:
            read.notices.append(f"{name}: skipping {token!r}, expected BxL such as 4x512")
    return tuple(shapes) or DEFAULT_WARMUP_SHAPES
