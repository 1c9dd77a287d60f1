"""Which card or tile of Sysman a device is: by PCI address or UUID, never by index."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal.errors import HalError
from hal.xpu.sysman import Card, NoAnswerError, Sysman
from hal.xpu.visibility import COMPOSITE, HIERARCHY, Slot, render_nodes, visible_slots

if TYPE_CHECKING:
    from hal.native import Device

_NEARLY = 0.9


@dataclass(frozen=True)
class Target:
    """The device that is asked about; `name` is by what Level Zero knows it, "" before it is open.

    `tracked` is what this library has mapped on it and `total` its memory by the core, in bytes.
    """

    index: int
    name: str = ""
    tracked: int | None = None
    total: int | None = None


def target_of(index: int, device: Device | None) -> Target:
    """What is known of a device that may not be open."""
    if device is None:
        return Target(index)
    tracked = device.counters().mapped_bytes
    try:
        total = device.memory()[1]
    except HalError:
        total = 0
    return Target(index, device.facts.device_uuid, tracked, total or None)


def slot_of(target: Target, sysman: Sysman) -> Slot:
    """The card or tile that a device is; raises `LookupError`."""
    cards = sysman.cards()
    if target.name:
        return _slot_of_name(cards, target, sysman)
    uuid = _torch_uuid(target.index)
    found = [card for card in cards if uuid and card.uuid == uuid]
    slots = [Slot(found[0])] if found else _visible_slots(cards, sysman)
    if len(slots) != 1:
        raise LookupError(
            f"which of the {len(slots)} devices that Sysman sees is device {target.index} is known "
            "once it is open"
        )
    if not found and slots[0].tile is None and _shows_tiles(slots[0].card):
        raise LookupError(
            f"which tile of card {slots[0].card.pci} this is, is known once it is open"
        )
    return slots[0]


def _shows_tiles(card: Card) -> bool:
    return card.tiles > 1 and os.environ.get(HIERARCHY) != COMPOSITE


def _visible_slots(cards: tuple[Card, ...], sysman: Sysman) -> tuple[Slot, ...]:
    """The devices that torch would count; where Sysman has the runtime's, which tile each one is
    stays unknown.
    """
    devices = sysman.runtime_devices()
    if devices is None:
        return visible_slots(cards, os.environ)
    discrete = tuple(card for card in devices if not card.integrated)
    return tuple(Slot(card) for card in discrete or devices)


def _slot_of_name(cards: tuple[Card, ...], target: Target, sysman: Sysman) -> Slot:
    name, _, tile = target.name.partition("#")
    found = [card for card in cards if name in (card.pci, card.uuid)]
    if not found:
        raise LookupError(f"Sysman knows no card {name}")
    if tile or found[0].tiles == 1:
        return Slot(found[0], int(tile) if tile else None)
    whole = sum(sysman.read(found[0], tile).total for tile in range(found[0].tiles))
    if target.total and target.total < _NEARLY * whole:
        raise LookupError(f"which tile of card {name} this device is, is not known")
    return Slot(found[0])


def _torch_uuid(index: int) -> str:
    """What torch says of a device once it has started XPU; a tile's is not its card's."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.xpu.is_initialized():
        return ""
    return bytes(torch.xpu.get_device_properties(index).uuid.bytes).hex()


def device_count(sysman: Sysman) -> int:
    """How many devices torch would count if it started XPU now; starts no runtime."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.xpu.is_initialized():
        return int(torch.xpu.device_count())
    try:
        return len(_visible_slots(sysman.cards(), sysman))
    except NoAnswerError:
        return len(render_nodes())
