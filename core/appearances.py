"""Which storages appear in a scope, where they were made, and which of them are alive."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OWN = Path(__file__).parent


@dataclass(frozen=True)
class Appeared:
    """A storage when it was first seen: its bytes, the tensor's shape, and where it was made."""

    bytes: int
    shape: tuple[int, ...]
    where: str

    def __str__(self) -> str:
        return f"{self.bytes} bytes of shape {list(self.shape)} made at {self.where}"


class Appearances(TorchDispatchMode):
    """Notes the storages that operators make while it is open: in `live` by address, until they are
    freed, and the largest sum of their bytes in `peak`.

    `counts` chooses which; `locate` finds where each was made, at some cost.
    """

    def __init__(
        self, counts: Callable[[torch.Tensor], bool] = lambda _: True, *, locate: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._locate = counts, locate
        self.live: dict[int, Appeared] = {}
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        known = set(_storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for address, tensor in _storages(result).items():
            if address not in known and address not in self.live and self._counts(tensor):
                self._add(address, tensor)
        return result

    def _add(self, address: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        where = caller() if self._locate else ""
        self.live[address] = Appeared(storage.nbytes(), tuple(tensor.shape), where)
        weakref.finalize(storage, self.live.pop, address, None).atexit = False
        self.peak = max(self.peak, sum(entry.bytes for entry in tuple(self.live.values())))


def _storages(values: Any) -> dict[int, torch.Tensor]:
    """A tensor of each storage with memory in a structure, by address."""
    return {
        leaf.untyped_storage().data_ptr(): leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and leaf.device.type != "meta"
        and leaf.untyped_storage().nbytes()
    }


def caller() -> str:
    """The innermost frame that is neither torch's nor of a module beside this one."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        if "/torch/" not in frame.filename and Path(frame.filename).parent != _OWN:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown place"
