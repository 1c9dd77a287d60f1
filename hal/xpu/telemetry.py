"""Memory queries of Intel GPUs: Sysman, then torch, then what this process has mapped.

On some drivers the free memory that Sysman or the runtime reports is the total, or 0, or frozen. So
a figure that contradicts what this library has mapped is passed over with its reason, and once a
device is open each source is tried on 64 MiB (`probe_sources`): until it has been seen to move, its
figure is not exact. The last source are the ledger's own books, which no driver falsifies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from hal.errors import HalError
from hal.memory import MemoryInfo
from hal.xpu.identity import Target, slot_of, target_of
from hal.xpu.sysman import FRESH_SECONDS, NoAnswerError, Reading, Sysman
from hal.xpu.visibility import Slot

if TYPE_CHECKING:
    from hal.native import Device

PROBE_BYTES = 64 << 20
_UNPROBED = "not tried on an allocation yet"
_NEARLY = 0.9
"""Of the device's memory: below that, a device that reports nothing free is not full of ours."""

sysman = Sysman()
os.register_at_fork(after_in_child=sysman.renew)
_verdicts: dict[tuple[str, str], str] = {}
"""(source, device) -> "" where the source was seen to move, else why its figure is not used."""


def memory_info(target: Target) -> MemoryInfo:
    """Memory of a device from the first source whose figures hold; raises nothing."""
    reasons: list[str] = []
    for name, ask in _SOURCES.items():
        try:
            info = _checked(name, target, ask(target))
        except Exception as error:  # noqa: BLE001 - asked while handling errors, which it must not replace
            reasons.append(f"{name}: {str(error) or type(error).__name__}")
        else:
            reason = "; ".join(filter(None, [*reasons, info.reason]))
            return replace(info, reason=reason, tracked=target.tracked)
    return MemoryInfo(
        target.total, None, None, "none", False, "; ".join(reasons), tracked=target.tracked
    )


def _checked(name: str, target: Target, info: MemoryInfo) -> MemoryInfo:
    """The same figures, not exact where nothing has shown that they move."""
    _refuse_contradiction(target, info)
    verdict = _verdicts.get((name, target.name), _UNPROBED)
    if verdict not in ("", _UNPROBED):
        raise NoAnswerError(verdict)
    if verdict and name != _BOOKS:
        reason = "; ".join(filter(None, [info.reason, f"{name}: {verdict}"]))
        return replace(info, exact=False, reason=reason)
    return info


def _refuse_contradiction(target: Target, info: MemoryInfo) -> None:
    tracked, free, total = target.tracked or 0, info.free, info.total
    if free is None or total is None:
        return
    if free == 0 and tracked < _NEARLY * total:
        raise NoAnswerError(
            f"it reports nothing free of {total} bytes, of which this process has {tracked}: this "
            "driver does not tell"
        )
    if tracked and free + tracked > total:
        raise NoAnswerError(
            f"it reports {free} of {total} bytes free although this process has {tracked} mapped: "
            "reading it needs CAP_SYS_ADMIN or CAP_PERFMON, or another driver"
        )


# -- sources


def _ask_sysman(target: Target) -> MemoryInfo:
    slot = slot_of(target, sysman)
    reading = sysman.read(slot.card, slot.tile)
    used, reason = _process_used(slot, reading, target)
    return MemoryInfo(reading.total, reading.free, used, "sysman", used is not None, reason)


def _process_used(slot: Slot, reading: Reading, target: Target) -> tuple[int | None, str]:
    if slot.tile is not None:
        return None, "sysman: it counts what processes use by card, and this is a tile"
    if reading.used is None:
        return None, f"sysman: {reading.why_not_used}"
    if reading.used < (target.tracked or 1):
        return None, (
            f"sysman: it lists {reading.used} bytes for pid {os.getpid()}, less than this process "
            "holds: the pid is of another process, or the figure is missing"
        )
    return reading.used, ""


def _ask_torch(target: Target) -> MemoryInfo:
    torch = sys.modules.get("torch")
    if torch is None or not torch.xpu.is_initialized():
        raise NoAnswerError("torch has not started XPU")
    free, total = torch.xpu.mem_get_info(target.index)
    reason = "torch: it does not tell what one process uses"
    return MemoryInfo(int(total), int(free), None, "torch", False, reason)


def _ask_books(target: Target) -> MemoryInfo:
    if target.total is None or target.tracked is None:
        raise NoAnswerError("the device is not open")
    reason = "free is the total less what this library has mapped: what others use is not known"
    free = max(0, target.total - target.tracked)
    return MemoryInfo(target.total, free, None, _BOOKS, False, reason)


_BOOKS = "books"
_SOURCES: dict[str, Callable[[Target], MemoryInfo]] = {
    "sysman": _ask_sysman,
    "torch": _ask_torch,
    _BOOKS: _ask_books,
}


# -- the probe


def probe_sources(index: int, device: Device) -> None:
    """Allocate a little on an open device and note which sources see it."""
    name = device.facts.device_uuid
    asked = {source: ask for source, ask in _SOURCES.items() if source != _BOOKS}
    before = {source: _free(ask, target_of(index, device)) for source, ask in asked.items()}
    if not any(free is not None for free in before.values()):
        return
    with _held(device, PROBE_BYTES) as size:
        sysman.forget_readings()
        time.sleep(FRESH_SECONDS)
        for source, ask in asked.items():
            free = before[source]
            after = _free(ask, target_of(index, device))
            if size and free is not None and after is not None:
                _verdicts[source, name] = _verdict(free - after, size)
    sysman.forget_readings()


def _verdict(moved: int, size: int) -> str:
    if moved >= size // 2:
        return ""
    return f"its free memory moved by {moved} bytes when {size} were allocated: it is frozen"


def _free(ask: Callable[[Target], MemoryInfo], target: Target) -> int | None:
    try:
        return ask(target).free
    except Exception:  # noqa: BLE001 - a source that does not answer cannot be tried
        return None


@contextmanager
def _held(device: Device, size: int) -> Iterator[int]:
    """Memory that is mapped and written for a moment; 0 where the device has no room for it."""
    pool = device.create_pool("probe-memory")
    try:
        address = device.allocate(pool.id, size)
    except HalError:
        address = 0
    try:
        if address:
            device.fill(address, 0, size)
            device.synchronize()
        yield size if address else 0
    finally:
        if address:
            device.free(address)
        device.destroy_pool(pool.id)
