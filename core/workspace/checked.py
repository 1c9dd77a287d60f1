"""Debug views of scratch: they know which request they belong to, and tell when they outlive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hal.pools import storage_address

_METADATA = frozenset({"__get__", "__repr__", "size", "dim", "numel", "stride", "is_contiguous"})
"""What reads no memory and is allowed of any view."""


class Judge(Protocol):
    """Decides about the use of a view: raises, reports, or says nothing."""

    def judge(self, lease: Lease) -> None: ...


@dataclass(frozen=True)
class Lease:
    """The request that a view was given out for."""

    judge: Judge
    slot: tuple[int, int]
    serial: int
    """Counts the requests of a slot."""
    wake: int
    """Counts the wakes of the manager."""
    owner: str

    def check(self) -> None:
        self.judge.judge(self)


class CheckedView(Tensor):
    """A view of scratch that asks its lease whenever it, or a view of it, is used."""

    lease: Lease

    @staticmethod
    def over(view: Tensor, lease: Lease) -> CheckedView:
        checked = view.as_subclass(CheckedView)
        checked.lease = lease
        return checked

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - its documented name
            views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, CheckedView)]
            if getattr(func, "__name__", "") not in _METADATA:
                for view in views:
                    view.lease.check()
            leases = {storage_address(view): view.lease for view in views}
            result = func(*args, **(kwargs or {}))
            return tree_map_only(Tensor, lambda out: _passed_on(out, leases), result)


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, which asks no lease: for launchers that want no subclass."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - its documented name
        return tensor.as_subclass(Tensor)


def _passed_on(out: Tensor, leases: Mapping[int, Lease]) -> Tensor:
    """A result in the memory of a checked view is checked too; any other is a plain tensor."""
    lease = leases.get(storage_address(out)) if out.layout == torch.strided else None
    if lease is not None:
        return out if isinstance(out, CheckedView) else CheckedView.over(out, lease)
    return out.as_subclass(Tensor)
