"""What a run of the matrix found, as values; `as_dict` is the schema of report.json."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hal.core.verify.history import History
from hal.core.verify.matrix.table import Cell
from hal.core.verify.report import Finding

SCHEMA_VERSION = 1
TIMELINE = 120
"""Samples of a cell that a report keeps."""


class Verdict(enum.Enum):
    """How a cell ended."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    """The platform cannot have it; the reason says why."""


@dataclass(frozen=True)
class CellResult:
    """How one cell went; requests are counted over all of its rounds."""

    name: str
    values: Mapping[str, str]
    why: str
    verdict: Verdict
    reason: str = ""
    """Why it could not run, or the first finding."""
    rounds: int = 0
    compared: int = 0
    damaged: int = 0
    unstable: int = 0
    slept: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
    history: History | None = None

    @classmethod
    def unsupported(cls, cell: Cell, reason: str) -> CellResult:
        return cls(cell.name, cell.values, cell.why, Verdict.UNSUPPORTED, reason)

    @classmethod
    def broken(cls, cell: Cell, reason: str) -> CellResult:
        """A cell whose process ended before it had a verdict."""
        return cls(cell.name, cell.values, cell.why, Verdict.FAILED, reason)

    @property
    def faults(self) -> int:
        return self.history.faults if self.history else 0

    def without_samples(self) -> CellResult:
        """The same with lines only: reports of thousands of cycles stay small."""
        if self.history is None:
            return self
        return replace(self, history=replace(self.history, samples=[]))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "values": dict(self.values),
            "why": self.why,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "rounds": self.rounds,
            "compared": self.compared,
            "damaged": self.damaged,
            "unstable": self.unstable,
            "faults": self.faults,
            "slept_bytes": dict(self.slept),
            "seconds": round(self.seconds, 3),
            "findings": [finding.as_dict() for finding in self.findings],
            "warnings": list(self.warnings),
            **self._memory(),
        }

    def _memory(self) -> dict[str, Any]:
        if self.history is None:
            return {"device_slope": None, "host_slope": None, "timeline": []}
        device, host = self.history.device_line, self.history.host_line
        return {
            "device_slope": device.as_dict() if device else None,
            "host_slope": host.as_dict() if host else None,
            "timeline": [sample.as_dict() for sample in self.history.thinned(TIMELINE)],
        }


@dataclass(frozen=True)
class MatrixReport:
    """The verdict on a platform: which cells ran, how, and what else did not hold."""

    tier: str
    platform: str
    cells: tuple[CellResult, ...]
    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    seconds: float
    budget_minutes: float
    problems: tuple[str, ...] = ()
    """What does not hold of the set of cells: missing ones, unexpected ones, other reasons."""
    notes: tuple[str, ...] = ()
    bench: Mapping[str, Any] | None = None
    """Rates of sleep and wake against the link, measured in the same run."""
    schema_version: int = field(default=SCHEMA_VERSION, kw_only=True)

    @property
    def passed(self) -> bool:
        ran = self.of(Verdict.PASSED)
        return bool(ran) and not self.of(Verdict.FAILED) and not self.problems

    def of(self, verdict: Verdict) -> tuple[CellResult, ...]:
        """The cells with this verdict."""
        return tuple(cell for cell in self.cells if cell.verdict is verdict)

    def command(self, cell: str) -> str:
        """What reproduces one cell."""
        return command(self.platform, self.options, cell)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes, times in seconds."""
        return {
            "kind": "hal verify --matrix",
            "schema_version": self.schema_version,
            "passed": self.passed,
            "tier": self.tier,
            "platform": self.platform,
            "seconds": round(self.seconds, 3),
            "budget_minutes": self.budget_minutes,
            "environment": dict(self.environment),
            "options": dict(self.options),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "bench": None if self.bench is None else dict(self.bench),
            "cells": [cell.as_dict() | {"command": self.command(cell.name)} for cell in self.cells],
        }


def command(platform: str, options: Mapping[str, Any], cell: str) -> str:
    """The command line of one cell with a run's options."""
    parts = ["hal verify", f"--platform {platform}", f"--cell {cell}"]
    parts += [f"--requests {options['requests']}", f"--seed {options['seed']}"]
    if options.get("device"):
        parts.append(f"--device {options['device']}")
    if options.get("break"):
        parts.append(f"--break {options['break']}")
    return " ".join(parts)
