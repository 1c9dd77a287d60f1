"""A run of the matrix for people: a bar, or a line a cell; then what failed, and the verdict."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.core.verify.matrix.report import CellResult, MatrixReport, Verdict
from hal.core.verify.terminal import progress_bars

_STYLES = {
    Verdict.PASSED: "green",
    Verdict.FAILED: "bold red",
    Verdict.UNSUPPORTED: "dim",
}
_MARKS = {Verdict.PASSED: "", Verdict.FAILED: " FAILED", Verdict.UNSUPPORTED: " unsupported"}
_SLOWEST = 3
_SHOWN_FINDINGS = 4


class Lines:
    """One line a cell, as it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Every line is out already."""

    def finished(self, result: CellResult) -> None:
        self._console.out(f"{result.verdict.value:<11}  {_line(result)}", highlight=False)


class Bar:
    """A bar over all cells, and a line for each that failed."""

    def __init__(self, console: Console, cells: int) -> None:
        self._console = console
        self._progress = progress_bars(console, "cells")
        self._task = self._progress.add_task("", total=cells)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def finished(self, result: CellResult) -> None:
        self._progress.update(self._task, advance=1, description=result.name[:60])
        if result.verdict is Verdict.FAILED:
            self._console.print(Text(f"{result.name}: {result.reason}", style="red"))


def _line(result: CellResult) -> str:
    if result.verdict is Verdict.UNSUPPORTED:
        return f"{result.name}: {result.reason}"
    faults = f", {result.faults} faults" if result.faults else ""
    counted = f"{result.compared} compared{faults}, {result.seconds:.1f} s"
    return f"{result.name}  ({counted})"


def summarize(console: Console, report: MatrixReport) -> None:
    """A table of values, what failed with its command, what is unsupported, and the verdict."""
    console.print(_table(report))
    for line in _details(report):
        console.print(line, soft_wrap=True)
    style = "bold green" if report.passed else "bold red"
    console.print(Text(verdict_line(report), style=style), soft_wrap=True)


def _table(report: MatrixReport) -> Table:
    """For each value of each axis, how its cells ended."""
    name = report.environment["capabilities"]["device_name"]
    table = Table(title=f"Matrix {report.tier} on {report.platform} ({name})", title_justify="left")
    table.add_column("axis", no_wrap=True)
    table.add_column("cells of each value that passed, unless it says otherwise")
    for axis in dict.fromkeys(axis for cell in report.cells for axis in cell.values):
        table.add_row(axis, _values(report, axis))
    return table


def _values(report: MatrixReport, axis: str) -> Text:
    counts: dict[str, dict[Verdict, int]] = {}
    for cell in report.cells:
        counted = counts.setdefault(cell.values[axis], dict.fromkeys(Verdict, 0))
        counted[cell.verdict] += 1
    text = Text()
    for value, counted in counts.items():
        text.append(f"{value} ", style="bold")
        for verdict, mark in _MARKS.items():
            if counted[verdict]:
                text.append(f"{counted[verdict]}{mark} ", style=_STYLES[verdict])
        text.append(" ")
    return text


def _details(report: MatrixReport) -> list[Text]:
    lines = []
    for cell in report.of(Verdict.FAILED):
        lines.append(Text(f"{cell.name}", style="bold red"))
        found = [str(finding) for finding in cell.findings] or [cell.reason]
        lines += [Text(f"  {text}", style="red") for text in found[:_SHOWN_FINDINGS]]
        lines.append(Text(f"  {report.command(cell.name)}"))
    reasons: dict[str, list[str]] = {}
    for cell in report.of(Verdict.UNSUPPORTED):
        reasons.setdefault(cell.reason, []).append(cell.name)
    lines += [Text(f"unsupported: {why} [{len(names)}]") for why, names in reasons.items()]
    lines += [Text(f"slope: {text}") for text in _slopes(report)]
    lines += [Text(f"set of cells: {text}", style="red") for text in report.problems]
    lines += [Text(f"note: {text}", style="yellow") for text in report.notes]
    slowest = sorted(report.cells, key=lambda cell: -cell.seconds)[:_SLOWEST]
    names = ", ".join(f"{cell.name} {cell.seconds:.1f} s" for cell in slowest)
    return [*lines, Text(f"slowest: {names}")]


def _slopes(report: MatrixReport) -> list[str]:
    """The steepest fit of each memory, which says the most about all others."""
    found = []
    for kind in ("device", "host"):
        lines = [
            (getattr(cell.history, f"{kind}_line"), cell.name)
            for cell in report.cells
            if cell.history
        ]
        fitted = [(line, name) for line, name in lines if line]
        if fitted:
            line, name = max(fitted, key=lambda entry: abs(entry[0].slope))
            found.append(f"{kind} memory at most {line} ({name}; {len(fitted)} cells fitted)")
    return found


def verdict_line(report: MatrixReport) -> str:
    """The verdict in one line."""
    ran, failed = report.of(Verdict.PASSED), report.of(Verdict.FAILED)
    cells = (*ran, *failed)
    counted = (
        f"{sum(cell.compared for cell in cells):,} requests compared, "
        f"{sum(cell.unstable for cell in cells)} unstable, "
        f"{sum(cell.faults for cell in cells)} faults survived, "
        f"{len(report.of(Verdict.UNSUPPORTED))} cells unsupported, {report.seconds:.1f} s"
    )
    if report.passed:
        return f"bit-exact: {len(ran)} cells; {counted}"
    what = [f"{len(failed)} of {len(cells)} cells"] if failed else []
    what += [f"{len(report.problems)} problems with the set of cells"] if report.problems else []
    return f"FAILED: {' and '.join(what) or 'no cell ran'}; {counted}"
