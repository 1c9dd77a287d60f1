"""Platforms on emulated devices: the vendor's own driver in libhal, over host memory."""

from __future__ import annotations

import functools
import os
from typing import ClassVar

from emulator import emucuda, emuhip, emuze
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


@functools.cache
def emulated_hip() -> emuhip.EmulatedHip:
    """The emulated libamdhip64 over the emulated libcuda."""
    return emuhip.EmulatedHip(emuhip.build(), emulated_cuda().path)


class EmulatedCudaPlatform(CpuPlatform):
    """The CUDA driver over the emulated libcuda; pools and nesting order are those of the host.

    `capacity` bounds what this platform may allocate beyond what the process holds already; `dirty`
    is the byte that fresh device memory holds.
    """

    name: ClassVar[str] = "cuda"
    driver: ClassVar[str] = "cuda"
    options: ClassVar[str] = ""
    """Of the driver, as it takes them."""

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
        emulator.reset()
        emulator.set_capacity(emulator.stats(index).used_bytes + self._capacity, index)
        emulator.set_poison(self._dirty)
        self._prepare()
        return Device(self.driver, index, self.options)

    def _prepare(self) -> None:
        """Let the driver find its emulated library."""
        os.environ["HAL_LIBCUDA"] = str(emulated_cuda().path)

    def _capabilities(self, index: int) -> Capabilities:
        no_graphs = Flag(False, "the emulator records no graphs")
        return capabilities_from(self, index, probe_nesting(self, index), "probed", no_graphs)


class EmulatedRocmPlatform(EmulatedCudaPlatform):
    """The ROCm driver over the emulated HIP runtime, with the quirks of some of its releases."""

    name: ClassVar[str] = "rocm"
    driver: ClassVar[str] = "rocm"
    options: ClassVar[str] = "chunk=4194304"

    def __init__(
        self,
        nesting: PoolNesting = PoolNesting.LIFO,
        *,
        quirks: tuple[str, ...] = (),
        capacity: int = CAPACITY,
        dirty: int = 0xA5,
    ) -> None:
        super().__init__(nesting, capacity=capacity, dirty=dirty)
        self._quirks = quirks

    def _prepare(self) -> None:
        runtime = emulated_hip()
        os.environ["HAL_LIBAMDHIP64"] = str(runtime.path)
        runtime.reset()
        runtime.set_quirks(*self._quirks)


@functools.cache
def emulated_xpu() -> emuze.EmulatedXpu:
    """The emulated Intel driver behind the real loader, built and loaded once a process."""
    return emuze.EmulatedXpu(emuze.build())


class EmulatedXpuPlatform(CpuPlatform):
    """The Level Zero driver over an emulated Intel GPU; pools are those of the host, in the order
    that torch's XPU allocator has.

    `claims` and `tag_from_scope` reproduce hazards, as in `CpuPlatform`.
    """

    name: ClassVar[str] = "xpu"
    driver: ClassVar[str] = "xpu"

    def __init__(
        self,
        nesting: PoolNesting = PoolNesting.FIFO,
        *,
        claims: PoolNesting | None = None,
        tag_from_scope: bool = False,
        capacity: int = CAPACITY,
        dirty: int = 0xA5,
    ) -> None:
        super().__init__(nesting, claims=claims, tag_from_scope=tag_from_scope)
        self._capacity, self._dirty = capacity, dirty

    def _open(self, index: int) -> Device:
        emulator = emulated_xpu()
        emulator.reset()
        emulator.set(total=emulator.used_bytes() + self._capacity, poison=self._dirty)
        return Device(self.driver, index, "")
