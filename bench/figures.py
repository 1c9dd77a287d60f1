"""Figures and what they are held against: medians over rounds, a table, JSON and a verdict."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import hal
from hal.environment import collect

SCHEMA_VERSION = 1
_PLACES = ("json", "markdown", "peers", "workdir")
"""Options that are paths: of the machine, not of what was measured."""
Samples = tuple[float, ...]


@dataclass(frozen=True)
class Figure:
    """One quantity over several rounds, and the reference that was measured beside it.

    `at_least` bounds the ratio of the medians, `at_most` the median itself; without either it is
    only reported.
    """

    name: str
    unit: str
    samples: Samples
    reference: str = ""
    reference_samples: Samples = field(default=())
    at_least: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def against(self) -> float | None:
        return statistics.median(self.reference_samples) if self.reference_samples else None

    @property
    def ratio(self) -> float | None:
        return self.value / self.against if self.against else None

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None when there is none."""
        if self.at_least is not None:
            return self.ratio is not None and self.ratio >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"ratio ≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g} {self.unit}"

    def as_dict(self) -> dict[str, Any]:
        derived = {"median": self.value, "reference_median": self.against, "ratio": self.ratio}
        return asdict(self) | derived | {"met": self.met}

    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        against = "" if self.against is None else f"{_number(self.against)} {self.reference}"
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        met = {True: "met", False: "MISSED", None: ""}[self.met]
        return self.name, f"{_number(self.value)} {self.unit}", against, ratio, self.target, met

    def __str__(self) -> str:
        found = f"{_number(self.value)} {self.unit}" if self.ratio is None else f"{self.ratio:.3f}"
        return f"{self.name} {found}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def timed(call: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def milliseconds(seconds: Iterable[float]) -> Samples:
    return tuple(1e3 * value for value in seconds)


def rates(size: int, seconds: Iterable[float]) -> Samples:
    """GB/s of moving `size` bytes."""
    return tuple(size / value / 1e9 for value in seconds)


def finish(
    bench: str,
    platform: hal.Platform,
    figures: Sequence[Figure],
    settings: dict[str, Any],
    path: Path | None,
) -> int:
    """Print the table and the verdict, write the JSON, and return the exit status."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_table(f"{bench} on {platform.capabilities.device_name}", figures))
    passed = all(figure.met is not False for figure in figures)
    if path:
        entries = [figure.as_dict() for figure in figures]
        report = {
            "schema_version": SCHEMA_VERSION,
            "bench": bench,
            "passed": passed,
            "environment": environment(platform),
            "settings": settings,
            "figures": entries,
        }
        path.write_text(json.dumps(report, indent=2) + "\n")
    console.out(_verdict(figures), highlight=False)
    return 0 if passed else 1


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report of a run that goes on, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(path)


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """The options of a run as text, without those that say where files of this machine are."""
    return {k: str(v) for k, v in vars(options).items() if k not in _PLACES}


def environment(platform: hal.Platform) -> dict[str, Any]:
    """Versions, the platform and its devices, and the host's size."""
    found = collect(platform.name).as_dict()
    host = {"processors": os.cpu_count(), "memory": found["host_memory"]}
    return {"versions": found["versions"], "platform": found["platform"], "host": host}


def _table(title: str, figures: Sequence[Figure]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("figure", "median", "against", "ratio", "target", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right", no_wrap=True)
    for figure in figures:
        table.add_row(*figure.row())
    return table


def _verdict(figures: Sequence[Figure]) -> str:
    bound = [figure for figure in figures if figure.met is not None]
    missed = [figure for figure in bound if not figure.met]
    if missed:
        return "MISSED: " + ", ".join(f"{figure} ({figure.target})" for figure in missed)
    if not bound:
        return f"{len(figures)} figures, no targets on this platform"
    return f"targets met: {', '.join(map(str, bound))}"
