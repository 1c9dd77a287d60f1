"""The ROCm driver over the HIP-on-CUDA runtime and a real CUDA driver, with CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from hal.cuda import telemetry
from hal.cuda.platform import CudaPlatform
from hal.memory import MemoryInfo
from hal.rocm.platform import RocmPlatform


class RocmOnCudaPlatform(RocmPlatform):
    """Everything is ROCm's but what looks for the device and for its memory from outside."""

    name: ClassVar[str] = "rocm-on-cuda"

    @classmethod
    def why_not(cls) -> str | None:
        return CudaPlatform.why_not()

    @classmethod
    def missing(cls) -> tuple[str, ...]:
        return CudaPlatform.missing()

    @classmethod
    def notices(cls) -> Iterator[str]:
        yield "this is the ROCm driver on a CUDA device: nothing here is true of an AMD GPU"

    def device_count(self) -> int:
        return telemetry.device_count()

    def get_memory_info(self, device: int = 0) -> MemoryInfo:
        opened = self._devices.get(device)
        if opened is None:
            return telemetry.memory_info(device)
        return telemetry.memory_info(
            device,
            device_id=opened.facts.device_uuid or None,
            driver=opened.memory,
            tracked=opened.counters().mapped_bytes,
        )
