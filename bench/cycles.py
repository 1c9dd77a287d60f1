"""1,000 sleep and wake cycles of a small engine: the books end where they began, and memory does
not creep.

Mapped bytes, handles, reservations and open files are compared exactly, from the first cycle on (a
file of backups is opened at the first sleep), and open files also from before the manager to after
its close. Resident memory is read after every wake once garbage is collected, and so is the device
memory in use where the device has its own; a line is fitted to what follows the warm-up.
"""

from __future__ import annotations

import argparse
import array
import gc
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from figures import environment

import hal
from hal.core import BackupOptions, SleepManager
from hal.cpu.telemetry import resident_bytes
from hal.pools import torch_device

MIB = 1 << 20
PYTHON_ARENA = MIB
"""What Python's allocator takes from the system at once: its pages are touched one by one, which is
not a leak.
"""
DEVICE_PAGE = 2 * MIB
"""The least that a device's memory in use can grow by."""
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
    def growth(self) -> float:
        """Bytes over all cycles, along the line."""
        return self.bytes_per_cycle * self.cycles

    @property
    def is_noise(self) -> bool:
        """Whether the slope may be zero (three standard errors), or adds up to one Python arena."""
        return self.bytes_per_cycle <= 3 * self.standard_error or self.growth <= PYTHON_ARENA


@dataclass(frozen=True)
class Outcome:
    """Books after the first and the last cycle, open files around the manager's life, creep.

    `device` is None where the device has no memory of its own, or does not tell how much is free.
    """

    before: Books
    after: Books
    files_without_manager: tuple[int, int]
    resident: Creep
    device: Creep | None

    @property
    def is_clean(self) -> bool:
        """Nothing grew: of the device's memory, not even a page of its granularity."""
        first, last = self.files_without_manager
        kept = self.before == self.after and first == last
        device_kept = self.device is None or self.device.growth < DEVICE_PAGE / 2
        return kept and self.resident.is_noise and device_kept


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


class Series:
    """Memory in use after each cycle, in arrays that are there from the start."""

    def __init__(self, sleeper: SleepManager, cycles: int) -> None:
        self._device = sleeper.device if tells_its_memory(sleeper.platform) else None
        self.resident, self.used = (array.array("q", bytes(8 * cycles)) for _ in range(2))

    def note(self, cycle: int) -> None:
        gc.collect(0)
        self.resident[cycle] = resident_bytes()[0] or 0
        if self._device:
            free, total = self._device.memory()
            self.used[cycle] = total - free

    def creep(self, warm_up: int) -> tuple[Creep, Creep | None]:
        """Of resident memory, and of the device's."""
        used = fit(self.used[warm_up:]) if self._device else None
        return fit(self.resident[warm_up:]), used


def tells_its_memory(platform: hal.Platform) -> bool:
    found = platform.capabilities
    return not found.unified_memory and bool(found.free_is_truthful)


def run(platform: hal.Platform, cycles: int, warm_up: int, backing: str | None) -> Outcome:
    """Cycle an engine; raises when it computes something else after a wake than before."""
    with life(platform, backing):
        pass  # what the process opens for its first use of the device stays open
    files = open_files()
    with life(platform, backing) as (sleeper, engine, expected):
        before = books(sleeper)
        series = Series(sleeper, cycles)
        for cycle in range(cycles):
            cycle_once(sleeper, engine, cycle, expected)
            series.note(cycle)
        after = books(sleeper)
        del engine
    return Outcome(before, after, (files, open_files()), *series.creep(warm_up))


@contextmanager
def life(
    platform: hal.Platform, backing: str | None
) -> Iterator[tuple[SleepManager, Engine, float]]:
    """A manager and its engine after their first cycle, and what the engine computes."""
    with SleepManager(platform, backup=BackupOptions(backing=backing)) as sleeper:
        engine = Engine(sleeper)
        expected = engine.step(0)
        cycle_once(sleeper, engine, 0, expected)
        yield sleeper, engine, expected
        del engine


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
    if options.cycles < options.warm_up + 2:
        parser.error(f"--cycles must be at least {options.warm_up + 2}, two more than --warm-up")
    platform = hal.detect(options.platform)
    outcome = run(platform, options.cycles, options.warm_up, options.backing)
    print_outcome(platform, outcome)
    if options.json:
        options.json.write_text(json.dumps(report(platform, outcome, vars(options)), indent=2))
    return 0 if outcome.is_clean else 1


def report(
    platform: hal.Platform, outcome: Outcome, options: Mapping[str, Any]
) -> dict[str, object]:
    """The outcome as plain values; sizes in bytes."""
    return {
        "schema_version": 1,
        "bench": "cycles",
        "passed": outcome.is_clean,
        "environment": environment(platform),
        "settings": {name: options[name] for name in ("cycles", "warm_up", "backing")},
        **asdict(outcome),
    }


def print_outcome(platform: hal.Platform, outcome: Outcome) -> None:
    first, last = outcome.files_without_manager
    print(f"{platform.name}, books after the first cycle and after the last:")
    for name, count in outcome.before.ledger.items():
        print(f"  {name:<14} {count:>12} {outcome.after.ledger[name]:>12}")
    print(
        f"  {'backup bytes':<14} {outcome.before.backup_bytes:>12} {outcome.after.backup_bytes:>12}"
    )
    print(f"  {'open files':<14} {outcome.before.open_files:>12} {outcome.after.open_files:>12}")
    print(f"open files before the manager {first}, after its close {last}")
    print(f"resident memory: {creep_text(outcome.resident)}")
    if outcome.device:
        print(f"device memory: {creep_text(outcome.device)}")
    print(verdict(outcome))


def creep_text(creep: Creep) -> str:
    return (
        f"{creep.bytes_per_cycle:+.1f} ± {creep.standard_error:.1f} bytes a cycle over "
        f"{creep.cycles} cycles, noise {creep.noise / 1024:.1f} KiB"
    )


def verdict(outcome: Outcome) -> str:
    if not outcome.is_clean:
        return "NOT CLEAN: something grew"
    device = outcome.device
    used = f", device memory {device.bytes_per_cycle / MIB:+.3f} MiB a cycle" if device else ""
    return f"clean: {outcome.resident.cycles} cycles after the warm-up{used}"


if __name__ == "__main__":
    sys.exit(main())
