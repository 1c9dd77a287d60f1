"""The plain copies that transitions are measured against, and the cost of host memory for them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import hal
from hal.native import Device
from hal.pools import torch_device

MIB = 1 << 20
PAGE, HUGE_PAGE = 4096, 2 * MIB
NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python's `mmap` does not name: a machine's memory may grow as it is used."""
REGISTERED_AT_ONCE = 128 * MIB
LINK_BYTES = 4096 * MIB
"""Bytes of one copy over an accelerator's link: enough that its start does not count."""
LINK_COPIES = 3


class Link(Protocol):
    """Plain copies between device and host; both return bytes a second."""

    def copy_out(self) -> float:
        """Device memory to host memory."""

    def copy_in(self) -> float:
        """Host memory to device memory."""


def link_of(platform: hal.Platform, size: int) -> Link:
    """The link of a platform: where device and host memory are the same, copies of `size` bytes."""
    if platform.capabilities.unified_memory:
        return HostLink(size)
    return PinnedLink(platform, min(size, LINK_BYTES))


class PinnedLink:
    """An accelerator's link: copies between device memory and pinned host memory, both there.

    The fastest of a few copies counts, so that the bound is the link and not a disturbance.
    """

    def __init__(self, platform: hal.Platform, size: int) -> None:
        self.size, self._device = size, platform.device()
        self._there = torch.ones(size, dtype=torch.uint8, device=torch_device(platform, 0))
        self._here = torch.ones(size, dtype=torch.uint8, pin_memory=True)

    def copy_out(self) -> float:
        return self._fastest(self._here, self._there)

    def copy_in(self) -> float:
        return self._fastest(self._there, self._here)

    def _fastest(self, target: torch.Tensor, source: torch.Tensor) -> float:
        return max(self._rate(target, source) for _ in range(LINK_COPIES))

    def _rate(self, target: torch.Tensor, source: torch.Tensor) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        self._device.synchronize()
        return self.size / (time.perf_counter() - start)


class HostLink:
    """The host's link: one memcpy between a memfd, its device memory, and anonymous memory.

    Both sides of the comparison pay for fresh pages: a sleep writes into host memory that it has
    just taken, a wake into device memory that it has just created, and so does each copy here.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        with self._memfd() as device, self._anonymous() as host:
            ctypes.memset(_address(device), 1, size)
            ctypes.memset(_address(host), 2, size)

    def copy_out(self) -> float:
        with self._memfd() as device:
            ctypes.memset(_address(device), 1, self.size)
            return self._rate(self._anonymous, device)

    def copy_in(self) -> float:
        with self._anonymous() as host:
            ctypes.memset(_address(host), 2, self.size)
            return self._rate(self._memfd, host)

    def _rate(self, fresh: Callable[[], Any], source: mmap.mmap) -> float:
        start = time.perf_counter()
        with fresh() as target:
            ctypes.memmove(_address(target), _address(source), self.size)
            return self.size / (time.perf_counter() - start)

    @contextmanager
    def _anonymous(self) -> Iterator[mmap.mmap]:
        with mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            yield memory

    @contextmanager
    def _memfd(self) -> Iterator[mmap.mmap]:
        file = os.memfd_create("bench")
        try:
            os.ftruncate(file, self.size)
            with mmap.mmap(file, self.size, flags=mmap.MAP_SHARED) as memory:
                yield memory
        finally:
            os.close(file)


def _address(memory: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(memory)
    return ctypes.addressof(view)


@dataclass(frozen=True)
class HostCost:
    """Seconds to make host memory ready for copies at the speed of the link."""

    touch: float
    register: float

    @property
    def seconds(self) -> float:
        return self.touch + self.register


def touch_and_register(device: Device, size: int) -> HostCost:
    """Touch `size` bytes of huge pages with all cores, and register them in chunks; all is given
    back.
    """
    memory = huge_pages(size)
    start = time.perf_counter()
    touch(memory)
    touched = time.perf_counter()
    chunks = [
        (memory.data_ptr() + offset, min(REGISTERED_AT_ONCE, size - offset))
        for offset in range(0, size, REGISTERED_AT_ONCE)
    ]
    for address, length in chunks:
        device.host_register(address, length)
    registered = time.perf_counter()
    for address, length in chunks:
        device.host_unregister(address, length)
    return HostCost(touched - start, registered - touched)


def warm_host_memory(size: int) -> float:
    """Touch `size` bytes once and give them back; returns seconds.

    A virtual machine may get its memory from its host only at the first touch ever, many times
    slower than any later one: every measurement of fresh pages comes after this.
    """
    memory, start = huge_pages(size), time.perf_counter()
    touch(memory)
    return time.perf_counter() - start


def touch(memory: torch.Tensor) -> None:
    """Write a byte of each page with all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or threads)
    memory[::PAGE].fill_(1)
    torch.set_num_threads(threads)


def huge_pages(size: int) -> torch.Tensor:
    """Fresh anonymous memory that begins at a huge page, as bytes; it goes with the tensor."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + size]
