"""Memory over the cycles of a case: samples for a timeline, and lines that must not rise."""

from __future__ import annotations

import ctypes
import functools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.core.report import SleepReport, WakeReport
from hal.core.tags import Policy
from hal.core.verify.report import Finding, Gate
from hal.core.verify.subject import Subject

MIB = 1 << 20
FEWEST_SAMPLES = 10
"""Cycles from which a line is fitted."""
WARM_UP = 3
"""One cycle in so many comes before the fit."""
HOST_ALLOWANCE = 4 * MIB
"""What host memory may grow by in all without being called a leak: allocators take arenas of a MiB,
the second allocator of the same kind another.
"""


@dataclass(frozen=True)
class Line:
    """Least squares of bytes over cycles; `error` is the slope's standard error."""

    cycles: int
    slope: float
    error: float

    @classmethod
    def through(cls, values: Sequence[int]) -> Line | None:
        """A line through values after the warm-up; None when they are too few."""
        if len(values) < FEWEST_SAMPLES:
            return None
        fitted = values[len(values) // WARM_UP :]
        cycles = range(len(fitted))
        slope, start = statistics.linear_regression(cycles, fitted)
        rest = [value - slope * cycle - start for cycle, value in zip(cycles, fitted, strict=True)]
        spread = statistics.pstdev(cycles) * len(fitted) ** 0.5
        return cls(len(fitted), slope, statistics.pstdev(rest) / spread)

    @property
    def growth(self) -> float:
        """Bytes over all cycles, along the line."""
        return self.slope * self.cycles

    def __str__(self) -> str:
        return (
            f"{self.slope / MIB:+.3f} ± {self.error / MIB:.3f} MiB a cycle over "
            f"{self.cycles} cycles"
        )

    def as_dict(self) -> dict[str, float]:
        return {
            "cycles": self.cycles,
            "bytes_per_cycle": round(self.slope, 3),
            "standard_error": round(self.error, 3),
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory after one transition: mapped device bytes by tag, backups, anonymous host memory."""

    transition: str
    mapped: Mapping[str, int]
    backups: int
    host: int
    copied: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "transition": self.transition,
            "mapped": dict(self.mapped),
            "backup_bytes": self.backups,
            "host_bytes": self.host,
            "copied_bytes": self.copied,
            "seconds": round(self.seconds, 6),
        }


@dataclass
class History:
    """What a case's transitions left behind, sample by sample."""

    subject: Subject | None
    mapped: dict[str, int]
    samples: list[Sample] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    """Mapped bytes of the device after each full wake."""
    host: list[int] = field(default_factory=list)
    """Anonymous host memory after each full wake."""
    full_wakes: int = 0
    faults: int = 0
    """Transitions that were made to fail."""
    _states: dict[tuple[tuple[str, int], ...], dict[str, int]] = field(default_factory=dict)
    """Each state of `mapped` once: what is watched must not grow by being watched."""

    @classmethod
    def of(cls, subject: Subject) -> History:
        """A history that begins now, with everything awake."""
        tags = subject.sleeper.tags
        plan = subject.sleeper.plan_sleep(policy=dict.fromkeys(tags, Policy.DISCARD))
        mapped: dict[str, int] = {}
        for tag in plan.tags:
            mapped[tag.tag] = mapped.get(tag.tag, 0) + tag.bytes
        return cls(subject, mapped)

    def slept(self, report: SleepReport) -> None:
        """Note a sleep."""
        self._note("sleep", report, -1)

    def woke(self, report: WakeReport) -> None:
        """Note a wake."""
        self._note("wake", report, 1)
        if self.subject and not report.still_asleep:
            self.device.append(self.subject.device.counters().mapped_bytes)
            self.host.append(anonymous_bytes())

    def _note(self, kind: str, report: SleepReport | WakeReport, sign: int) -> None:
        for tag in report.tags:
            self.mapped[tag.tag] = self.mapped.get(tag.tag, 0) + sign * tag.bytes
        backups = self.subject.sleeper.held_bytes if self.subject else 0
        self.samples.append(
            Sample(
                kind,
                self._states.setdefault(tuple(self.mapped.items()), dict(self.mapped)),
                backups,
                anonymous_bytes(),
                report.copied_bytes,
                report.seconds,
            )
        )

    def ended(self) -> History:
        """The same without the subject, which is gone."""
        self.subject = None
        return self

    def thinned(self, most: int) -> list[Sample]:
        """At most so many samples, evenly, in pairs of a sleep and the wake after it."""
        pairs = max(1, -(-len(self.samples) // most))
        return [s for index, s in enumerate(self.samples) if index // 2 % pairs == 0]

    @property
    def device_line(self) -> Line | None:
        return Line.through(self.device)

    @property
    def host_line(self) -> Line | None:
        return Line.through(self.host)

    def creep(self) -> Iterator[Finding]:
        """Device memory may not grow at all; host memory not beyond noise and its allowance."""
        if (line := self.device_line) and line.slope:
            yield Finding(Gate.CREEP, f"device memory after each wake: {line}")
        if (line := self.host_line) and self._creeps(line):
            yield Finding(Gate.CREEP, f"host memory after each wake: {line}")

    @staticmethod
    def _creeps(line: Line) -> bool:
        return line.slope > 3 * line.error and line.growth > HOST_ALLOWANCE

    def rates(self, kind: str) -> float | None:
        """The median of bytes copied a second in one kind of transition."""
        rates = [
            sample.copied / sample.seconds
            for sample in self.samples
            if sample.transition == kind and sample.copied and sample.seconds
        ]
        return statistics.median(rates) if rates else None


def anonymous_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Resident anonymous memory of this process: what it allocated, without files and devices.

    What malloc keeps for later is given back before: in a process that runs one cell after another
    it grows and shrinks by megabytes that nobody holds.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's call for that; None where the C library is another."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return found
