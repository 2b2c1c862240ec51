"""ONNX Runtime on NVIDIA GPUs."""

from .cpu import cpu_providers
from .session import Provider, SessionSettings

GPU_INSTALL_HINT = "pip uninstall -y onnxruntime && pip install --force-reinstall onnxruntime-gpu"
"""Both packages own the same import name, so the one without GPUs has to go first."""


def cuda_providers(settings: SessionSettings) -> list[Provider]:
    """CUDA, with the CPU behind it for the few operators that CUDA lacks.

    The memory limit is that of the provider's arena, not of all that CUDA allocates.
    """
    options = {"device_id": str(settings.device_id)}
    if settings.gpu_mem_limit_bytes is not None:
        options["gpu_mem_limit"] = str(settings.gpu_mem_limit_bytes)
    cuda = Provider("CUDAExecutionProvider", options, install_hint=GPU_INSTALL_HINT)
    return [cuda, *cpu_providers(settings)]
