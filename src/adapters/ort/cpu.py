"""ONNX Runtime on the CPU."""

from .session import Provider, SessionSettings


def cpu_providers(_settings: SessionSettings) -> list[Provider]:
    """The CPU provider, which has no options."""
    return [Provider("CPUExecutionProvider")]
