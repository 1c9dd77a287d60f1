"""What the suites share: targets, patterns and the ledger's books."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from hal.core import SleepManager
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
    device: str = "cpu"
    """torch's device."""
    options: frozenset[str] = frozenset({"capacity", "dirty", "host tensors"})
    """What can be asked of it: a capacity, dirty fresh memory, tensors that the host reads."""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def require(self, option: str) -> None:
        """Skip the test where the target does not have an option."""
        if option not in self.options:
            pytest.skip(f"{self.name} has no option {option!r}")


def _fifo(**options: int) -> Platform:
    return CpuPlatform(PoolNesting.FIFO, **options)


def _emulated_cuda(**options: int) -> Platform:
    from emulator.platforms import EmulatedCudaPlatform

    return EmulatedCudaPlatform(**options)


def _cuda() -> Platform:
    from hal.cuda.platform import CudaPlatform

    return CudaPlatform()


TARGETS = (
    Target("cpu", CpuPlatform, out_of_memory=12, other_error=22),
    Target("cpu-fifo", _fifo, out_of_memory=12, other_error=22),
    Target("cuda-emulated", _emulated_cuda, out_of_memory=2, other_error=1),
    Target(
        "cuda",
        _cuda,
        out_of_memory=2,
        other_error=1,
        device="cuda",
        options=frozenset(),
        marks=(pytest.mark.cuda,),
    ),
)


def pattern(size: int, seed: int = 0) -> torch.Tensor:
    """Bytes that no other seed gives, on the default device: a multiplicative hash of the index."""
    words = torch.arange(-(-size // 8), dtype=torch.int64)
    words = (words + 1 + seed * 0x3C6EF372) * 0x1E3779B97F4A7C15
    return (words ^ (words >> 29)).view(torch.uint8)[:size]


def fill(sleeper: SleepManager, tag: str, seed: int, size: int = 3 * MIB) -> torch.Tensor:
    """A tensor with a pattern in the pool of a tag; the scratch to make it stays outside."""
    source = pattern(size, seed)
    with sleeper.pool(tag):
        return source.clone()


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
