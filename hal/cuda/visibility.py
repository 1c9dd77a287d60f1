"""Which devices CUDA will show this process, told without starting it: no fork survives that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIST = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

KERNEL_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where the kernel driver describes its cards: one folder a card, named by PCI address."""

_INTEGER = re.compile(r"[ \t]*([+-]?\d+)")
_UNKNOWN_ORDER = (
    "the cards are of different models: which of them is device 0 is known once CUDA has started, "
    f"or with {ORDER}=PCI_BUS_ID"
)
_PREFIXES = ("GPU-", "MIG-")
_DIGITS = re.compile("[0-9a-f]{1,32}")


@dataclass(frozen=True)
class Card:
    """One physical GPU; `slices` are the UUIDs of its MIG devices, None while MIG is off."""

    uuid: str
    bus_id: str
    name: str
    slices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class VisibleDevices:
    """The devices by UUID in CUDA's order; None is one that is there but not identified yet.

    `reason` says what was left out of the list or what is not known of it.
    """

    uuids: tuple[str | None, ...]
    reason: str = ""


@dataclass(frozen=True)
class _Choice:
    """One entry of the list that CUDA accepts: a card, or one of its slices."""

    card: Card
    slice: str | None = None
    is_identified: bool = True

    @property
    def uuid(self) -> str:
        return self.slice or self.card.uuid

    def slices(self) -> tuple[str, ...]:
        return (self.slice,) if self.slice else self.card.slices or ()

    def has_mig(self) -> bool:
        return self.slice is not None or self.card.slices is not None


def visible_devices(cards: Sequence[Card], environment: Mapping[str, str]) -> VisibleDevices:
    """What CUDA makes of the cards of this machine under `environment`.

    Follows "CUDA Environment Variables" of the CUDA programming guide and "CUDA Device Enumeration"
    of the MIG user guide: the list ends at its first invalid entry, a repeated entry empties it, an
    empty list hides every card, and where a MIG device is visible it is the only device.
    """
    by_bus = sorted(cards, key=lambda card: card.bus_id.lower())
    is_ordered = _order_is_known(by_bus, environment)
    asked = environment.get(LIST)
    if asked is None:
        choices, reason = [_Choice(card, None, is_ordered) for card in by_bus], ""
    else:
        choices, reason = _parse(asked, by_bus, is_ordered)
    uuids = _enumerate(choices)
    if None in uuids:
        reason = f"{reason}; {_UNKNOWN_ORDER}" if reason else _UNKNOWN_ORDER
    return VisibleDevices(uuids, reason)


def _order_is_known(cards: Sequence[Card], environment: Mapping[str, str]) -> bool:
    """CUDA puts the fastest model first by its own rule; cards of one model stand in bus order."""
    return environment.get(ORDER) == "PCI_BUS_ID" or len({card.name for card in cards}) < 2


def _parse(asked: str, cards: Sequence[Card], is_ordered: bool) -> tuple[list[_Choice], str]:
    choices: list[_Choice] = []
    by_uuid = asked.startswith(_PREFIXES)
    for entry in asked.split(","):
        choice = _by_uuid(entry, cards) if by_uuid else _by_position(entry, cards, is_ordered)
        if choice is None:
            return choices, f"{LIST}={asked!r} ends at {entry!r}, which names no device"
        if choice in choices:
            return [], f"{LIST}={asked!r} names a device twice, which hides every device"
        choices.append(choice)
    return choices, ""


def _by_position(entry: str, cards: Sequence[Card], is_ordered: bool) -> _Choice | None:
    number = _INTEGER.match(entry)
    if number is None or not 0 <= int(number[1]) < len(cards):
        return None
    return _Choice(cards[int(number[1])], None, is_ordered)


def _by_uuid(entry: str, cards: Sequence[Card]) -> _Choice | None:
    """A UUID or as much of its beginning as only one device has.

    CUDA accepts either prefix for either kind of device and ignores dashes, the case of digits and
    whatever follows a whole UUID.
    """
    if not entry.startswith(_PREFIXES):
        return None
    devices = [_Choice(card) for card in cards]
    devices += [_Choice(card, uuid) for card in cards for uuid in card.slices or ()]
    digits = _digits(entry)[:32]
    found = [device for device in devices if device.uuid == entry]
    if not found and _DIGITS.fullmatch(digits):
        found = [device for device in devices if _digits(device.uuid).startswith(digits)]
    return found[0] if len(found) == 1 else None


def _enumerate(choices: Sequence[_Choice]) -> tuple[str | None, ...]:
    slices = [(uuid, choice) for choice in choices for uuid in choice.slices()]
    if slices:
        uuid, choice = slices[0]
        return (uuid if choice.is_identified or len(slices) == 1 else None,)
    plain = [choice for choice in choices if not choice.has_mig()]
    return tuple(choice.uuid if choice.is_identified else None for choice in plain)


def identify(
    cards: Sequence[Card], environment: Mapping[str, str], index: int, device_id: str | None
) -> str:
    """The UUID by which NVML knows CUDA device `index`; raises `LookupError`.

    `device_id` is what the opened device said of itself: a UUID, with or without its prefix, or a
    PCI address. It is believed over `environment`, which may have changed since CUDA started. For a
    MIG device CUDA may name the card.
    """
    visible = visible_devices(cards, environment)
    if device_id is None:
        return _uuid_at(visible, index)
    slices = [
        uuid for card in cards for uuid in card.slices or () if _digits(uuid) == _digits(device_id)
    ]
    if slices:
        return slices[0]
    for card in cards:
        if _digits(card.uuid) == _digits(device_id) or _same_address(card.bus_id, device_id):
            return card.uuid if card.slices is None else _slice_of(card, visible)
    raise LookupError(f"NVML knows no device {device_id}")


def _uuid_at(visible: VisibleDevices, index: int) -> str:
    uuid = visible.uuids[index] if 0 <= index < len(visible.uuids) else None
    if uuid is None:
        reason = visible.reason or f"{len(visible.uuids)} devices are visible"
        raise LookupError(f"device {index} is not identified: {reason}")
    return uuid


def _slice_of(card: Card, visible: VisibleDevices) -> str:
    slices = card.slices or ()
    candidates = [uuid for uuid in visible.uuids if uuid in slices] or slices
    if len(candidates) != 1 or candidates[0] is None:
        raise LookupError(
            f"which of the {len(slices)} MIG devices of card {card.uuid} this process uses is not "
            f"known, name it in {LIST}"
        )
    return candidates[0]


def _digits(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")


def _same_address(one: str, other: str) -> bool:
    """Whether two PCI addresses are one: libraries write the domain with 4 or with 8 digits."""
    return one.lower().lstrip("0") == other.lower().lstrip("0") and ":" in other


def kernel_driver_cards(root: Path = KERNEL_DRIVER) -> tuple[Card, ...]:
    """The cards that the kernel driver describes, in bus order; MIG devices are not among them."""
    return tuple(
        _described_card(folder.name, (folder / "information").read_text())
        for folder in sorted(root.glob("*"))
        if (folder / "information").is_file()
    )


def _described_card(bus_id: str, description: str) -> Card:
    lines = (line.partition(":") for line in description.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return Card(fields.get("GPU UUID", ""), bus_id, fields.get("Model", ""))
