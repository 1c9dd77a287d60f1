"""torch's XPU memory pools behind the names of `hal.torch_pool.TorchMemory`, and what they lack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hal.errors import HalError, OutOfDeviceMemory
from hal.native import ALL_STREAMS, Arena, Device, Order, TransferReport
from hal.pools import storage_address
from hal.torch_pool import EXPANDABLE, ProcessScopes, TorchMemory, TorchPool, without_expandable

NO_GRAPHS = "torch's XPU graphs replay SYCL commands, and no test has let their memory sleep"

_SETTINGS = "PYTORCH_ALLOC_CONF"
_ASSERTION = "INTERNAL ASSERT"
"""In the text of torch's errors about itself, such as a block without an address."""
_BEYOND_ANY_DEVICE = 1 << 59
"""Bytes that no device has, and no allocator takes for a mistake of its caller."""


def torch_memory() -> TorchMemory:
    """XPU's entries of the table."""
    return TorchMemory(
        make_pool=_make_pool,
        use=torch.xpu.use_mem_pool,
        snapshot=_snapshot,
        empty_cache=torch.xpu.empty_cache,
        enter=_switch_expandable_off,
        leave=_restore_settings,
        warm_up=lambda _: torch.xpu.init(),  # a scope changes the settings of a torch that runs
        is_capturing=_is_capturing,
        no_capture=NO_GRAPHS,
    )


def queue_address(index: int) -> int:
    """The address of torch's `sycl::queue` on a device; starts torch's XPU runtime."""
    return int(torch.xpu.current_stream(index).sycl_queue)


def device_uuid(index: int) -> str:
    """The device's UUID as 32 hexadecimal digits, as Level Zero has it."""
    return bytes(torch.xpu.get_device_properties(index).uuid.bytes).hex()


def _make_pool(allocate: int, free: int, index: int) -> Any:
    with torch.xpu.device(index):
        return torch.xpu.MemPool(_allocator(allocate, free))


@functools.cache
def _allocator(allocate: int, free: int) -> Any:
    """torch's allocator object for a pair of entries: one a pair, kept for ever.

    A MemPool, and the tensors that outlive it, hold it by a bare pointer. (`XPUPluggableAllocator`
    takes the names of symbols, and does the same with their addresses.)
    """
    return torch._C._xpu_customAllocator(allocate, free)


def _is_capturing() -> bool:
    return torch.xpu.is_initialized() and bool(torch.xpu.is_current_stream_capturing())


def _snapshot() -> Sequence[Mapping[str, Any]]:
    if not torch.xpu.is_initialized():
        return ()
    segments: Sequence[Mapping[str, Any]] = torch.xpu.memory_snapshot()
    return segments


def _switch_expandable_off() -> str | None:
    """torch refuses a MemPool while segments are expandable; returns the setting to restore."""
    settings = torch.xpu.memory._snapshot().get("allocator_settings", {})
    if not settings.get(EXPANDABLE):
        return None
    whole: str = settings[_SETTINGS]
    torch._C._accelerator_setAllocatorSettings(without_expandable(whole))
    return whole


def _restore_settings(whole: str | None) -> None:
    if whole is not None:
        torch._C._accelerator_setAllocatorSettings(whole)


class XpuDevice(Device):
    """A device whose torch streams are waited for before its memory goes.

    Level Zero waits only for queues that it is shown, so torch, which knows its own, is asked.
    """

    def sleep(self, arena: Arena | None, orders: Sequence[Order]) -> TransferReport:
        self._wait_for_torch()
        return super().sleep(arena, orders)

    def synchronize(self, stream: int = ALL_STREAMS) -> None:
        if stream == ALL_STREAMS:
            self._wait_for_torch()
        super().synchronize(stream)

    def _wait_for_torch(self) -> None:
        if torch.xpu.is_initialized():
            torch.xpu.synchronize(self.index)


class XpuPool(TorchPool):
    """A pool of XPU memory.

    With `guarded`, for torch builds that hand out a tensor whose allocation failed, such a tensor
    never leaves a scope.
    """

    def __init__(
        self,
        device: Device,
        tag: str,
        memory: TorchMemory,
        scopes: ProcessScopes,
        *,
        guarded: bool = True,
    ) -> None:
        self._guarded = guarded
        super().__init__(device, tag, memory, scopes)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with super()._scope(), _NullGuard(self._failed) if self._guarded else nullcontext():
            yield

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        # A failure that torch has got over, by giving back what it cached, explains no later one.
        self.device.take_pool_error(self.id)
        with super()._surroundings():
            try:
                yield
            except RuntimeError as error:
                is_torchs = _ASSERTION in str(error)
                failure = self.device.take_pool_error(self.id, tag=self.tag) if is_torchs else None
                if failure is None:
                    raise
                raise failure from error

    def _failed(self, size: int) -> HalError:
        """The error for an allocation of `size` bytes that came back as NULL."""
        failure = self.device.take_pool_error(self.id, tag=self.tag)
        return failure or OutOfDeviceMemory(self.tag, size, None, "torch was given no memory")


class _NullGuard(TorchDispatchMode):
    """Raises in place of returning a tensor whose storage has bytes and no address."""

    device_type = "xpu"

    def __init__(self, failure: Callable[[int], HalError]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._failure = failure

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _is_missing(tensor, self.device_type):
                raise self._failure(tensor.untyped_storage().nbytes())
        return result


def _is_missing(tensor: torch.Tensor, device_type: str) -> bool:
    if tensor.device.type != device_type or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > 0 and not storage_address(tensor)


def stores_null(pool: XpuPool) -> bool:
    """Whether this torch build makes a tensor of an allocation that failed; `pool` has no guard.

    Asks for more than any device has: nothing is launched on what comes back.
    """
    try:
        with pool.use():
            place = torch.device("xpu", pool.device.index)
            tensor = torch.empty(_BEYOND_ANY_DEVICE, dtype=torch.uint8, device=place)
    except (HalError, RuntimeError):
        return False
    return not storage_address(tensor)
