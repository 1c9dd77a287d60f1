"""What pools cost: allocations against torch's own, many small tensors, a KV cache that is given
up, and the ledger against the driver's primitives.

Rounds of both sides of a comparison alternate; the medians are compared. A ratio of times above 1
means that the pool is slower.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Samples, finish, milliseconds, timed

import hal
from hal.core import BackupOptions, Policy, SleepManager
from hal.core.residual import give_torch_cache_back
from hal.native import Action, Arena, Device, Order
from hal.pools import torch_device

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FILL = 0x5A
KV_WAKE_MILLISECONDS = 100.0
"""The most that 64 GiB of discarded memory may take to come back, zeroed."""
REST_SECONDS = 0.3
"""Between a sleep and its wake: the driver clears what was released in the background, and whoever
takes it in the same moment waits for that.
"""
MIXED = (4 * KIB, 64 * KIB, MIB, 3 * MIB, 16 * MIB, 33 * MIB)
SMALL = (KIB, 4 * KIB, 16 * KIB, 64 * KIB)


@dataclass(frozen=True)
class Scale:
    """How much of everything: counts, and sizes in bytes."""

    touched: int
    """Tensors of mixed sizes that are allocated and written once."""
    small: int
    kv_cache: int
    kv_piece: int
    segment: int
    """One segment that is built and taken down, in the driver's pieces."""


