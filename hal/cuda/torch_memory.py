"""torch's CUDA memory pools behind the names of `hal.torch_pool.TorchMemory`."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hal.torch_pool import EXPANDABLE, TorchMemory, without_expandable

_SETTINGS = "ALLOC_CONF"
"""How torch's name for the whole setting ends, whatever the build."""


def torch_memory() -> TorchMemory:
    """CUDA's entries of the table."""
    return TorchMemory(
        make_pool=_make_pool,
        use=torch.cuda.use_mem_pool,
        snapshot=_snapshot,
        empty_cache=torch.cuda.empty_cache,
        enter=_switch_expandable_off,
        leave=_restore_settings,
        warm_up=_warm_up,
        is_capturing=torch.cuda.is_current_stream_capturing,
    )


def _make_pool(allocate: int, free: int, index: int) -> torch.cuda.MemPool:
    # A MemPool belongs to the current device; on another one torch would silently use its own
    # allocator.
    with torch.cuda.device(index):
        return torch.cuda.MemPool(_allocator(allocate, free))


@functools.cache
def _allocator(allocate: int, free: int) -> torch._C._cuda_CUDAAllocator:
    """torch's allocator object for a pair of entries: one a pair, kept for ever.

    A MemPool and the tensors that outlive it hold it by a bare pointer, and only the object that
    handed memory out takes it back. (`CUDAPluggableAllocator` takes the names of symbols, and does
    the same with their addresses.)
    """
    return torch._C._cuda_customAllocator(allocate, free)


@functools.cache
def _without_traces() -> dict[str, bool]:
    """The argument that leaves recorded stacks out, in versions of torch that have it."""
    has = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
    return {"include_traces": False} if has else {}


def _snapshot() -> Sequence[Mapping[str, Any]]:
    if not torch.cuda.is_initialized():
        return ()
    segments: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot(**_without_traces())
    return segments


def _switch_expandable_off() -> str | None:
    """Expandable segments bypass a pool's own allocator; returns the whole setting to restore."""
    if not torch.cuda.is_initialized():
        torch.cuda.init()
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    if not settings.get(EXPANDABLE):
        return None
    whole: str = next(text for name, text in settings.items() if name.endswith(_SETTINGS))
    _apply(without_expandable(whole))
    return whole


def _restore_settings(whole: str | None) -> None:
    if whole is not None:
        _apply(whole)


def _apply(settings: str) -> None:
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)


_warm = threading.local()


def _warm_up(index: int) -> None:
    """Run one small product, so that cuBLAS's workspace of this thread and stream lies outside the
    pools.

    torch allocates it in whatever pool is open at the first product on a stream and keeps it for
    ever: 32 MiB on Hopper, which would sleep with that pool.
    """
    device = torch.device("cuda", index)
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    done: set[tuple[int, int]] = _warm.__dict__.setdefault("streams", set())
    if key in done or torch.cuda.is_current_stream_capturing():
        return
    square = torch.ones(16, 16, device=device)
    torch.addmm(square[0], square, square @ square)
    done.add(key)
