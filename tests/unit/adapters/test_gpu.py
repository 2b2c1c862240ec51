"""GPU information from the kernel driver and from NVML."""
# ruff: noqa: N801, N802, N818  # the fake bears the names of pynvml

import logging
import sys
from types import SimpleNamespace

import pytest
from bge_m3_server.adapters.gpu.nvml import NvmlGpuInfo, import_nvml
from bge_m3_server.adapters.gpu.procfs import ProcfsGpuInfo
from bge_m3_server.domain.types import GpuDevice

GIB = 1024**3


class FakeNvml:
    """The part of ``pynvml`` that is used, for cards given as plain values.

    A card's value may be an exception, which reading it raises. NVML gives handles, and answers
    nothing before it is initialised.
    """

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """Root of its errors."""

    class NVMLError_NotSupported(NVMLError):
        """The card has no such figure."""

    def __init__(self, *cards, init_error=None, count_error=None):
        self.cards = cards
        self.init_error = init_error
        self.count_error = count_error
        self.is_initialised = False

    def nvmlInit(self):
        if self.init_error:
            raise self.init_error
        self.is_initialised = True

    def nvmlDeviceGetCount(self):
        if not self.is_initialised:
            raise self.NVMLError("Uninitialized")
        if self.count_error:
            raise self.count_error
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        card = self.cards[index]
        if isinstance(card, Exception):
            raise card
        return card

    def _read(self, card, key):
        if isinstance(card[key], Exception):
            raise card[key]
        return card[key]

    def nvmlDeviceGetName(self, card):
        return self._read(card, "name")

    def nvmlDeviceGetMemoryInfo(self, card):
        total, used = self._read(card, "memory")
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu=self._read(card, "utilization"), memory=3)

    def nvmlDeviceGetTemperature(self, card, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._read(card, "temperature")


def card(**changes):
    return {
        "name": "NVIDIA L4",
        "memory": (24 * GIB, 3 * GIB),
        "utilization": 71,
        "temperature": 58,
    } | changes


def test_procfs_counts_the_driver_entries(tmp_path):
    """One device per entry, numbered from 0."""
    for address in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
    assert ProcfsGpuInfo(tmp_path).devices() == (GpuDevice(index=0), GpuDevice(index=1))


def test_procfs_without_a_driver(tmp_path):
    """No NVIDIA driver, no devices."""
    assert ProcfsGpuInfo(tmp_path).devices() == ()


def test_nvml_reads_every_figure():
    """Name, memory in bytes, utilisation and temperature of each card."""
    devices = NvmlGpuInfo(FakeNvml(card(), card(name="NVIDIA A10", utilization=0))).devices()
    assert devices == (
        GpuDevice(0, "NVIDIA L4", 24 * GIB, 3 * GIB, 71, 58),
        GpuDevice(1, "NVIDIA A10", 24 * GIB, 3 * GIB, 0, 58),
    )


def test_nvml_leaves_out_a_card_that_fails(caplog):
    """A lost card is skipped, keeps the numbers of the others, and is logged for debugging."""
    caplog.set_level(logging.DEBUG)
    nvml = FakeNvml(card(), FakeNvml.NVMLError("GPU is lost"), card())
    assert [device.index for device in NvmlGpuInfo(nvml).devices()] == [0, 2]
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "GPU 1" in record.getMessage()
    assert "GPU is lost" in record.getMessage()


def test_nvml_figure_that_a_card_does_not_have():
    """A partitioned card has no utilisation of its own; its other figures stay."""
    unsupported = FakeNvml.NVMLError_NotSupported("Not Supported")
    (device,) = NvmlGpuInfo(FakeNvml(card(utilization=unsupported, memory=unsupported))).devices()
    assert device == GpuDevice(0, "NVIDIA L4", None, None, None, 58)


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (None, "pip install 'bge-m3-server[gpu]'"),
        (FakeNvml(init_error=FakeNvml.NVMLError("Driver Not Loaded")), "Driver Not Loaded"),
    ],
)
def test_nvml_unavailable_is_said_once(caplog, nvml, reason):
    """Without library or driver there is one warning, however often devices are asked for."""
    info = NvmlGpuInfo(nvml)
    assert [info.devices() for _ in range(3)] == [(), (), ()]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()


def test_nvml_that_cannot_count():
    """A driver that stops answering gives no devices and no error."""
    nvml = FakeNvml(card(), count_error=FakeNvml.NVMLError("Unknown Error"))
    assert NvmlGpuInfo(nvml).devices() == ()


def test_import_nvml_without_the_package(monkeypatch):
    """A missing package is None, not an error."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert import_nvml() is None
