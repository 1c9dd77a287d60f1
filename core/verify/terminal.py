"""A verification for people: progress bars and a table, or plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hal.core.verify.cases import Case
from hal.core.verify.forecast import Forecast
from hal.core.verify.report import CaseResult, Finding, VerifyReport

_MIB = 1 << 20
_SHOWN_FINDINGS = 20
_WIDE = 130
"""Columns from which the table says what happens in each case."""
_COLUMNS = ("rounds", "compared", "damaged", "unstable", "slept MiB", "seconds")


def progress_bars(console: Console, counted: str) -> Progress:
    """Bars with a description, how many of what is `counted` are done, and the time; they vanish at
    the end.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(counted),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _cells(result: CaseResult) -> tuple[str, ...]:
    """A result's numbers, in the order of the columns."""
    return (
        str(result.rounds),
        f"{result.compared:,}",
        f"{result.damaged:,}",
        f"{result.unstable:,}",
        f"{sum(result.slept.values()) / _MIB:.1f}",
        f"{result.seconds:.2f}",
    )


def _verdict(result: CaseResult) -> str:
    return "bit-exact" if result.passed else "FAILED"


class Lines:
    """One line a case, as it ends."""

    def __init__(self, console: Console, cases: tuple[Case, ...]) -> None:
        self._console = console
        self._width = max(len(case.name) for case in cases)

    def __enter__(self) -> Self:
        self._print("case", "verdict", _COLUMNS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Every line is out already."""

    def started(self, case: Case) -> None: ...

    def served(self, requests: int) -> None: ...

    def finished(self, result: CaseResult) -> None:
        self._print(result.name, _verdict(result), _cells(result))

    def _print(self, name: str, verdict: str, cells: tuple[str, ...]) -> None:
        numbers = "".join(f"{cell:>11}" for cell in cells)
        self._console.out(f"{name:<{self._width}}  {verdict:<9}{numbers}", highlight=False)

    def summarize(self, report: VerifyReport) -> None:
        """What was found, and the verdict."""
        _print_details(self._console, report)


class Bars:
    """A bar over all requests and one over the running case, then a table."""

    def __init__(self, console: Console, cases: tuple[Case, ...], requests: int) -> None:
        self._console, self._requests = console, requests
        self._progress = progress_bars(console, "requests")
        self._all = self._progress.add_task(
            f"{len(cases)} cases", total=requests * sum(case.rounds for case in cases)
        )
        self._case = self._progress.add_task("", total=None, visible=False)

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

    def started(self, case: Case) -> None:
        self._progress.reset(
            self._case, total=case.rounds * self._requests, description=case.name, visible=True
        )

    def served(self, requests: int) -> None:
        self._progress.advance(self._all, requests)
        self._progress.advance(self._case, requests)

    def finished(self, result: CaseResult) -> None:
        if not result.passed:
            self._console.print(Text(f"{result.name}: {result.findings[0]}", style="red"))

    def summarize(self, report: VerifyReport) -> None:
        """The table, what was found, and the verdict."""
        self._console.print(_table(report, described=self._console.width >= _WIDE))
        _print_details(self._console, report)


def _table(report: VerifyReport, *, described: bool) -> Table:
    capabilities = report.environment["capabilities"]
    where = f"{report.environment['platform']} ({capabilities['device_name']})"
    how = ", graphs" if report.options["execution"] == "graphs" else ""
    table = Table(title=f"Sleep and wake on {where}{how}", title_justify="left")
    table.add_column("case", no_wrap=True)
    if described:
        table.add_column("what happens")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("verdict", no_wrap=True)
    for result in report.cases:
        verdict = Text(_verdict(result), style="green" if result.passed else "bold red")
        described_as = (result.description,) if described else ()
        table.add_row(result.name, *described_as, *_cells(result), verdict)
    return table


def _print_details(console: Console, report: VerifyReport) -> None:
    for line in _findings(report):
        console.print(Text(line, style="red"), soft_wrap=True)
    for line in dict.fromkeys(text for result in report.cases for text in result.warnings):
        console.print(Text(f"warning: {line}", style="yellow"), soft_wrap=True)
    console.print(Text(_tags(report)), soft_wrap=True)
    style = "bold green" if report.passed else "bold red"
    console.print(Text(verdict_line(report), style=style), soft_wrap=True)


def _findings(report: VerifyReport) -> list[str]:
    """Each distinct finding once, with the cases that have it; tensors of one kind share a line."""
    found: dict[str, tuple[str, list[str]]] = {}
    for result in report.cases:
        for first, others in _groups(result.findings):
            more = f" (and {_count(others, 'more tensor')})" if others else ""
            found.setdefault(first.text + more, (f"{first}{more}", []))[1].append(result.name)
    lines = [f"{line} [{_case_names(names)}]" for line, names in found.values()]
    hidden = len(lines) - _SHOWN_FINDINGS
    if hidden > 0:
        lines[_SHOWN_FINDINGS:] = [f"and {_count(hidden, 'more finding')} (--json has all)"]
    return lines


def _groups(findings: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """The first finding of each gate and tag (or text, without a tensor), and how many more."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        what = finding.tag if finding.tensor else finding.text
        groups.setdefault((finding.gate, what), []).append(finding)
    return [(group[0], len(group) - 1) for group in groups.values()]


def _case_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {_count(len(names) - 1, 'more case')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _tags(report: VerifyReport) -> str:
    slept: dict[str, int] = {}
    for result in report.cases:
        for tag, size in result.slept.items():
            slept[tag] = max(size, slept.get(tag, 0))
    sizes = ", ".join(f"{tag} {size / _MIB:.1f} MiB" for tag, size in slept.items())
    return f"slept: {sizes or 'nothing'}"


def verdict_line(report: VerifyReport) -> str:
    """The verdict in one line."""
    failed = [result.name for result in report.cases if not result.passed]
    compared = sum(result.compared for result in report.cases)
    unstable = report.cases[0].unstable if report.cases else 0
    counted = f"{compared:,} requests compared, {unstable} unstable, {report.seconds:.1f} s"
    if report.passed:
        return f"bit-exact: {_count(len(report.cases), 'case')}, {counted}"
    return f"FAILED: {len(failed)} of {len(report.cases)} cases ({', '.join(failed)}); {counted}"


def forecast_lines(found: Forecast) -> list[Table | Text]:
    """A planned sleep, tag by tag, and the wake after it."""
    table = Table(title=f"A sleep at level {found.level} would", title_justify="left")
    table.add_column("tag", no_wrap=True)
    table.add_column("policy")
    for name in ("segments", "free MiB", "copy MiB"):
        table.add_column(name, justify="right")
    for tag in found.sleep.tags:
        sizes = (f"{size / _MIB:.1f}" for size in (tag.bytes, tag.host_bytes))
        table.add_row(tag.tag, tag.policy.value, str(tag.segments), *sizes)
    plan = found.sleep
    room = f"of {_mib(plan.host_available)} that the host can give"
    fits = "fits" if plan.fits else f"does not fit: {plan.why_not}"
    wake = {True: "fits", False: "does not fit", None: "cannot be known to fit"}[found.wake_fits]
    return [
        table,
        Text(f"sleep: frees {_mib(plan.freed)}, backs up {_mib(plan.host_needed)} {room}; {fits}"),
        Text(
            f"wake: needs {_mib(found.wake_needs)} of {_mib(found.free_while_asleep)} that are "
            f"free then; {wake} while others take no more than {_mib(found.spare)}"
        ),
    ]


def _mib(size: int | None) -> str:
    return "an unknown amount" if size is None else f"{size / _MIB:,.1f} MiB"
