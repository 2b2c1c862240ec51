"""ONNX Runtime on TensorRT, which compiles an engine per graph and GPU and keeps it on disk."""

from .cuda import GPU_INSTALL_HINT, cuda_providers
from .session import Provider, SessionSettings


def tensorrt_providers(settings: SessionSettings) -> list[Provider]:
    """TensorRT in fp16 with its caches; behind it CUDA, for what TensorRT lacks, and the CPU."""
    engines = settings.cache_dir / "trt-engines"
    timing = settings.cache_dir / "trt-timing"
    options = {
        "device_id": str(settings.device_id),
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(engines),
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(timing),
        "trt_fp16_enable": "True",
    }
    if settings.trt_max_workspace_bytes is not None:
        options["trt_max_workspace_size"] = str(settings.trt_max_workspace_bytes)
    tensorrt = Provider("TensorrtExecutionProvider", options, (engines, timing), GPU_INSTALL_HINT)
    return [tensorrt, *cuda_providers(settings)]
