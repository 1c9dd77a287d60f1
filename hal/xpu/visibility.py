"""Which devices Level Zero shows this process, told without starting it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hal.xpu.sysman import Card

MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
COMPOSITE = "COMPOSITE"
RENDER_NODES = Path("/sys/class/drm")
INTEL = "0x8086"

_ENTRY = re.compile(r"(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Slot:
    """A device as the runtime counts them: a card, or one tile of it."""

    card: Card
    tile: int | None = None


def visible_slots(cards: Sequence[Card], environment: Mapping[str, str]) -> tuple[Slot, ...]:
    """What torch makes of the cards: tiles are devices unless the hierarchy is COMPOSITE, the mask
    picks devices or tiles, and integrated GPUs count only where there is no other.
    """
    slots = [slot for card in cards for slot in _slots(card, environment.get(HIERARCHY))]
    mask = environment.get(MASK)
    if mask is not None:
        slots = [slot for entry in mask.split(",") for slot in _picked(entry, cards, slots)]
    discrete = tuple(slot for slot in slots if not slot.card.integrated)
    return discrete or tuple(slots)


def _slots(card: Card, hierarchy: str | None) -> list[Slot]:
    if card.tiles == 1 or card.integrated or hierarchy == COMPOSITE:
        return [Slot(card)]
    return [Slot(card, tile) for tile in range(card.tiles)]


def _picked(entry: str, cards: Sequence[Card], slots: Sequence[Slot]) -> list[Slot]:
    """The device, or the tile of a card, that one entry of the mask names; none for nonsense."""
    match = _ENTRY.fullmatch(entry.strip())
    if match is None:
        return []
    index = int(match[1])
    if match[2] is None:
        return list(slots[index : index + 1])
    return [Slot(card, int(match[2])) for card in cards[index : index + 1]]


def render_nodes(root: Path = RENDER_NODES) -> list[str]:
    """Names of the render nodes of Intel GPUs that the kernel has made; tiles have none."""
    vendors = {path.parent.parent.name: path for path in root.glob("renderD*/device/vendor")}
    return sorted(name for name, path in vendors.items() if path.read_text().strip() == INTEL)
