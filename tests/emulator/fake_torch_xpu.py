"""What of `torch.xpu` the XPU room uses, as a torch built for XPU has it, over an emulated GPU.

Tensors are host tensors over emulated device memory, `device="xpu"` included. The allocator gives
memory to the outermost scope, refuses MemPools while segments are expandable, and can hand out
tensors whose allocation failed.
"""

from __future__ import annotations

import ctypes as c
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal.caching import CachingAllocator
from hal.host_pool import ScopeStack, _Rehome
from hal.platform import PoolNesting

if TYPE_CHECKING:
    import pytest

    from emulator.emuze import EmulatedXpu

_ALLOCATE = c.CFUNCTYPE(c.c_void_p, c.c_ssize_t, c.c_int, c.c_void_p)
_FREE = c.CFUNCTYPE(None, c.c_void_p, c.c_ssize_t, c.c_int, c.c_void_p)


class NoMemoryError(Exception):
    """The pool's entry returned NULL."""


class _Segments:
    """What a pair of entries has given; it outlives the pool whose tensors are still there."""

    def __init__(self, entries: tuple[int, int], device: int) -> None:
        self._allocate, self._free = _ALLOCATE(entries[0]), _FREE(entries[1])
        self._device = device
        self.sizes: dict[int, int] = {}

    def grow(self, size: int) -> int:
        address = self._allocate(size, self._device, None)
        if not address:
            raise NoMemoryError
        self.sizes[address] = size
        return int(address)

    def give_back(self, address: int) -> None:
        self._free(address, self.sizes.pop(address), self._device, None)


class MemPool:
    """A `torch.xpu.MemPool` over a pair of entries."""

    made = 0

    def __init__(self, fake: FakeTorchXpu, entries: tuple[int, int]) -> None:
        MemPool.made += 1
        self.id = (0, MemPool.made)
        self._fake, self.device = fake, fake.current_device
        self._segments = _Segments(entries, self.device)
        self._allocator = CachingAllocator(self._segments.grow, self._segments.give_back)
        weakref.finalize(self, self._allocator.close)

    def holds(self, address: int) -> bool:
        return self._allocator.contains(address)

    def storage(self, size: int) -> torch.UntypedStorage:
        address = self._allocator.allocate(size)
        buffer = (c.c_uint8 * size).from_address(address)
        weakref.finalize(buffer, self._allocator.free, address).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def empty_like(self, shape: torch.Tensor) -> torch.Tensor:
        size = shape.untyped_storage().nbytes()
        if not size:
            return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        try:
            storage = self.storage(size)
        except NoMemoryError as error:
            if self._fake.stores_null:
                return shape  # a meta tensor: it has bytes and no address
            raise torch.OutOfMemoryError("XPU out of memory. Tried to allocate") from error
        tensor = torch.empty(0, dtype=shape.dtype)
        return tensor.set_(storage, shape.storage_offset(), shape.shape, shape.stride())

    def segments(self) -> Iterator[Mapping[str, Any]]:
        for address, live in self._allocator.snapshot().live.items():
            size = self._segments.sizes[address]
            yield {
                "device": self.device,
                "address": address,
                "total_size": size,
                "segment_pool_id": self.id,
                "blocks": list(_blocks(live, size)),
            }


def _blocks(live: Any, size: int) -> Iterator[dict[str, Any]]:
    end = 0
    for offset, length in live:
        if offset > end:
            yield {"size": offset - end, "state": "inactive"}
        yield {"size": length, "state": "active_allocated"}
        end = offset + length
    if end < size:
        yield {"size": size - end, "state": "inactive"}


class AsHost(TorchDispatchMode):
    """Puts what asks for an XPU device on the host; outside the pools a test has to enter it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if getattr(keywords.get("device"), "type", None) == "xpu":
            keywords["device"] = torch.device("cpu")
        return func(*args, **keywords)


class FakeTorchXpu:
    """The state of the fake, and its installation into `torch`."""

    def __init__(self, emulator: EmulatedXpu, order: PoolNesting = PoolNesting.FIFO) -> None:
        self.emulator, self.stack = emulator, ScopeStack(order)
        self.stores_null = False
        self.initialized = False
        self.settings = ""
        self.applied: list[str] = []
        self.synchronized: list[int] = []
        self.current_device = 0
        self.count = 1
        self._pools: weakref.WeakSet[MemPool] = weakref.WeakSet()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let `torch.xpu` be this fake until the test ends."""
        functions: dict[str, Callable[..., Any]] = {
            "init": self._init,
            "_lazy_init": self._init,
            "is_initialized": lambda: self.initialized,
            "is_current_stream_capturing": lambda: False,
            "device_count": lambda: self.count,
            "current_stream": self._current_stream,
            "synchronize": lambda device=None: self.synchronized.append(device),
            "get_device_properties": self._properties,
            "mem_get_info": self._mem_get_info,
            "MemPool": self._mem_pool,
            "use_mem_pool": self._use,
            "memory_snapshot": self._snapshot,
            "empty_cache": lambda: None,
            "device": self._on_device,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.xpu, name, function)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.xpu.memory, "_snapshot", self._whole_snapshot)
        monkeypatch.setattr(
            torch._C, "_xpu_customAllocator", lambda *entries: entries, raising=False
        )
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self._apply)

    def _init(self) -> None:
        self.initialized = True

    def _current_stream(self, device: int = 0) -> Any:
        self._init()
        return SimpleNamespace(sycl_queue=self.emulator.queue(device))

    def _properties(self, device: int = 0) -> Any:
        uuid = [device, *[0x22] * 14, 0]
        return SimpleNamespace(uuid=SimpleNamespace(bytes=uuid))

    def _mem_get_info(self, device: int = 0) -> tuple[int, int]:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    def _mem_pool(self, entries: tuple[int, int]) -> MemPool:
        pool = MemPool(self, entries)
        self._pools.add(pool)
        return pool

    @contextmanager
    def _on_device(self, device: int) -> Iterator[None]:
        before, self.current_device = self.current_device, device
        try:
            yield
        finally:
            self.current_device = before

    @contextmanager
    def _use(self, pool: Any, device: int = 0) -> Iterator[None]:
        if "expandable_segments:True" in self.settings:
            raise RuntimeError("torch.xpu.MemPool doesn't currently support expandable_segments.")
        if device != pool.device:
            raise RuntimeError(f"this MemPool is on device {pool.device}, not on {device}")
        self.stack.open.append(pool)
        try:
            with nullcontext() if len(self.stack.open) > 1 else _Rehome(self.stack), AsHost():
                yield
        finally:
            self.stack.open.remove(pool)

    def _snapshot(self) -> list[Mapping[str, Any]]:
        return [segment for pool in self._pools for segment in pool.segments()]

    def _whole_snapshot(self) -> dict[str, Any]:
        expandable = "expandable_segments:True" in self.settings
        settings = {"PYTORCH_ALLOC_CONF": self.settings, "expandable_segments": expandable}
        return {"segments": self._snapshot(), "allocator_settings": settings}

    def _apply(self, settings: str) -> None:
        self.settings = settings
        self.applied.append(settings)
