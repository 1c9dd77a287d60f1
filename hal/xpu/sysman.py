"""Level Zero's management half, Sysman: cards, their memory modules and processes, without a device
context.

Sysman knows cards and numbers them by itself, whatever masks and hierarchies make of them for the
runtime, so devices are joined by PCI address or UUID.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal.xpu.zes_structs import (
    DeviceProperties,
    MemoryProperties,
    MemoryState,
    PciProperties,
    ProcessState,
)

LOADER = "libze_loader.so.1"
OVERRIDE = "HAL_LIBZE"
LEGACY = "ZES_ENABLE_SYSMAN"
FRESH_SECONDS = 0.1
"""How long a reading is used again: the counters behind it change no faster, and one reading can
take longer than this."""

_GPU_ONLY = 1
_NOT_INITIALIZED = 0x78000001
_REASONS = {
    0x70000001: "the device is lost",
    0x70010000: "this process may not ask: it needs CAP_SYS_ADMIN or CAP_PERFMON, or root",
    _NOT_INITIALIZED: "it was initialized the other way, or there is no driver",
    0x78000003: "this driver does not support it",
}


class NoAnswerError(Exception):
    """Internal to this room: a source of figures cannot answer, and why."""


@dataclass(frozen=True)
class Reading:
    """Memory of a card or of one of its tiles, in bytes; `used` is what this process has on the
    whole card, None with a reason in `why_not_used` when that is not known.
    """

    free: int
    total: int
    used: int | None
    why_not_used: str = ""


@dataclass(frozen=True)
class Card:
    """One card as Sysman knows it; `tiles` is at least 1."""

    handle: int
    pci: str
    uuid: str
    name: str
    tiles: int
    integrated: bool


class Sysman:
    """Sysman of this process, opened when first asked; safe for threads.

    There are two ways to initialize it, which conflict: the environment variable
    `ZES_ENABLE_SYSMAN` before the core's `zeInit`, or `zesInit`. Where the variable is set, the
    first is taken, and the handles are the core's own; else the second. The variable is never set
    here: too late for a runtime that has started. Methods raise `NoAnswerError`.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, as in a forked child, where no thread is left to give the lock back."""
        self._lock = threading.Lock()
        self._library: c.CDLL | None = None
        self._cards: tuple[Card, ...] = ()
        self._readings: dict[tuple[int, int | None], tuple[float, Reading]] = {}

    def cards(self) -> tuple[Card, ...]:
        """The cards of this machine, in Sysman's order."""
        with self._lock:
            return tuple({card.pci: card for card in self._opened()}.values())

    def runtime_devices(self) -> tuple[Card, ...] | None:
        """The card of each device that the runtime shows, masks and hierarchy applied; None where
        Sysman was initialized by its own call and does not know.
        """
        with self._lock:
            return self._opened() if os.environ.get(LEGACY) == "1" else None

    def read(self, card: Card, tile: int | None = None) -> Reading:
        """Memory of a card, or of one of its tiles; at most `FRESH_SECONDS` old."""
        with self._lock:
            self._opened()
            key = card.handle, tile
            when, reading = self._readings.get(key, (0.0, None))
            if reading is None or time.monotonic() - when > FRESH_SECONDS:
                reading = self._read(card, tile)
                self._readings[key] = time.monotonic(), reading
            return reading

    def forget_readings(self) -> None:
        """Let the next reading be a new one."""
        self._readings.clear()

    def _opened(self) -> tuple[Card, ...]:
        if self._library is None:
            library = _load()
            cards = tuple(_card(library, handle) for handle in _start(library))
            self._cards, self._library = cards, library
        return self._cards

    def _read(self, card: Card, tile: int | None) -> Reading:
        library = self._library
        modules = _listed(library, "zesDeviceEnumMemoryModules", card.handle)
        if not modules:
            raise NoAnswerError(f"Sysman lists no memory module of {card.name}")
        states = [_state(library, module) for module in modules if _is_on(library, module, tile)]
        if not states:
            raise NoAnswerError(f"Sysman lists no memory module of tile {tile} of {card.name}")
        used, why_not = _used_by_this_process(library, card)
        free, total = sum(state.free for state in states), sum(state.size for state in states)
        return Reading(free, total, used, why_not)


