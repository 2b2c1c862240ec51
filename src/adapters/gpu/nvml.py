"""NVIDIA GPUs with their figures, through NVML (package ``nvidia-ml-py``, module ``pynvml``)."""

import importlib
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeVar

import attrs

from ...domain.types import GpuDevice

_log = logging.getLogger(__name__)
_Figure = TypeVar("_Figure")


def import_nvml() -> ModuleType | None:
    """The ``pynvml`` module, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


@attrs.frozen
class NvmlGpuInfo:
    """A `GpuInfo` with name, memory, utilisation and temperature.

    Without the library or the driver it says so once, when it is made, and knows no device.

    >>> NvmlGpuInfo(import_nvml()).devices()
    """

    nvml: ModuleType | None
    _usable: ModuleType | None = attrs.field(init=False)

    @_usable.default
    def _initialised(self) -> ModuleType | None:
        if self.nvml is None:
            _log.warning(
                "NVML is unavailable, GPU figures are off: nvidia-ml-py is not installed; "
                "install it with: pip install 'bge-m3-server[gpu]'"
            )
            return None
        try:
            self.nvml.nvmlInit()
        except self.nvml.NVMLError as error:
            _log.warning("NVML is unavailable, GPU figures are off: %s", error)
            return None
        return self.nvml

    def devices(self) -> tuple[GpuDevice, ...]:
        """All devices that answer; one that fails is left out and logged for debugging."""
        return () if self._usable is None else tuple(_answering_devices(self._usable))


def _answering_devices(nvml: ModuleType) -> Iterator[GpuDevice]:
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        _log.debug("NVML cannot count the GPUs: %s", error)
        return
    for index in range(count):
        try:
            yield _device(nvml, index)
        except nvml.NVMLError as error:
            _log.debug("NVML cannot read GPU %d, it is left out: %s", index, error)


def _device(nvml: ModuleType, index: int) -> GpuDevice:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def figure(read: Callable[[], _Figure]) -> _Figure | None:
        # A partitioned or virtual GPU has no utilisation or temperature of its own.
        try:
            return read()
        except nvml.NVMLError_NotSupported:
            return None

    memory = figure(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    utilization = figure(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return GpuDevice(
        index=index,
        name=figure(lambda: nvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
        utilization_pct=None if utilization is None else utilization.gpu,
        temperature_celsius=figure(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
    )
