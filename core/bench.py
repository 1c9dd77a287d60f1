"""Rates of a sleep and a wake on the running platform, against plain copies in the same run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from hal.core.backup import BackupOptions
from hal.core.sleep import SleepManager
from hal.core.tags import WEIGHTS
from hal.platform import Capabilities, Platform
from hal.pools import torch_device

MIB = 1 << 20
HOST_BYTES, DEVICE_BYTES = 64 * MIB, 4096 * MIB
"""What is moved: enough that starting a copy does not count, where the link is slow or fast."""
_SHARE = 4
"""The part of free device memory that a measurement takes at most, as a divisor."""
_ROUNDS = 3
_PIECE = 16 * MIB
"""Bytes of one tensor: a model has many."""


@dataclass(frozen=True)
class Bench:
    """Medians in bytes a second; `out` is device to host, `into` host to device."""

    size: int
    backing: str
    link_out: float
    link_into: float
    sleep: float
    wake: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "bytes": self.size,
            "backing": self.backing,
            "link": {"out": round(self.link_out), "in": round(self.link_into)},
            "sleep": round(self.sleep),
            "wake": round(self.wake),
            "sleep_of_link": round(self.sleep / self.link_out, 3),
            "wake_of_link": round(self.wake / self.link_into, 3),
        }


def measure(
    platform: Platform, device: int = 0, *, size: int | None = None, backing: str | None = None
) -> Bench:
    """Put `size` bytes of weights to sleep and wake them, a few times, beside plain copies.

    By default as much as tells the rates apart from their start-up costs; backups are in pinned
    memory, or in anonymous memory where there is nothing to pin.
    """
    capabilities = platform.capabilities_of(device)
    moved = size or _default_size(platform, device, capabilities)
    kind = backing or ("pinned" if capabilities.pinned_host else "anonymous")
    link = _Link(platform, device, moved)
    sleeps, wakes, outs, intos = [], [], [], []
    with SleepManager(platform, device=device, backup=BackupOptions(backing=kind)) as sleeper:
        held = _weights(sleeper, moved)
        for round_ in range(_ROUNDS + 1):
            figures = link.out(), sleeper.sleep(1), link.into(), sleeper.wake_up()
            if round_:  # the first makes the host memory
                outs.append(figures[0])
                sleeps.append(figures[1].copied_bytes / figures[1].seconds)
                intos.append(figures[2])
                wakes.append(figures[3].copied_bytes / figures[3].seconds)
        del held
    medians = (statistics.median(values) for values in (outs, intos, sleeps, wakes))
    return Bench(moved, kind, *medians)


def _default_size(platform: Platform, device: int, capabilities: Capabilities) -> int:
    if capabilities.host_access:
        return HOST_BYTES
    free, _ = platform.device(device).memory()
    return max(_PIECE, min(DEVICE_BYTES, free // _SHARE) // _PIECE * _PIECE)


def _weights(sleeper: SleepManager, size: int) -> list[torch.Tensor]:
    place = torch_device(sleeper.platform, sleeper.device_index)
    pieces = [_PIECE] * (size // _PIECE) + ([size % _PIECE] if size % _PIECE else [])
    with sleeper.pool(WEIGHTS):
        return [torch.ones(piece, dtype=torch.uint8, device=place) for piece in pieces]


class _Link:
    """Plain copies between the device's memory and the host's.

    Where both are the same memory, each copy goes to fresh pages, as a transition's does.
    """

    def __init__(self, platform: Platform, device: int, size: int) -> None:
        capabilities = platform.capabilities_of(device)
        self._device, self._size = platform.device(device), size
        self._is_one = bool(capabilities.unified_memory) or bool(capabilities.host_access)
        self._pinned = bool(capabilities.pinned_host) and not self._is_one
        self._there = torch.ones(size, dtype=torch.uint8, device=torch_device(platform, device))
        self._here = torch.ones(size, dtype=torch.uint8, pin_memory=self._pinned)

    def out(self) -> float:
        return self._rate(self._here, self._there)

    def into(self) -> float:
        return self._rate(self._there, self._here)

    def _rate(self, target: torch.Tensor, source: torch.Tensor) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        kept = source.clone() if self._is_one else target.copy_(source, non_blocking=True)
        self._device.synchronize()
        seconds = time.perf_counter() - start
        del kept
        return self._size / seconds
