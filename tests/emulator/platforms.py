"""Platforms on emulated devices: the vendor's own driver in libhal, over host memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from emulator import emucuda, emuhip, emunvcomp, emuze
from hal.capabilities import capabilities_from
from hal.cpu.platform import CpuPlatform
from hal.cuda import nvcomp
from hal.cuda.checkpoint import CudaCheckpoint
from hal.memory import MemoryInfo
from hal.native import Codec, Device
from hal.platform import Capabilities, Flag, Platform, PoolNesting
from hal.pools import probe_nesting
from hal.process_checkpoint import ProcessCheckpoint

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
        self.emulated_total = 0
        self.taken = 0
        """Device memory that other processes hold, as the management library would tell."""

    def process_checkpoint(self) -> ProcessCheckpoint:
        return EmulatedCheckpoint(self) if self.capabilities.park else super().process_checkpoint()

    def _open(self, index: int) -> Device:
        emulator = emulated_cuda()
        emulator.reset()
        self.emulated_total = emulator.stats(index).used_bytes + self._capacity
        emulator.set_capacity(self.emulated_total, index)
        emulator.set_poison(self._dirty)
        self._prepare()
        return Device(self.driver, index, self.options)

    def _prepare(self) -> None:
        """Let the driver find its emulated library."""
        os.environ["HAL_LIBCUDA"] = str(emulated_cuda().path)

    def codec(self, name: str, kind: str) -> Codec:
        """The real driver's codec, over an emulated nvCOMP."""
        os.environ[nvcomp.VARIABLE] = str(emunvcomp.build())
        return nvcomp.codec(name, kind)

    def _capabilities(self, index: int) -> Capabilities:
        no_graphs = Flag(False, "the emulator records no graphs")
        return capabilities_from(self, index, probe_nesting(self, index), "probed", no_graphs)


class EmulatedCheckpoint(CudaCheckpoint):
    """CUDA's checkpoint over the emulated libcuda, with memory figures as NVML would give them.

    The context is worth `CONTEXT` bytes until the process is checkpointed; `taken` is what other
    processes hold.
    """

    CONTEXT: ClassVar[int] = 64 << 20
    SMALLEST: ClassVar[int] = 4 << 20

    def __init__(self, platform: EmulatedCudaPlatform) -> None:
        super().__init__(platform.open_devices())
        self._platform = platform
        self.process = emucuda.EmulatedProcess(Path(os.environ["EMUCUDA_PROCESSES"]), os.getpid())

    def memory(self) -> Mapping[int, MemoryInfo]:
        pools = emulated_cuda().stats().used_bytes
        own = pools + (self.SMALLEST if self.process.state == 2 else self.CONTEXT)
        total = self._platform.emulated_total + self.CONTEXT
        free = total - own - self._platform.taken
        return {0: MemoryInfo(total, free, own, "emulated", True)}


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

    def codec(self, name: str, kind: str) -> Codec:
        return Platform.codec(self, name, kind)

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

    def codec(self, name: str, kind: str) -> Codec:
        return Platform.codec(self, name, kind)

    def _open(self, index: int) -> Device:
        emulator = emulated_xpu()
        emulator.reset()
        emulator.set(total=emulator.used_bytes() + self._capacity, poison=self._dirty)
        return Device(self.driver, index, "")
