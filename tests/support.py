"""What the suites share: targets, patterns and the ledger's books."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from hal.core import SleepManager
from hal.cpu.platform import CpuPlatform
from hal.detect import candidates
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
    only: frozenset[str] | None = None
    """The tests that it runs; None: all."""

    def require(self, option: str) -> None:
        """Skip the test where the target does not have an option."""
        if option not in self.options:
            pytest.skip(f"{self.name} has no option {option!r}")


def _fifo(**options: int) -> Platform:
    return CpuPlatform(PoolNesting.FIFO, **options)


def _emulated_cuda(**options: int) -> Platform:
    from emulator.platforms import EmulatedCudaPlatform

    return EmulatedCudaPlatform(**options)


def _emulated_rocm(*quirks: str, **options: int) -> Platform:
    from emulator.platforms import EmulatedRocmPlatform

    return EmulatedRocmPlatform(quirks=quirks, **options)


def _emulated_xpu(**options: int) -> Platform:
    from emulator.platforms import EmulatedXpuPlatform

    return EmulatedXpuPlatform(**options)


def _cuda() -> Platform:
    from hal.cuda.platform import CudaPlatform

    return CudaPlatform()


def _rocm() -> Platform:
    from hal.rocm.platform import RocmPlatform

    return RocmPlatform()


def _rocm_on_cuda() -> tuple[Target, ...]:
    """The ROCm driver on a CUDA device, where `ci/rocm_on_cuda.sh` has registered it."""
    name = "rocm-on-cuda"
    if name not in candidates():
        return ()
    make = candidates()[name].load()
    nothing: frozenset[str] = frozenset()
    return (Target(name, make, out_of_memory=2, other_error=1, device="cuda", options=nothing),)


def _xpu() -> Platform:
    from hal.xpu.platform import XpuPlatform

    return XpuPlatform()


def needs_level_zero() -> pytest.MarkDecorator:
    """Skips what runs over the emulated Intel driver where the loader in front of it is missing."""
    from emulator import emuze

    why_not = emuze.why_not()
    return pytest.mark.skipif(why_not is not None, reason=why_not or "")


def _rocm_quirk(quirk: str) -> Target:
    make = functools.partial(_emulated_rocm, *quirk.split("+"))
    return Target(f"rocm-{quirk}", make, out_of_memory=2, other_error=1, only=WITH_QUIRKS)


WITH_QUIRKS = frozenset(
    {
        "test_r08_each_segment_is_created_mapped_unmapped_and_released_once_a_cycle",
        "test_r09_a_tensor_freed_while_asleep_is_freed_once",
        "test_r13_wake_out_of_memory_rolls_back",
        "test_r14_a_failed_map_is_an_error_and_nothing_is_copied",
        "test_r16_a_failure_in_a_later_chunk_leaks_nothing",
        "test_r33_discarded_pages_never_wake_with_old_bytes",
    }
)
"""What a vendor's quirk could break: the whole life of segments, and every way back."""

QUIRKS = (
    "hold",
    "hold-hard",
    "hold+ignore-hint",
    "ignore-hint",
    "refuse-align",
    "unmap-several",
    "access-parts",
    "access-early",
)
"""Of the emulated HIP runtime (`emuhip.h`): those with which memory can sleep."""


TARGETS = (
    Target("cpu", CpuPlatform, out_of_memory=12, other_error=22),
    Target("cpu-fifo", _fifo, out_of_memory=12, other_error=22),
    Target("cuda-emulated", _emulated_cuda, out_of_memory=2, other_error=1),
    Target("rocm-emulated", _emulated_rocm, out_of_memory=2, other_error=1),
    *(_rocm_quirk(quirk) for quirk in QUIRKS),
    *_rocm_on_cuda(),
    Target(
        "xpu-emulated",
        _emulated_xpu,
        out_of_memory=0x70000003,
        other_error=0x78000004,
        marks=(needs_level_zero(),),
    ),
    Target(
        "cuda",
        _cuda,
        out_of_memory=2,
        other_error=1,
        device="cuda",
        options=frozenset(),
        marks=(pytest.mark.cuda,),
    ),
    Target(
        "rocm",
        _rocm,
        out_of_memory=2,
        other_error=1,
        device="cuda",
        options=frozenset(),
        marks=(pytest.mark.rocm,),
    ),
    Target(
        "xpu",
        _xpu,
        out_of_memory=0x70000003,
        other_error=0x78000004,
        device="xpu",
        options=frozenset(),
        marks=(pytest.mark.xpu,),
    ),
)


def pattern(size: int, seed: int = 0) -> torch.Tensor:
    """Bytes that no other seed gives, on the default device: a multiplicative hash of the index."""
    words = torch.arange(-(-size // 8), dtype=torch.int64)
    words = (words + 1 + seed * 0x3C6EF372) * 0x1E3779B97F4A7C15
    return (words ^ (words >> 29)).view(torch.uint8)[:size]


def large() -> int:
    """Bytes of a tensor that has a segment of its own in the default device's allocator.

    torch takes 20 MiB for a tensor of 1 to 10 MiB, and gives what is left of them to the next.
    """
    return (3 if torch.get_default_device().type == "cpu" else 24) * MIB


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
