"""What a workspace holds, for whom, and what scratch lies outside of it; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hal.core.workspace.specs import TensorSpec

_MIB = 1 << 20
SlotId = tuple[int, int]
"""(ubatch, lane)."""


@dataclass(frozen=True)
class Reservation:
    """A floor that an owner put under the shared slots."""

    owner: str
    specs: tuple[TensorSpec, ...]
    bytes: int
    slots: tuple[SlotId, ...]


@dataclass(frozen=True)
class SlotReport:
    """One shared buffer, the largest request that it has served, and whose that was."""

    slot: SlotId
    bytes: int
    high_water: int
    high_water_owner: str


@dataclass(frozen=True)
class PersistentReport:
    """A keyed tensor or resource of one slot; the bytes of a resource are unknown: None."""

    slot: SlotId
    key: str
    bytes: int | None
    zeroed: bool


@dataclass(frozen=True)
class AdoptedReport:
    """Scratch that a library took by itself; `tag` is None when it lies in no pool."""

    owner: str
    bytes: int
    tag: str | None


@dataclass(frozen=True)
class WorkspaceReport:
    """Who reserved what, where the high water is, and what is outside the workspace."""

    device: str
    locked: bool
    floor: int
    slots: tuple[SlotReport, ...]
    reservations: tuple[Reservation, ...]
    persistent: tuple[PersistentReport, ...]
    adopted: tuple[AdoptedReport, ...]
    unreserved: tuple[str, ...]
    """Owners that asked for scratch and never reserved any: their largest need is unknown."""

    @property
    def bytes(self) -> int:
        """Memory of the workspace itself: shared slots and persistent tensors."""
        return sum(s.bytes for s in self.slots) + sum(p.bytes or 0 for p in self.persistent)

    @property
    def outside(self) -> int:
        """Adopted scratch that no pool holds: it stays on the device while everything sleeps."""
        return sum(entry.bytes for entry in self.adopted if entry.tag is None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        for reservation, plain in zip(self.reservations, values["reservations"], strict=True):
            plain["specs"] = [[list(s.shape), str(s.dtype)] for s in reservation.specs]
        return values | {"bytes": self.bytes, "outside": self.outside}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        state = "locked" if self.locked else "open"
        yield f"workspace on {self.device}: {_mib(self.bytes)}, {state}"
        for slot in self.slots:
            served = f"largest request {_mib(slot.high_water)} by {slot.high_water_owner}"
            told = served if slot.high_water else "no request yet"
            yield f"  ubatch {slot.slot[0]}, lane {slot.slot[1]}: {_mib(slot.bytes)}, {told}"
        for entry in self.reservations:
            yield f"  reserved by {entry.owner}: {_mib(entry.bytes)} in {len(entry.slots)} slot(s)"
        for kept in self.persistent:
            size = "size unknown" if kept.bytes is None else _mib(kept.bytes)
            kind = ", zeroed" if kept.zeroed else ""
            yield f"  kept as {kept.key} in slot {kept.slot}: {size}{kind}"
        for found in self.adopted:
            place = f"in tag {found.tag!r}" if found.tag else "outside every pool"
            yield f"  adopted from {found.owner}: {_mib(found.bytes)}, {place}"
        for owner in self.unreserved:
            yield f"  asked without a reservation: {owner}"


def _mib(size: int) -> str:
    return f"{size / _MIB:.2f} MiB"
