"""A KV connector: keeps prompt blocks in host memory over a sleep, through a pool of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal.core.sleep import SleepManager
from hal.core.verify.blocks import BlockPool

TAG = "connector"
"""The tag of the staging buffers: a name of the engine's own, which every level offloads."""


class Connector:
    """Saves the contents of indexed blocks before a sleep, and brings them back into a cache that
    was discarded.

    Blocks travel through staging buffers on the device, one for each view of the cache's pages, as
    connectors do that copy between devices and hosts in large pieces.
    """

    def __init__(
        self, sleeper: SleepManager, views: Sequence[Tensor], blocks: int, block_size: int
    ) -> None:
        self._views, self._size, self._most = tuple(views), block_size, blocks
        with sleeper.pool(TAG):
            self._staging = tuple(
                torch.zeros(
                    (blocks * block_size, *view.shape[1:]), dtype=view.dtype, device=view.device
                )
                for view in self._views
            )
        self._saved: tuple[tuple[int, ...], ...] = ()
        self._host: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The staging buffers by name."""
        return {str(index): staging for index, staging in enumerate(self._staging)}

    def save(self, blocks: BlockPool, unwritten: frozenset[int]) -> None:
        """Copy the first indexed blocks out, shorter prefixes first, but for unwritten ones."""
        known = [entry for entry in blocks.indexed().items() if entry[1] not in unwritten]
        indexed = known[: self._most]
        self._saved = tuple(prefix for prefix, _ in indexed)
        slots = self._slots([block for _, block in indexed])
        for view, staging in zip(self._views, self._staging, strict=True):
            torch.index_select(view, 0, slots, out=staging[: len(slots)])
        self._host = tuple(staging[: len(slots)].cpu().clone() for staging in self._staging)

    def restore(self, blocks: BlockPool) -> None:
        """Bring what was saved, if anything was, into free blocks, and index it again."""
        if not self._saved:
            return
        adopted = [(index, blocks.adopt(prefix)) for index, prefix in enumerate(self._saved)]
        places = [(index, block) for index, block in adopted if block is not None]
        slots = self._slots([block for _, block in places])
        chosen = self._slots([index for index, _ in places])
        for view, staging, host in zip(self._views, self._staging, self._host, strict=True):
            staging[: len(host)].copy_(host)
            view.index_copy_(0, slots, staging[chosen])
        self._saved, self._host = (), ()

    def _slots(self, blocks: Sequence[int]) -> Tensor:
        size, device = self._size, self._staging[0].device
        slots = [block * size + offset for block in blocks for offset in range(size)]
        return torch.tensor(slots, dtype=torch.int64, device=device)
