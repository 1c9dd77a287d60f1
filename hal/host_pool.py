"""Pools of host memory: a dispatch mode that puts every new storage of this thread into the pool of
the open scope.

torch has no pools for CPU tensors, so a `TorchDispatchMode` does it here: factory functions
allocate in the pool at once, and a result of any other operator whose storage is new is moved
there. Views, aliases and `out=` keep their storage. What the dispatcher never sees stays outside:
`torch.frombuffer`, `from_numpy`, memory-mapped files, memory that a library keeps opaquely
(oneDNN's packed weights), and storages that are resized after they were made empty.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hal.caching import CachingAllocator
from hal.native import Device
from hal.platform import PoolNesting
from hal.pools import Pool, Snapshot, storage_address

_aten = torch.ops.aten


class ScopeStack:
    """The open scopes of each thread and which of them gets an allocation.

    `tag_from_scope` reproduces what engines without a pool per tag do: blocks follow the nesting
    order, but a new segment gets the tag of the innermost scope.
    """

    def __init__(
        self, order: PoolNesting = PoolNesting.LIFO, *, tag_from_scope: bool = False
    ) -> None:
        self.order, self.tag_from_scope = order, tag_from_scope
        self._local = threading.local()

    @property
    def open(self) -> list[HostPool]:
        if not hasattr(self._local, "open"):
            self._local.open = []
        pools: list[HostPool] = self._local.open
        return pools

    def target(self) -> HostPool:
        """The pool that gets an allocation now."""
        return self.open[0 if self.order is PoolNesting.FIFO else -1]

    def entry(self, pool: int) -> int:
        """The native pool whose entry serves a new segment of native pool `pool`."""
        return self.open[-1].id if self.tag_from_scope and self.open else pool


class HostPool(Pool):
    """A pool of host memory over the native ledger."""

    def __init__(self, device: Device, tag: str, scopes: ScopeStack) -> None:
        super().__init__(device, tag)
        self._stack = scopes
        # Neither holds this pool: it may go while tensors that live in it stay.
        grow = partial(_grow, device, scopes, self.id, tag)
        self._allocator = CachingAllocator(grow, device.free)
        weakref.finalize(self, self._allocator.close)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self._stack.open.append(self)
        try:
            if len(self._stack.open) > 1:
                yield
            else:
                with _Rehome(self._stack):
                    yield
        finally:
            self._stack.open.remove(self)

    @property
    def generation(self) -> int:
        return self._allocator.generation

    def snapshot(self) -> Snapshot:
        return replace(self._allocator.snapshot(), segments=tuple(self.segments()))

    def trim(self) -> int:
        return self._allocator.trim()

    def close(self) -> None:
        super().close()
        self._allocator.close()

    def holds(self, address: int) -> bool:
        """Whether this pool's blocks may contain the address, whatever tag its segment has."""
        return self._allocator.contains(address)

    def storage(self, size: int) -> torch.UntypedStorage:
        """A storage of `size` bytes in this pool; its block returns to the pool when the storage
        dies.
        """
        address = self._allocator.allocate(size)
        buffer = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(buffer, self._allocator.free, address).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def empty_like(self, shape: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor in this pool with the shape, strides and dtype of a (meta)
        tensor.
        """
        size = shape.untyped_storage().nbytes()
        return _over(self.storage(size), shape) if size else _empty(shape)


def _grow(device: Device, scopes: ScopeStack, pool: int, tag: str, size: int) -> int:
    return device.allocate(scopes.entry(pool), size, tag=tag)


def _empty(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")


def _over(storage: torch.UntypedStorage, shape: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=shape.dtype)
    return tensor.set_(storage, shape.storage_offset(), shape.shape, shape.stride())


Fill = Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], object]


def _random_bounds(arguments: tuple[Any, ...], first: int) -> tuple[int, int]:
    """(low, high) of a randint overload: `high, size` or `low, high, size`, from position `first`
    on.
    """
    numbers = [value for value in arguments[first:] if isinstance(value, int)]
    return (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _generator(keywords: dict[str, Any]) -> dict[str, Any]:
    return {"generator": keywords.get("generator")}


# How each factory fills the memory it gets; the result is bit-equal to the factory's own.
_FACTORIES: dict[str, Fill] = {
    "empty": lambda out, args, kw: out,
    "zeros": lambda out, args, kw: out.zero_(),
    "ones": lambda out, args, kw: out.fill_(1),
    "full": lambda out, args, kw: out.fill_(kw["fill_value"] if "fill_value" in kw else args[1]),
    "new_full": lambda out, args, kw: out.fill_(
        kw["fill_value"] if "fill_value" in kw else args[2]
    ),
    "rand": lambda out, args, kw: out.uniform_(0, 1, **_generator(kw)),
    "randn": lambda out, args, kw: out.normal_(0, 1, **_generator(kw)),
    "randint": lambda out, args, kw: out.random_(*_random_bounds(args, 0), **_generator(kw)),
}
_NAMES = {
    "empty_strided": "empty",
    "empty_like": "empty",
    "new_empty": "empty",
    "new_empty_strided": "empty",
    "zeros_like": "zeros",
    "new_zeros": "zeros",
    "ones_like": "ones",
    "new_ones": "ones",
    "full_like": "full",
    "rand_like": "rand",
    "randn_like": "randn",
}


def _fill_of(func: Any) -> Fill | None:
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    return None if "out" in overload else _FACTORIES.get(_NAMES.get(name, name))


class _Rehome(TorchDispatchMode):
    """Puts new storages into the pool that the scope stack names."""

    def __init__(self, scopes: ScopeStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scopes = scopes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if (fill := _fill_of(func)) and _makes_host_tensor(args, keywords):
            shape = func(*args, **_on_meta(keywords))
            if shape.layout == torch.strided:
                out = self._scopes.target().empty_like(shape)
                fill(out, args, keywords)
                return out
        known = _addresses((args, keywords))
        result = func(*args, **keywords)
        if func in (_aten.lift_fresh.default, _aten.lift.default):
            known = set()  # torch.tensor(data): its argument is the new storage
        moved: dict[int, torch.UntypedStorage] = {}
        return tree_map_only(torch.Tensor, lambda out: self._home(out, known, moved), result)

    def _home(
        self, out: torch.Tensor, known: set[int], moved: dict[int, torch.UntypedStorage]
    ) -> torch.Tensor:
        if not _is_plain_host(out):
            return out
        address = storage_address(out)
        if not address or address in known or any(p.holds(address) for p in self._scopes.open):
            return out
        if address not in moved:
            old = out.untyped_storage()
            moved[address] = self._scopes.target().storage(old.nbytes()).copy_(old)
        return _over(moved[address], out)


def _on_meta(keywords: dict[str, Any]) -> dict[str, Any]:
    """The same call on the meta device, which draws no random number."""
    quiet = {"generator": None} if "generator" in keywords else {}
    return {**keywords, **quiet, "device": "meta"}


def _makes_host_tensor(args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if keywords.get("pin_memory"):
        return False
    device = keywords.get("device")
    if device is None:
        model = args[0] if args and isinstance(args[0], torch.Tensor) else None
        device = model.device if model is not None else "cpu"
    return torch.device(device).type == "cpu"


def _is_plain_host(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )


def _addresses(values: Any) -> set[int]:
    return {
        storage_address(value)
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor) and _is_plain_host(value)
    }
