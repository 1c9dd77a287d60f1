"""Platforms on emulated devices: the vendor's own driver in libhal, over host memory."""

from __future__ import annotations

import functools
import os
from typing import ClassVar

from emulator import emucuda
from hal.capabilities import capabilities_from
from hal.cpu.platform import CpuPlatform
from hal.native import Device
from hal.platform import Capabilities, Flag, PoolNesting
from hal.pools import probe_nesting

CAPACITY = 1 << 30


@functools.cache
def emulated_cuda() -> emucuda.EmulatedCuda:
    """The emulated libcuda, built and loaded once a process."""
    return emucuda.EmulatedCuda(emucuda.build())


class EmulatedCudaPlatform(CpuPlatform):
    """The CUDA driver over the emulated libcuda; pools and nesting order are those of the host.

    `capacity` bounds what this platform may allocate beyond what the process holds already; `dirty`
    is the byte that fresh device memory holds.
    """

    name: ClassVar[str] = "cuda"

    def __init__(
        self,
        nesting: PoolNesting = PoolNesting.LIFO,
        *,
        capacity: int = CAPACITY,
        dirty: int = 0xA5,
    ) -> None:
        super().__init__(nesting)
        self._capacity, self._dirty = capacity, dirty

    def _open(self, index: int) -> Device:
        emulator = emulated_cuda()
        os.environ["HAL_LIBCUDA"] = str(emulator.path)
        emulator.reset()
        device = Device("cuda", index, "")
        emulator.set_capacity(emulator.stats(index).used_bytes + self._capacity, index)
        emulator.set_poison(self._dirty)
        return device

    def _capabilities(self, index: int) -> Capabilities:
        no_graphs = Flag(False, "the emulator records no graphs")
        return capabilities_from(self, index, probe_nesting(self, index), "probed", no_graphs)
