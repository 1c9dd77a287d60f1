"""The `cuda` platform: NVIDIA GPUs through the driver's virtual memory and torch's memory pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hal.capabilities import capabilities_from
from hal.cuda import nvcomp, telemetry
from hal.memory import MemoryInfo, TorchUsage
from hal.native import Codec, Device, Fact
from hal.platform import Capabilities, Flag, Platform
from hal.pools import probe_nesting

if TYPE_CHECKING:
    from hal.cuda.checkpoint import CudaCheckpoint
    from hal.torch_pool import TorchPool


class CudaPlatform(Platform):
    """NVIDIA GPUs.

    `chunk` is the largest physical piece in bytes: small ones overlap better with copies, large
    ones cost fewer calls.
    """

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, *, chunk: int | None = None) -> None:
        super().__init__()
        self._options = "" if chunk is None else f"chunk={chunk}"
        self._count: int | None = None

    @classmethod
    def why_not(cls) -> str | None:
        """What is missing for this platform; None when it can be used."""
        return telemetry.why_not()

    def device_count(self) -> int:
        # The visible list counts until a device is open; a change after that comes too late, as in
        # CUDA itself.
        return telemetry.device_count() if self._count is None else self._count

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

    def torch_usage(self, device: int = 0) -> TorchUsage:
        from hal.torch_memory import torch_memory
        from hal.torch_pool import usage_outside

        memory, _ = torch_memory(self.device_type)
        return usage_outside(memory, self.device(device))

    def create_pool(self, tag: str, device: int = 0) -> TorchPool:
        from hal.torch_memory import torch_memory
        from hal.torch_pool import TorchPool

        return TorchPool(self.device(device), tag, *torch_memory(self.device_type))

    def codec(self, name: str, kind: str) -> Codec:
        return nvcomp.codec(name, kind)

    def process_checkpoint(self) -> CudaCheckpoint:
        from hal.cuda.checkpoint import CudaCheckpoint

        return CudaCheckpoint(self.open_devices())

    def _open(self, index: int) -> Device:
        count = telemetry.device_count()
        device = Device(self.name, index, self._options)
        self._count = count
        return device

    def _capabilities(self, index: int) -> Capabilities:
        facts = self.device(index).facts
        vmm = Fact.VMM in facts.yes
        graphs = Flag(True) if vmm else Flag(False, facts.why_not[Fact.VMM])
        return capabilities_from(self, index, probe_nesting(self, index), "probed", graphs)
