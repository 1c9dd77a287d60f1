"""Whether a tag stays as start-up left it: nothing allocated, freed or handed to a transport."""

from __future__ import annotations

import torch

from hal.core.contents import extent
from hal.core.sleep import SleepManager
from hal.core.tags import RUNTIME


class TagAudit:
    """Remembers the live blocks of a tag after start-up, `runtime` by default.

    A block that comes or goes later moves what captured graphs point to; memory that a transport
    knows by its address is not restored for the other side when it wakes.
    """

    def __init__(self, sleeper: SleepManager, tag: str = RUNTIME) -> None:
        self._sleeper, self._tag = sleeper, tag
        self._blocks = dict(sleeper.live_blocks(tag)) if tag in sleeper.tags else {}
        self._exports: list[str] = []

    def exported(self, tensor: torch.Tensor, to: str) -> None:
        """Note that a tensor's memory is registered with, or exported to, something by address."""
        if self._sleeper.tag_of(tensor) == self._tag:
            address, size = extent(tensor)
            self._exports.append(f"{size} bytes at {address:#x} are known to {to}")

    def findings(self) -> tuple[str, ...]:
        """What is not as start-up left it; empty when all is well."""
        now = dict(self._sleeper.live_blocks(self._tag))
        made = [f"{size} bytes allocated at {a:#x}" for a, size in _only_in(now, self._blocks)]
        gone = [f"{size} bytes freed at {a:#x}" for a, size in _only_in(self._blocks, now)]
        return (*made, *gone, *self._exports)


def _only_in(blocks: dict[int, int], others: dict[int, int]) -> list[tuple[int, int]]:
    return sorted(block for block in blocks.items() if others.get(block[0]) != block[1])
