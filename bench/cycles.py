"""1,000 sleep and wake cycles of a small engine: the books end where they began, and memory does
not creep.

Mapped bytes, handles, reservations and open files are compared exactly, from the first cycle on (a
file of backups is opened at the first sleep), and open files also from before the manager to after
its close. Resident memory is read after every wake once garbage is collected, and a line is fitted
to what follows the warm-up.
"""

from __future__ import annotations

import argparse
import array
import gc
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import hal
from hal.core import BackupOptions, SleepManager
from hal.cpu.telemetry import resident_bytes
from hal.pools import torch_device

MIB = 1 << 20
PYTHON_ARENA = MIB
"""What Python's allocator takes from the system at once: its pages are touched one by one, which is
not a leak.
"""
BOOKS = ("segments", "mapped_bytes", "asleep_bytes", "handles", "mappings", "reservations")


@dataclass(frozen=True)
class Books:
    """What must end exactly as it began."""

    ledger: dict[str, int]
    open_files: int
    backup_bytes: int


@dataclass(frozen=True)
class Creep:
    """A line through resident bytes after the warm-up; `noise` is the spread around it."""

    cycles: int
    bytes_per_cycle: float
    standard_error: float
    noise: float

    @property
    def is_noise(self) -> bool:
        """Whether the slope may be zero (three standard errors), or adds up to one Python arena."""
        growth = self.bytes_per_cycle * self.cycles
        return self.bytes_per_cycle <= 3 * self.standard_error or growth <= PYTHON_ARENA


@dataclass(frozen=True)
class Outcome:
    """Books after the first and the last cycle, open files around the manager's life, creep."""

    before: Books
    after: Books
    files_without_manager: tuple[int, int]
    creep: Creep

    @property
    def is_clean(self) -> bool:
        first, last = self.files_without_manager
        return self.before == self.after and first == last and self.creep.is_noise


class Engine:
    """Weights, a KV cache that every step writes, and a table of runtime state."""

    def __init__(self, sleeper: SleepManager) -> None:
        device = torch_device(sleeper.platform, 0)
        with sleeper.pool("weights"):
            self.weights = torch.randn(512, 512, device=device)
        with sleeper.kv_init() as kv:
            with kv.cache():
                self.cache = torch.zeros(1024, 512, device=device)
            kv.declare(self.cache)
            self.slots = torch.arange(1024, device=device)

    def step(self, slot: int) -> float:
        row = self.slots[slot % len(self.slots)]
        self.cache[row] = torch.ones_like(self.cache[row]) @ self.weights
        return float(self.cache[row].sum())


def books(sleeper: SleepManager) -> Books:
    counters = sleeper.platform.device().counters().as_dict()
    return Books({name: counters[name] for name in BOOKS}, open_files(), sleeper.backup_bytes)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def fit(values: Sequence[int]) -> Creep:
    """Least squares of resident bytes over cycles; the standard error is that of the slope."""
    cycles = range(len(values))
    slope, intercept = statistics.linear_regression(cycles, values)
    rest = [value - slope * cycle - intercept for cycle, value in zip(cycles, values, strict=True)]
    noise = statistics.pstdev(rest)
    return Creep(
        len(values), slope, noise / (statistics.pstdev(cycles) * len(values) ** 0.5), noise
    )


def run(platform: hal.Platform, cycles: int, warm_up: int, backing: str | None) -> Outcome:
    """Cycle an engine; raises when it computes something else after a wake than before."""
    platform.device()
    files = open_files()
    with SleepManager(platform, backup=BackupOptions(backing=backing)) as sleeper:
        engine = Engine(sleeper)
        expected = engine.step(0)
        cycle_once(sleeper, engine, 0, expected)
        before = books(sleeper)
        resident = array.array("q", bytes(8 * cycles))
        for cycle in range(cycles):
            cycle_once(sleeper, engine, cycle, expected)
            gc.collect(0)
            resident[cycle] = resident_bytes()[0] or 0
        after = books(sleeper)
        del engine
    return Outcome(before, after, (files, open_files()), fit(resident[warm_up:]))


def cycle_once(sleeper: SleepManager, engine: Engine, cycle: int, expected: float) -> None:
    """Sleep, wake (every other time the weights first), and compute."""
    sleeper.sleep(level=1)
    if cycle % 2:
        sleeper.wake_up(["weights"])
    sleeper.wake_up()
    engine.step(cycle % 7)
    if engine.step(0) != expected:
        raise RuntimeError(f"cycle {cycle} computed something else")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platform", help="platform name (default: HAL_PLATFORM, else what is detected)"
    )
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument(
        "--warm-up", type=int, default=50, help="cycles before resident memory counts"
    )
    parser.add_argument(
        "--backing", help='"anonymous", "pinned" or "file:DIR" (default: the platform\'s)'
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    platform = hal.detect(options.platform)
    outcome = run(platform, options.cycles, options.warm_up, options.backing)
    print_outcome(platform, outcome)
    if options.json:
        figures = {"schema_version": 1, "clean": outcome.is_clean, **asdict(outcome)}
        options.json.write_text(json.dumps(figures, indent=2))
    return 0 if outcome.is_clean else 1


def print_outcome(platform: hal.Platform, outcome: Outcome) -> None:
    creep, (first, last) = outcome.creep, outcome.files_without_manager
    print(f"{platform.name}, books after the first cycle and after the last:")
    for name, count in outcome.before.ledger.items():
        print(f"  {name:<14} {count:>12} {outcome.after.ledger[name]:>12}")
    print(
        f"  {'backup bytes':<14} {outcome.before.backup_bytes:>12} {outcome.after.backup_bytes:>12}"
    )
    print(f"  {'open files':<14} {outcome.before.open_files:>12} {outcome.after.open_files:>12}")
    print(f"open files before the manager {first}, after its close {last}")
    print(
        f"resident memory over {creep.cycles} cycles: {creep.bytes_per_cycle:+.1f} ± "
        f"{creep.standard_error:.1f} bytes a cycle, noise {creep.noise / 1024:.1f} KiB"
    )
    print("clean" if outcome.is_clean else "NOT CLEAN: something grew")


if __name__ == "__main__":
    sys.exit(main())
