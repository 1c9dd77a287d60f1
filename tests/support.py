"""What the suites share: targets, patterns and the ledger's books."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hal.cpu.platform import CpuPlatform
from hal.platform import Platform, PoolNesting

MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """A platform under test and what its vendor calls things."""

    name: str
    make: Callable[..., Platform]
    out_of_memory: int
    """The vendor's code for too little device memory."""
    other_error: int
    """A vendor code of another kind."""


def _fifo(**options: int) -> Platform:
    return CpuPlatform(PoolNesting.FIFO, **options)


TARGETS = (
    Target("cpu", CpuPlatform, out_of_memory=12, other_error=22),
    Target("cpu-fifo", _fifo, out_of_memory=12, other_error=22),
)


def pattern(size: int, seed: int = 0) -> torch.Tensor:
    """Random bytes that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


_HELD: list[torch.Tensor] = []


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a tensor alive to the end of the test that made it."""
    _HELD.append(tensor)
    return tensor


def release_held() -> None:
    """Let go of what `hold` kept."""
    _HELD.clear()


def books(platform: Platform) -> dict[str, int]:
    """The ledger's balances, which a failed transition must leave alone."""
    balances = ("segments", "mapped_bytes", "asleep_bytes", "handles", "mappings", "reservations")
    counters = platform.device().counters().as_dict()
    return {name: counters[name] for name in balances}
