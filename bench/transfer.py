"""How fast sleep and wake move bytes, against plain copies in the same run.

Each round measures both ways of the link and then both transitions, so that a machine that slows
down slows all four; the medians are compared. Where device and host memory are apart, backups go to
pinned memory, and two more things are measured: the first sleep, which has to make that memory,
against touching and registering as much overlapped with the copy (whichever of the two is slower
bounds it), and a sleep after `prepare()`, which has it already. All measurements of fresh host
memory come after a first touch of as much (a virtual machine's memory may grow by it).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from figures import Figure, Samples, finish, rates, timed
from links import (
    LINK_BYTES,
    MIB,
    HostCost,
    link_of,
    touch_and_register,
    warm_host_memory,
)

import hal
from hal.core import BackupOptions, SleepManager
from hal.pools import torch_device

WARM_UP = {True: 3, False: 1}
"""Rounds that do not count, by whether device and host memory are the same."""
STEADY, FIRST = 0.98, 0.8
"""Least ratios to the plain copy once host memory is there, and while it is made."""
FRESH_ROUNDS = 3
HIDDEN, ATTENTION, MLP, VOCABULARY = 5120, 7168, 17408, 151_936
"""Widths of a decoder with 14 billion parameters, of which as many layers are made as fit."""


@dataclass
class Steady:
    """Bytes a second and seconds of the rounds that count, once host memory is there."""

    out: list[float] = field(default_factory=list)
    sleep: list[float] = field(default_factory=list)
    into: list[float] = field(default_factory=list)
    wake: list[float] = field(default_factory=list)


@dataclass
class Fresh:
    """Seconds of the rounds in which host memory is made: before the sleep, or by it."""

    cost: list[HostCost] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    prepared: list[float] = field(default_factory=list)


class Weights:
    """A pool of tensors of mixed sizes with random bytes, and their checksum."""

    def __init__(self, sleeper: SleepManager, size: int) -> None:
        device = torch_device(sleeper.platform, 0)
        self.size = size
        with sleeper.pool("weights"):
            self.tensors = [
                torch.empty(n, dtype=torch.uint8, device=device) for n in decoder_sizes(size)
            ]
        for tensor in self.tensors:
            tensor.random_()
        self._expected = self._checksum()

    def _checksum(self) -> int:
        """The sum of all 8-byte words, which wraps."""
        return sum(int(tensor.view(torch.int64).sum()) for tensor in self.tensors)

    def check(self) -> None:
        if self._checksum() != self._expected:
            raise RuntimeError("the weights changed over the cycles: the rates mean nothing")


def decoder_sizes(total: int) -> list[int]:
    """Bytes of the bfloat16 tensors of a decoder, layer by layer, that add up to `total`.

    The tail that is no whole layer comes in pieces of 64 MiB. (Thousands of small tensors are
    measured by bench/pools.py.)
    """
    matrices = (ATTENTION * HIDDEN, HIDDEN * HIDDEN, 2 * MLP * HIDDEN, HIDDEN * MLP)
    layer = [2 * elements for elements in (*matrices, HIDDEN, HIDDEN)]
    embedding = 2 * VOCABULARY * HIDDEN
    sizes = [embedding, embedding] if total > 4 * embedding else []
    while sum(sizes) + sum(layer) <= total:
        sizes += layer
    return sizes + list(_pieces(total - sum(sizes), 64 * MIB))


def _pieces(size: int, most: int) -> Iterator[int]:
    for offset in range(0, size, most):
        yield min(most, size - offset)


def measure(
    platform: hal.Platform, size: int, rounds: int, backing: str
) -> tuple[Steady, Fresh | None]:
    """Sleep and wake a pool of `size` random bytes, beside the platform's link."""
    apart = not platform.capabilities.unified_memory
    with SleepManager(platform, backup=BackupOptions(backing=backing)) as sleeper:
        weights = Weights(sleeper, size)
        fresh = measure_fresh(sleeper, size) if apart else None
        steady = measure_steady(sleeper, size, rounds)
        weights.check()
        del weights
    return steady, fresh