ACCELERATOR = Scale(1000, 10_000, 64 * GIB, GIB, 16 * GIB)
HOST = Scale(100, 2_000, GIB // 2, GIB // 16, GIB // 4)


@dataclass(frozen=True)
class Bench:
    """Where, how much and how often to measure."""

    platform: hal.Platform
    scale: Scale
    rounds: int

    @property
    def device(self) -> Device:
        return self.platform.device()

    def repeat(self, *calls: Callable[[], float]) -> list[Samples]:
        """Milliseconds of each call over the rounds, in turns; a first round does not count."""
        rounds = [[call() for call in calls] for _ in range(self.rounds + 1)]
        return [milliseconds(column) for column in zip(*rounds[1:], strict=True)]

    @contextmanager
    def sleeper(self) -> Iterator[SleepManager]:
        backing = "pinned" if self.platform.capabilities.pinned_host else "anonymous"
        with SleepManager(self.platform, backup=BackupOptions(backing=backing)) as sleeper:
            yield sleeper

    def tensors(self, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
        """Unwritten bytes on the device, of these sizes in turns."""
        device = torch_device(self.platform, 0)
        chosen = (sizes[index % len(sizes)] for index in range(count))
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in chosen]


# ---- allocation ----------------------------------------------------------------------------------


class Touch:
    """Allocates tensors in a scope and writes them: with empty caches, or out of the cache."""

    def __init__(self, bench: Bench, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self._bench, self._scope = bench, scope
        self._pool: hal.Pool | None = None

    def cold(self) -> float:
        if self._pool is not None:
            self._pool.trim()
        give_torch_cache_back(self._bench.platform)
        return timed(self._touch)

    def warm(self) -> float:
        return timed(self._touch)

    def _touch(self) -> None:
        with self._scope() as self._pool:
            tensors = self._bench.tensors(MIXED, self._bench.scale.touched)
        for tensor in tensors:
            tensor.fill_(FILL)
        self._bench.device.synchronize()


def first_touch(bench: Bench) -> list[Figure]:
    """Tensors in a pool against tensors of torch's own allocator."""
    with bench.sleeper() as sleeper:
        pooled, plain = Touch(bench, lambda: sleeper.pool("weights")), Touch(bench, nullcontext)
        cold, cold_plain, warm, warm_plain = bench.repeat(
            pooled.cold, plain.cold, pooled.warm, plain.warm
        )
    tensors = f"{bench.scale.touched:,} tensors"
    return [
        Figure(f"first touch of {tensors}", "ms", cold, "torch's own", cold_plain),
        Figure(f"{tensors} from the cache", "ms", warm, "torch's own", warm_plain),
    ]


# ---- many small tensors --------------------------------------------------------------------------


def small_tensors(bench: Bench) -> list[Figure]:
    """Sleep and wake of small tensors that share segments."""
    with bench.sleeper() as sleeper:
        with sleeper.pool("weights"):
            tensors = bench.tensors(SMALL, bench.scale.small)
        for index, tensor in enumerate(tensors):
            tensor.fill_(index % 251)
        before = _total(tensors)
        slept, woke = bench.repeat(lambda: timed(sleeper.sleep), lambda: timed(sleeper.wake_up))
        _require(_total(tensors) == before, "the small tensors changed")
    count = f"{bench.scale.small:,} small tensors"
    return [Figure(f"sleep of {count}", "ms", slept), Figure(f"wake of {count}", "ms", woke)]


# ---- a KV cache alone ----------------------------------------------------------------------------


def kv_cache(bench: Bench) -> list[Figure]:
    """Give a KV cache up and get it back, zeroed."""
    scale = bench.scale
    with bench.sleeper() as sleeper:
        with sleeper.pool("kv_cache"):
            cache = bench.tensors((scale.kv_piece,), scale.kv_cache // scale.kv_piece)

        def discard() -> float:
            for part in cache:
                part.fill_(FILL)
            bench.device.synchronize()
            return timed(lambda: sleeper.sleep(policy={"kv_cache": Policy.DISCARD}))

        def wake_after_rest() -> float:
            time.sleep(REST_SECONDS)
            return timed(sleeper.wake_up)

        slept, woke, _, at_once = bench.repeat(
            discard, wake_after_rest, discard, lambda: timed(sleeper.wake_up)
        )
        _require(not any(bool(part.any()) for part in cache), "the cache is not zero")
    round_trip = tuple(a + b for a, b in zip(slept, woke, strict=True))
    bound = KV_WAKE_MILLISECONDS if scale is ACCELERATOR else None
    size = f"{scale.kv_cache / GIB:g} GiB of KV cache"
    return [
        Figure(f"wake of {size}, zeroed", "ms", woke, at_most=bound),
        Figure(f"sleep and wake of {size}", "ms", round_trip),
        Figure(f"wake of {size} in the moment of its sleep", "ms", at_once),
    ]


# ---- one segment ---------------------------------------------------------------------------------


class Primitives:
    """The driver's calls for a segment, one by one, in pieces of the size that the ledger uses."""

    def __init__(self, device: Device, size: int) -> None:
        self._device, self._size = device, size
        piece = device.facts.chunk or size
        self._pieces = [(at, min(piece, size - at)) for at in range(0, size, piece)]
        self._address = 0
        self._handles: list[int] = []

    def build(self) -> None:
        device = self._device
        self._address = device.reserve(self._size, device.facts.alignment)
        for offset, size in self._pieces:
            self._handles.append(device.create(size))
            device.map(self._address + offset, size, self._handles[-1])
        device.access(self._address, self._size)

    def fill(self) -> None:
        self._device.fill(self._address, 0, self._size)
        self._device.synchronize()

    def drop(self) -> None:
        for offset, size in self._pieces:
            self._device.unmap(self._address + offset, size)
        for handle, (_, size) in zip(self._handles, self._pieces, strict=True):
            self._device.release(handle, size)
        self._handles.clear()
        self._device.unreserve(self._address, self._size)


class Ledger:
    """A segment like it in the ledger, and its transitions; it is full whenever it is given up."""

    def __init__(self, device: Device, size: int) -> None:
        self._device, self._size = device, size
        self._pool = device.create_pool("bench").id
        self._arena = Arena(device)
        self._address = 0

    def allocate(self) -> float:
        return timed(self._allocate)

    def _allocate(self) -> None:
        self._address = self._device.allocate(self._pool, self._size)

    def sleep(self) -> float:
        orders = [Order(each, Action.DISCARD) for each in self._device.segments(self._pool)]
        self._fill()
        return timed(lambda: self._device.sleep(self._arena, orders))

    def wake(self) -> float:
        segments = self._device.segments(self._pool)
        return timed(lambda: self._device.wake(self._arena, segments))

    def free(self) -> float:
        self._fill()
        return timed(lambda: self._device.free(self._address))

    def close(self) -> None:
        self._device.destroy_pool(self._pool)
        self._arena.close()

    def _fill(self) -> None:
        self._device.fill(self._address, FILL, self._size)
        self._device.synchronize()


def segment(bench: Bench) -> list[Figure]:
    """Build and take down one segment: by the ledger, and by the primitives alone."""
    size = bench.scale.segment
    raw, ledger = Primitives(bench.device, size), Ledger(bench.device, size)
    build, fill, drop, allocate, sleep, wake, free = bench.repeat(
        *(lambda call=call: timed(call) for call in (raw.build, raw.fill, raw.drop)),
        ledger.allocate,
        ledger.sleep,
        ledger.wake,
        ledger.free,
    )
    ledger.close()
    filled = tuple(a + b for a, b in zip(build, fill, strict=True))
    amount = f"{size / GIB:g} GiB"
    return [
        Figure(f"allocate {amount}", "ms", allocate, "primitives", build),
        Figure(f"free {amount}", "ms", free, "primitives", drop),
        Figure(f"discard {amount}", "ms", sleep, "primitives", drop),
        Figure(f"wake {amount}, zeroed", "ms", wake, "primitives, fill", filled),
    ]


# ---- all of it -----------------------------------------------------------------------------------


def _total(tensors: Sequence[torch.Tensor]) -> int:
    """The sum of all 8-byte words, which wraps."""
    return int(torch.cat(tuple(tensors)).view(torch.int64).sum())


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise RuntimeError(f"{otherwise}: the figures mean nothing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platform", help="platform name (default: HAL_PLATFORM, else what is detected)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    platform = hal.detect(options.platform)
    scale = HOST if platform.capabilities.unified_memory else ACCELERATOR
    bench = Bench(platform, scale, options.rounds)
    parts = (first_touch, small_tensors, kv_cache, segment)
    figures = [figure for part in parts for figure in part(bench)]
    settings = asdict(scale) | {"rounds": options.rounds, "mixed": MIXED, "small_sizes": SMALL}
    return finish("pools", platform, figures, settings, options.json)


if __name__ == "__main__":
    sys.exit(main())
