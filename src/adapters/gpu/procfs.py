"""NVIDIA GPUs as the kernel driver lists them: a count, without any library."""

from pathlib import Path

import attrs

from ...domain.types import GpuDevice


@attrs.frozen
class ProcfsGpuInfo:
    """A `GpuInfo` that counts the entries of ``/proc/driver/nvidia/gpus``, one per device."""

    root: Path = Path("/")

    def devices(self) -> tuple[GpuDevice, ...]:
        """Devices by index alone; empty without the driver."""
        try:
            count = sum(1 for _ in (self.root / "proc/driver/nvidia/gpus").iterdir())
        except OSError:
            return ()
        return tuple(GpuDevice(index=index) for index in range(count))
