"""Two reports of the matrix, cell by cell: two vendors, two versions, or two runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal.core.verify.matrix.report import SCHEMA_VERSION
from hal.errors import InvalidArgument

KIND = "hal verify --matrix"


@dataclass(frozen=True)
class Difference:
    """A cell that two reports do not agree on; None where a report does not have it."""

    cell: str
    first: str | None
    second: str | None
    reason: str
    """Of the one that did not pass."""

    def __str__(self) -> str:
        verdicts = f"{self.first or 'absent'} -> {self.second or 'absent'}"
        return f"{self.cell}: {verdicts}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True)
class Comparison:
    """What two reports have in common, and where they differ."""

    first: str
    second: str
    agreeing: int
    differences: tuple[Difference, ...]
    slower: tuple[str, ...]
    """For people: cells that took much longer. Machines differ, so this is no difference."""

    @property
    def same(self) -> bool:
        return not self.differences


def read(path: Path) -> dict[str, Any]:
    """A report of the matrix, as written or compressed; `InvalidArgument` for anything else."""
    data = path.read_bytes()
    try:
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        report = json.loads(text)
    except (ValueError, OSError) as error:
        raise InvalidArgument(f"{path} is no JSON report: {error}") from error
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise InvalidArgument(f"{path} is no report of {KIND!r}")
    if report.get("schema_version") != SCHEMA_VERSION:
        raise InvalidArgument(
            f"{path} has schema version {report.get('schema_version')}, not {SCHEMA_VERSION}"
        )
    return report


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> Comparison:
    """Compare verdicts, and reasons of cells that could not run in both."""
    mine, its = ({cell["name"]: cell for cell in report["cells"]} for report in (first, second))
    names = list(dict.fromkeys((*mine, *its)))
    differences = tuple(
        found for name in names if (found := _difference(name, mine.get(name), its.get(name)))
    )
    slower = tuple(
        f"{name}: {mine[name]['seconds']:.1f} s -> {its[name]['seconds']:.1f} s"
        for name in names
        if name in mine and name in its and _is_slower(mine[name], its[name])
    )
    agreeing = len(names) - len(differences)
    return Comparison(_title(first), _title(second), agreeing, differences, slower)


def _title(report: Mapping[str, Any]) -> str:
    versions = report["environment"]["versions"]
    return f"{report['platform']} {report['tier']} (torch {versions['torch']})"


def _difference(
    name: str, first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> Difference | None:
    was, now = (cell["verdict"] if cell else None for cell in (first, second))
    if was == now:
        return None
    reasons = [cell["reason"] for cell in (second, first) if cell and cell["reason"]]
    return Difference(name, was, now, reasons[0] if reasons else "")


def _is_slower(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return bool(second["seconds"] > max(1.0, 3 * first["seconds"]) and first["seconds"])


def lines(comparison: Comparison) -> Iterator[str]:
    """The comparison for people."""
    yield f"{comparison.first}  against  {comparison.second}"
    yield from map(str, comparison.differences)
    for text in comparison.slower:
        yield f"slower, which is no difference: {text}"
    count = len(comparison.differences)
    verdict = "no difference" if comparison.same else f"{count} cells differ"
    yield f"{verdict}, {comparison.agreeing} cells agree"
