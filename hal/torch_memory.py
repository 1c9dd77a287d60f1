"""torch's memory pools of a device type behind the names of `hal.torch_pool.TorchMemory`.

For every vendor whose builds of torch have these names in the device type's own module: CUDA's, and
ROCm's, which call it "cuda" as well.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hal.torch_pool import EXPANDABLE, ProcessScopes, TorchMemory, without_expandable

_SETTINGS = "ALLOC_CONF"
"""How torch's name for the whole setting ends, whatever the build."""


@functools.cache
def torch_memory(device_type: str) -> tuple[TorchMemory, ProcessScopes]:
    """One table and one count of scopes a process: torch's settings are the process's."""
    own = _DeviceModule(device_type)
    memory = TorchMemory(
        make_pool=own.make_pool,
        use=own.module.use_mem_pool,
        snapshot=own.snapshot,
        empty_cache=own.module.empty_cache,
        enter=own.switch_expandable_off,
        leave=own.restore_settings,
        warm_up=own.warm_up,
        is_capturing=own.module.is_current_stream_capturing,
    )
    return memory, ProcessScopes(memory)


class _DeviceModule:
    """torch's module of a device type, and the entries that take more than one call of it."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self.module: Any = torch.get_device_module(device_type)
        parameters = inspect.signature(self.module.memory_snapshot).parameters
        # The argument that leaves recorded stacks out, in versions of torch that have it.
        self._without_traces = {"include_traces": False} if "include_traces" in parameters else {}
        self._warm = threading.local()

    def make_pool(self, allocate: int, free: int, index: int) -> Any:
        # A MemPool belongs to the current device; on another one torch would silently use its own
        # allocator.
        with self.module.device(index):
            return self.module.MemPool(_allocator(self._type, allocate, free))

    def snapshot(self) -> Sequence[Mapping[str, Any]]:
        if not self.module.is_initialized():
            return ()
        segments: Sequence[Mapping[str, Any]] = self.module.memory_snapshot(**self._without_traces)
        return segments

    def switch_expandable_off(self) -> str | None:
        """Expandable segments bypass a pool's own allocator; returns the whole setting to
        restore.
        """
        if not self.module.is_initialized():
            self.module.init()
        settings = self.module.memory._snapshot()["allocator_settings"]
        if not settings.get(EXPANDABLE):
            return None
        whole: str = next(text for name, text in settings.items() if name.endswith(_SETTINGS))
        self._apply(without_expandable(whole))
        return whole

    def restore_settings(self, whole: str | None) -> None:
        if whole is not None:
            self._apply(whole)

    def _apply(self, settings: str) -> None:
        if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            torch._C._accelerator_setAllocatorSettings(settings)
        else:
            self.module.memory._set_allocator_settings(settings)

    def warm_up(self, index: int) -> None:
        """Run one small product, so that cuBLAS's workspace of this thread and stream lies outside
        the pools.

        torch allocates it in whatever pool is open at the first product on a stream and keeps it
        for ever: 32 MiB on Hopper, which would sleep with that pool.
        """
        device = torch.device(self._type, index)
        key = (index, self.module.current_stream(device).stream_id)
        done: set[tuple[int, int]] = self._warm.__dict__.setdefault("streams", set())
        if key in done or self.module.is_current_stream_capturing():
            return
        square = torch.ones(16, 16, device=device)
        torch.addmm(square[0], square, square @ square)
        done.add(key)


@functools.cache
def _allocator(device_type: str, allocate: int, free: int) -> Any:
    """torch's allocator object for a pair of entries: one a pair, kept for ever.

    A MemPool and the tensors that outlive it hold it by a bare pointer, and only the object that
    handed memory out takes it back. (A pluggable allocator takes the names of symbols, and does the
    same with their addresses.)
    """
    return getattr(torch._C, f"_{device_type}_customAllocator")(allocate, free)
