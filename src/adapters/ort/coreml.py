"""ONNX Runtime on Apple's Core ML."""

from .cpu import cpu_providers
from .session import Provider, SessionSettings


def coreml_providers(settings: SessionSettings) -> list[Provider]:
    """Core ML in its MLProgram format with a cache of compiled models, the CPU behind it."""
    compiled = settings.cache_dir / "coreml"
    options = {
        "ModelFormat": "MLProgram",
        "SpecializationStrategy": settings.coreml_strategy,
        "ModelCacheDirectory": str(compiled),
    }
    coreml = Provider(
        "CoreMLExecutionProvider",
        options,
        (compiled,),
        "run on macOS, where `pip install onnxruntime` brings it",
    )
    return [coreml, *cpu_providers(settings)]
