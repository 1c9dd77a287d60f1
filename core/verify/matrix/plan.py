"""From options to a run of the matrix: which cells, where, and against which pinned set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hal.core.verify.breaks import choose_break
from hal.core.verify.matrix import pins, workers
from hal.core.verify.matrix.cells import Site
from hal.core.verify.matrix.report import CellResult, MatrixReport
from hal.core.verify.matrix.support import unsupported, why_not
from hal.core.verify.matrix.table import Cell, Matrix, Tier, find_matrix
from hal.core.verify.plan import environment
from hal.core.verify.subject import Setup
from hal.core.verify.timing import Stopwatch
from hal.detect import detect
from hal.errors import InvalidArgument
from hal.platform import Platform

_DEFAULT_TIER = "quick"


@dataclass(frozen=True)
class MatrixOptions:
    """What a run of the matrix was asked for; None means the tier's or the platform's own."""

    tier: str | None = None
    cells: tuple[str, ...] = ()
    """Run these alone."""
    platform: str | None = None
    device: int = 0
    requests: int | None = None
    seed: int = 0
    jobs: int | None = None
    break_name: str | None = None
    matrix_file: Path | None = None
    bench: bool = True
    """Measure the rates of sleep and wake against the link too."""


class Observer(Protocol):
    """Is told how a run goes on."""

    def finished(self, result: CellResult) -> None: ...


@dataclass(frozen=True)
class MatrixPlan:
    """A run that is ready."""

    options: MatrixOptions
    file: Path
    tier: Tier
    platform: Platform
    cells: tuple[Cell, ...]
    missing: Mapping[str, str]
    """Cell -> why the platform cannot have it."""

    @property
    def runnable(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.name not in self.missing)

    @property
    def requests(self) -> int:
        return self.options.requests or self.tier.requests

    @property
    def jobs(self) -> int:
        """Processes: on an accelerator fewer, since each has a context of its own."""
        if self.options.jobs is not None:
            return self.options.jobs
        cores = os.cpu_count() or 1
        is_host = bool(self.platform.capabilities_of(self.options.device).host_access)
        return min(2, cores) if is_host else min(4, max(1, cores // 4))

    @property
    def pin_file(self) -> Path:
        return pins.pin_file(self.file, self.platform.name)

    def pin(self) -> None:
        """Make this set of cells the platform's."""
        names = [cell.name for cell in self.runnable]
        pins.write(self.pin_file, self.tier.name, names, self.missing)

    def run(self, observer: Observer) -> MatrixReport:
        """Run every cell; every difference is in the report, none raises."""
        options = self.options
        site = Site(self.platform.name, options.device, options.seed, options.break_name)
        results = {
            name: CellResult.unsupported(self._cell(name), why)
            for name, why in self.missing.items()
        }
        for result in results.values():
            observer.finished(result)
        with Stopwatch() as watch:
            for cells, jobs in self._turns():
                work = [workers.Job(cell, self.requests) for cell in cells]
                for result in workers.run(site, work, jobs):
                    results[result.name] = result
                    observer.finished(result)
        return MatrixReport(
            tier=self.tier.name,
            platform=self.platform.name,
            cells=tuple(results[cell.name] for cell in self.cells),
            environment=environment(Setup(self.platform, options.device)),
            options=self._as_options(),
            seconds=watch.seconds,
            budget_minutes=self.tier.minutes,
            problems=tuple(self._problems()),
            notes=tuple(self._notes(watch.seconds)),
            bench=self._bench(),
        )

    def _cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)

    def _turns(self) -> Iterator[tuple[list[Cell], int]]:
        """Cells that run side by side, and in how many processes: long ones first, so that the last
        one to end is short. Those that take all of the device's memory run alone.
        """
        longest_first = sorted(self.runnable, key=lambda cell: -int(cell["cycles"]))
        alone = [cell for cell in longest_first if cell["fault"] == "memory-taken"]
        yield [cell for cell in longest_first if cell not in alone], self.jobs
        yield alone, min(1, self.jobs)

    def _as_options(self) -> dict[str, Any]:
        options = self.options
        return {
            "requests": self.requests,
            "seed": options.seed,
            "device": options.device,
            "break": options.break_name,
            "cells": list(options.cells),
            "jobs": self.jobs,
        }

    def _problems(self) -> list[str]:
        if self.options.cells:  # a part of a tier is no set
            return []
        names = [cell.name for cell in self.runnable]
        return pins.problems(self.pin_file, self.tier.name, names, self.missing)

    def _notes(self, seconds: float) -> list[str]:
        notes = []
        if not self.options.cells and not self.pin_file.exists():
            notes.append(f"no pinned set of cells for {self.platform.name}: add it with --pin")
        if seconds > self.tier.minutes * 60:
            notes.append(f"{seconds / 60:.1f} minutes, over the {self.tier.minutes:g} of the tier")
        return notes

    def _bench(self) -> Mapping[str, Any] | None:
        if not self.options.bench:
            return None
        from hal.core.bench import measure

        return measure(self.platform, self.options.device).as_dict()


def make_plan(options: MatrixOptions) -> MatrixPlan:
    """Resolve the options; raises a `HalError` that says which one is wrong."""
    if options.requests is not None and options.requests < 1:
        raise InvalidArgument(f"--requests must be at least 1, not {options.requests}")
    if options.break_name:
        choose_break(options.break_name)
    file = options.matrix_file or find_matrix()
    matrix = Matrix.load(file)
    tier = matrix.tier(options.tier or _DEFAULT_TIER)
    platform = detect(options.platform)
    platform.device(options.device)
    missing = unsupported(matrix, platform, options.device)
    cells = tuple(map(matrix.parse, options.cells)) or matrix.cells(tier, missing)
    reasons = {cell.name: reason for cell in cells if (reason := why_not(cell, missing))}
    return MatrixPlan(options, file, tier, platform, cells, reasons)
