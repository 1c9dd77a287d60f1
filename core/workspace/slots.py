"""What one slot holds: its shared buffer, what is kept there by key, and its accounts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from hal.core.workspace.report import AdoptedReport, PersistentReport, SlotId, SlotReport


@dataclass
class Kept:
    """A keyed resource of one slot; a zeroed one is a tensor that no one else writes to."""

    value: object
    zeroed: bool = False
    on_wake: Callable[[Any], object] | None = None

    def restore(self) -> None:
        """Make the value usable again after its memory was discarded."""
        if self.zeroed:
            cast("Tensor", self.value).zero_()
        if self.on_wake is not None:
            self.on_wake(self.value)

    @property
    def bytes(self) -> int | None:
        """None for a resource that is no tensor."""
        return self.value.untyped_storage().nbytes() if isinstance(self.value, Tensor) else None


@dataclass
class Slot:
    """The shared buffer of one (ubatch, lane), and what is kept there by key."""

    id: SlotId
    buffer: Tensor | None = None
    requests: int = 0
    high_water: int = 0
    high_water_owner: str = ""
    kept: dict[Hashable, Kept] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.buffer.numel() if self.buffer is not None else 0

    def report(self) -> SlotReport:
        return SlotReport(self.id, self.bytes, self.high_water, self.high_water_owner)

    def kept_reports(self) -> list[PersistentReport]:
        return [
            PersistentReport(self.id, key_text(key), kept.bytes, kept.zeroed)
            for key, kept in self.kept.items()
        ]


@dataclass(frozen=True)
class Adopted:
    """Scratch that a library took by itself."""

    owner: str
    find: Callable[[], Iterable[Tensor]]
    zeroed: bool
    on_wake: Callable[[], object] | None

    def restore(self) -> None:
        """Make it usable again after a wake."""
        if self.zeroed:
            for tensor in self.find():
                tensor.zero_()
        if self.on_wake is not None:
            self.on_wake()

    def report(self, tag_of: Callable[[Tensor], str | None]) -> AdoptedReport:
        """Its bytes and the tag that all of it lies in."""
        tensors = list(self.find())
        tags = {tag_of(tensor) for tensor in tensors}
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        return AdoptedReport(self.owner, size, tags.pop() if len(tags) == 1 else None)


def key_text(key: Hashable) -> str:
    """A key as its user gave it: tensors are kept under a pair."""
    return str(key[1] if isinstance(key, tuple) and key and key[0] is Tensor else key)