def measure_steady(sleeper: SleepManager, size: int, rounds: int) -> Steady:
    link, steady = link_of(sleeper.platform, size), Steady()
    warm_up = WARM_UP[bool(sleeper.capabilities.unified_memory)]
    for counts in (*[False] * warm_up, *[True] * rounds):
        found = link.copy_out(), timed(sleeper.sleep), link.copy_in(), timed(sleeper.wake_up)
        if counts:
            for samples, value in zip(vars(steady).values(), found, strict=True):
                samples.append(value)
    return steady


def measure_fresh(sleeper: SleepManager, size: int) -> Fresh:
    """Sleeps that find no host memory, and sleeps that find it prepared; the arena goes between."""
    fresh, needed = Fresh(), sleeper.plan_sleep().host_needed
    for _ in range(FRESH_ROUNDS):
        fresh.cost.append(touch_and_register(sleeper.device, size))
        fresh.first.append(timed(sleeper.sleep))
        sleeper.wake_up()
        sleeper.trim_host()
        fresh.prepare.append(timed(lambda: sleeper.prepare(needed)))
        fresh.prepared.append(timed(sleeper.sleep))
        sleeper.wake_up()
        sleeper.trim_host()
    return fresh


def figures_of(size: int, steady: Steady, fresh: Fresh | None) -> list[Figure]:
    target = STEADY if fresh else None
    out, into = ([rate / 1e9 for rate in link] for link in (steady.out, steady.into))
    figures = [
        _rate("sleep", size, steady.sleep, "plain copy", tuple(out), at_least=target),
        _rate("wake", size, steady.wake, "plain copy", tuple(into), at_least=target),
    ]
    return figures + (_fresh_figures(size, tuple(out), fresh) if fresh else [])


def _fresh_figures(size: int, link: Samples, fresh: Fresh) -> list[Figure]:
    ready = rates(size, (cost.seconds for cost in fresh.cost))
    slower = tuple(min(rate, statistics.median(link)) for rate in ready)
    return [
        _rate("first sleep", size, fresh.first, "slower of link, host", slower, at_least=FIRST),
        _rate("sleep after prepare()", size, fresh.prepared, "plain copy", link),
        _rate("prepare()", size, fresh.prepare, "touch and register", ready),
        _rate("touch with all cores", size, [cost.touch for cost in fresh.cost]),
        _rate("register in chunks", size, [cost.register for cost in fresh.cost]),
    ]


def _rate(
    name: str,
    size: int,
    seconds: Iterable[float],
    reference: str = "",
    references: Samples = (),
    *,
    at_least: float | None = None,
) -> Figure:
    """The rate of moving `size` bytes, against rates in GB/s."""
    return Figure(name, "GB/s", rates(size, seconds), reference, references, at_least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platform", help="platform name (default: HAL_PLATFORM, else what is detected)"
    )
    parser.add_argument("--mib", type=int, help="size of the pool (default: 24 GiB, a host's 1)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--backing",
        help='"anonymous", "pinned" or "file:DIR" (default: pinned, a host\'s anonymous)',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    platform = hal.detect(options.platform)
    same = bool(platform.capabilities.unified_memory)
    size = (options.mib or (1024 if same else 24 * 1024)) * MIB
    backing = options.backing or ("anonymous" if same else "pinned")
    warmed = 0.0 if same else warm_host_memory(size + 2 * LINK_BYTES)
    steady, fresh = measure(platform, size, options.rounds, backing)
    settings = {
        "bytes": size,
        "tensors": len(decoder_sizes(size)),
        "rounds": options.rounds,
        "rounds_with_fresh_host_memory": FRESH_ROUNDS,
        "backing": backing,
        "first_touch_of_host_memory_seconds": warmed,
    }
    return finish("transfer", platform, figures_of(size, steady, fresh), settings, options.json)


if __name__ == "__main__":
    sys.exit(main())
