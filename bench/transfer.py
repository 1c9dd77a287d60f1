"""How fast sleep and wake move bytes, against a plain copy into freshly mapped memory in the same
run.

Each round measures both ways of the link and then both transitions, so that a machine that slows
down slows all four; the medians are compared. Both sides pay for fresh pages: a sleep writes into
host memory that it has just taken, a wake into device memory that it has just created.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

import hal
from hal.core import BackupOptions, SleepManager
from hal.pools import torch_device

MIB = 1 << 20
WARM_UP = 3
"""Rounds that do not count: a virtual machine's first touch of its memory is many times slower."""


class Link(Protocol):
    """The plain copies that transitions are measured against; each returns its seconds."""

    def copy_out(self) -> float:
        """Device memory to freshly mapped host memory."""

    def copy_in(self) -> float:
        """Host memory to freshly mapped device memory."""


class HostLink:
    """The host's link: one memcpy between a memfd, its device memory, and anonymous memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        with self._memfd() as device, self._anonymous() as host:
            ctypes.memset(_address(device), 1, size)
            ctypes.memset(_address(host), 2, size)

    def copy_out(self) -> float:
        with self._memfd() as device:
            ctypes.memset(_address(device), 1, self.size)
            return self._timed_copy(self._anonymous, device)

    def copy_in(self) -> float:
        with self._anonymous() as host:
            ctypes.memset(_address(host), 2, self.size)
            return self._timed_copy(self._memfd, host)

    def _timed_copy(self, fresh: Callable[[], Any], source: mmap.mmap) -> float:
        start = time.perf_counter()
        with fresh() as target:
            ctypes.memmove(_address(target), _address(source), self.size)
            return time.perf_counter() - start

    @contextmanager
    def _anonymous(self) -> Iterator[mmap.mmap]:
        with mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            yield memory

    @contextmanager
    def _memfd(self) -> Iterator[mmap.mmap]:
        file = os.memfd_create("bench")
        try:
            os.ftruncate(file, self.size)
            with mmap.mmap(file, self.size, flags=mmap.MAP_SHARED) as memory:
                yield memory
        finally:
            os.close(file)


def _address(memory: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(memory)
    return ctypes.addressof(view)


LINKS: dict[str, Callable[[int], Link]] = {"cpu": HostLink}
"""Device type -> its plain copies."""


@dataclass(frozen=True)
class Result:
    """One direction: median bytes a second of the plain copy and of the transition."""

    direction: str
    plain: float
    transition: float

    @property
    def ratio(self) -> float:
        return self.transition / self.plain


def measure(platform: hal.Platform, size: int, rounds: int, backing: str) -> list[Result]:
    """Sleep and wake a pool of `size` random bytes `rounds` times, beside the platform's link."""
    link = LINKS[platform.device_type](size)
    seconds: dict[str, list[float]] = {"copy out": [], "sleep": [], "copy in": [], "wake": []}
    with SleepManager(platform, backup=BackupOptions(backing=backing)) as sleeper:
        with sleeper.pool("weights"):
            weights = torch.empty(size, dtype=torch.uint8, device=torch_device(platform, 0))
        weights.random_()
        expected = checksum(weights)
        for _ in range(WARM_UP + rounds):
            seconds["copy out"].append(link.copy_out())
            seconds["sleep"].append(timed(sleeper.sleep))
            seconds["copy in"].append(link.copy_in())
            seconds["wake"].append(timed(sleeper.wake_up))
        if checksum(weights) != expected:
            raise RuntimeError("the weights changed over the cycles: the rates mean nothing")
        del weights
    rate = {name: size / statistics.median(times[WARM_UP:]) for name, times in seconds.items()}
    return [
        Result("sleep", rate["copy out"], rate["sleep"]),
        Result("wake", rate["copy in"], rate["wake"]),
    ]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def checksum(tensor: torch.Tensor) -> int:
    """The sum of all 8-byte words."""
    return int(tensor.view(torch.int64).sum())


def table(results: list[Result]) -> Table:
    shown = Table("direction", "plain copy", "transition", "ratio")
    for result in results:
        rates = (f"{rate / 1e9:.2f} GB/s" for rate in (result.plain, result.transition))
        shown.add_row(result.direction, *rates, f"{result.ratio:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platform", help="platform name (default: HAL_PLATFORM, else what is detected)"
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the pool")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--backing", default="anonymous", help='"anonymous", "pinned" or "file:DIR"'
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    platform = hal.detect(options.platform)
    results = measure(platform, options.mib * MIB, options.rounds, options.backing)
    Console().print(
        f"{platform.name}, {options.mib} MiB, {options.backing}, median of {options.rounds}"
    )
    Console().print(table(results))
    if options.json:
        figures = [vars(result) | {"ratio": result.ratio} for result in results]
        options.json.write_text(json.dumps({"schema_version": 1, "results": figures}, indent=2))


if __name__ == "__main__":
    main()