def _load() -> c.CDLL:
    try:
        return c.CDLL(os.environ.get(OVERRIDE) or LOADER)
    except OSError as error:
        raise NoAnswerError(f"the Level Zero loader cannot be loaded ({error})") from error


def _call(library: c.CDLL | None, name: str, *arguments: Any) -> None:
    try:
        code = getattr(library, name)(*arguments) & 0xFFFFFFFF
    except AttributeError as error:
        raise NoAnswerError(f"the Level Zero loader has no {name}; update libze1") from error
    if code:
        raise NoAnswerError(f"{name} failed with {code:#x}: {_REASONS.get(code, 'see ze_api.h')}")


def _listed(library: c.CDLL | None, name: str, *first: int) -> list[int]:
    """The handles that a call of the form (…, count, handles) lists."""
    leading = [c.c_void_p(handle) for handle in first]
    count = c.c_uint32(0)
    _call(library, name, *leading, c.byref(count), None)
    handles = (c.c_void_p * count.value)()
    if count.value:
        _call(library, name, *leading, c.byref(count), handles)
    return [handle for handle in handles[: count.value] if handle]


def _start(library: c.CDLL) -> list[int]:
    """Initialize Sysman and list the cards."""
    if os.environ.get(LEGACY) == "1":
        _call(library, "zeInit", _GPU_ONLY)
        drivers = _listed(library, "zeDriverGet")
        return [device for driver in drivers for device in _listed(library, "zeDeviceGet", driver)]
    if not hasattr(library, "zesInit"):
        raise NoAnswerError(
            "the Level Zero loader is older than 1.9 and has no zesInit; update libze1, or start "
            f"the process with {LEGACY}=1"
        )
    _call(library, "zesInit", 0)
    drivers = _listed(library, "zesDriverGet")
    return [device for driver in drivers for device in _listed(library, "zesDeviceGet", driver)]


def _card(library: c.CDLL, handle: int) -> Card:
    properties, pci = DeviceProperties(), PciProperties()
    _call(library, "zesDeviceGetProperties", c.c_void_p(handle), c.byref(properties))
    _call(library, "zesDevicePciGetProperties", c.c_void_p(handle), c.byref(pci))
    domain, bus, device, function = pci.address
    flags = int.from_bytes(bytes(properties.core_numbers)[12:16], "little")
    return Card(
        handle,
        f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}",
        bytes(properties.uuid).hex(),
        properties.name.decode("utf-8", "replace"),
        max(properties.subdevices, 1),
        bool(flags & 1),
    )


def _is_on(library: c.CDLL | None, module: int, tile: int | None) -> bool:
    properties = MemoryProperties()
    _call(library, "zesMemoryGetProperties", c.c_void_p(module), c.byref(properties))
    return tile is None or (bool(properties.on_subdevice) and properties.subdevice == tile)


def _state(library: c.CDLL | None, module: int) -> MemoryState:
    state = MemoryState()
    _call(library, "zesMemoryGetState", c.c_void_p(module), c.byref(state))
    return state


def _used_by_this_process(library: c.CDLL | None, card: Card) -> tuple[int | None, str]:
    try:
        processes = _processes(library, card)
    except NoAnswerError as error:
        return None, str(error)
    own = [state.memory for state in processes if state.process == os.getpid()]
    if own:
        return sum(own), ""
    return None, (
        f"pid not visible: Sysman lists {len(processes)} processes, none is {os.getpid()}: it has "
        "no context yet, or Sysman gives PIDs of outside this container"
    )


def _processes(library: c.CDLL | None, card: Card) -> Sequence[ProcessState]:
    """More may come between counting and listing, so there is room for some."""
    count = c.c_uint32(0)
    handle = c.c_void_p(card.handle)
    _call(library, "zesDeviceProcessesGetState", handle, c.byref(count), None)
    count = c.c_uint32(count.value + 8)
    states = (ProcessState * count.value)()
    for state in states:
        state.stype = ProcessState.stype_value
    _call(library, "zesDeviceProcessesGetState", handle, c.byref(count), states)
    return states[: count.value]
