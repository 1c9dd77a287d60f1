"""The `xpu` platform: Intel GPUs through Level Zero's virtual memory and torch's memory pools."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from hal.capabilities import capabilities_from
from hal.errors import Unsupported
from hal.memory import MemoryInfo, TorchUsage
from hal.native import Device, Fact
from hal.platform import Capabilities, Flag, Platform, PoolNesting
from hal.pools import probe_nesting
from hal.xpu import installation, telemetry
from hal.xpu.identity import device_count, target_of
from hal.xpu.own_context import why_not_reached

if TYPE_CHECKING:
    from hal.torch_pool import ProcessScopes, TorchMemory
    from hal.xpu.torch_memory import XpuPool


class XpuPlatform(Platform):
    """Intel GPUs.

    `chunk` is the largest physical piece in bytes, where the device's own limit is not wanted.
    `trust_own_context` takes a context of the driver's own without a trial where torch's cannot be
    had.
    """

    name: ClassVar[str] = "xpu"
    device_type: ClassVar[str] = "xpu"

    def __init__(self, *, chunk: int | None = None, trust_own_context: bool = False) -> None:
        super().__init__()
        self._options = "" if chunk is None else f";chunk={chunk}"
        self._trusts = trust_own_context
        self._no_context: dict[int, str] = {}
        self._guarded: dict[int, bool] = {}

    @classmethod
    def missing(cls) -> tuple[str, ...]:
        return installation.missing()

    @classmethod
    def why_not(cls) -> str | None:
        """What is missing for this platform; None when it can be used."""
        return "; ".join(cls.missing()) or None

    @classmethod
    def notices(cls) -> Iterator[str]:
        yield from installation.notices(device_count(telemetry.sysman))

    def device_count(self) -> int:
        return device_count(telemetry.sysman)

    def device(self, index: int = 0) -> Device:
        if index not in self._devices:
            import torch

            torch.xpu.init()  # from now on torch's count of devices is the one that holds
        return super().device(index)

    def get_memory_info(self, device: int = 0) -> MemoryInfo:
        return telemetry.memory_info(target_of(device, self._devices.get(device)))

    def torch_usage(self, device: int = 0) -> TorchUsage:
        from hal.torch_pool import usage_outside

        return usage_outside(_torch(), self.device(device))

    def create_pool(self, tag: str, device: int = 0) -> XpuPool:
        opened = self.device(device)
        if why_not := self._why_no_virtual_memory(device):
            raise Unsupported("a pool", self.name, why_not)
        if device not in self._guarded:
            self._guarded[device] = self._needs_guard(device)
        return self._new_pool(opened, tag, guarded=self._guarded[device])

    def _new_pool(self, device: Device, tag: str, *, guarded: bool) -> XpuPool:
        from hal.xpu.torch_memory import XpuPool

        return XpuPool(device, tag, _torch(), _scopes(), guarded=guarded)

    def _needs_guard(self, index: int) -> bool:
        from hal.xpu.torch_memory import stores_null

        pool = self._new_pool(self.device(index), "probe-failure", guarded=False)
        try:
            return stores_null(pool)
        finally:
            pool.close()

    def _open(self, index: int) -> Device:
        from hal.xpu.torch_memory import XpuDevice, device_uuid, queue_address

        try:
            return XpuDevice(self.name, index, f"queue={queue_address(index)}{self._options}")
        except Unsupported as error:
            opened = XpuDevice(self.name, index, f"uuid={device_uuid(index)}{self._options}")
            if not self._trusts and (why_not := why_not_reached(index)):
                self._no_context[index] = (
                    f"torch's context cannot be had ({error.why}), and its kernels do not reach "
                    f"memory of another one: {why_not}"
                )
            return opened

    def _why_no_virtual_memory(self, index: int) -> str:
        facts = self.device(index).facts
        return self._no_context.get(index) or facts.why_not.get(Fact.VMM, "")

    def _capabilities(self, index: int) -> Capabilities:
        from hal.xpu.torch_memory import NO_GRAPHS

        graphs = Flag(False, NO_GRAPHS)
        if why_not := self._why_no_virtual_memory(index):
            no = Flag(False, why_not)
            return capabilities_from(
                self, index, PoolNesting.FIFO, "declared", graphs, virtual_memory=no
            )
        telemetry.probe_sources(index, self.device(index))
        return capabilities_from(self, index, probe_nesting(self, index), "probed", graphs)


@functools.cache
def _torch() -> TorchMemory:
    from hal.xpu.torch_memory import torch_memory

    return torch_memory()


@functools.cache
def _scopes() -> ProcessScopes:
    """One count of scopes a process: torch's settings are the process's."""
    from hal.torch_pool import ProcessScopes

    return ProcessScopes(_torch())
