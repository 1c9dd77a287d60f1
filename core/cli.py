"""The `hal` command: bad usage and this library's errors end in one line and an exit status."""

from __future__ import annotations

import enum
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Never

import typer
from typer.core import TyperGroup

from hal.errors import HalError

if TYPE_CHECKING:
    from hal.core.verify.matrix.plan import MatrixOptions, MatrixPlan
    from hal.core.verify.matrix.report import MatrixReport
    from hal.core.verify.plan import VerifyOptions

DIFFERENCE, USAGE = 1, 2
"""Exit statuses; 0 is success."""

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _OneLineErrors(TyperGroup):
    """Prints what is wrong in one line, instead of typer's usage box or a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = functools.partial(
            super().main, args, prog_name, complete_var, False, windows_expand_args, **extra
        )
        if not standalone_mode:
            return run()
        try:
            status = run()
        except _UsageError as error:
            _fail(error.format_message(), USAGE)  # type: ignore[attr-defined]
        except HalError as error:
            _fail(str(error), DIFFERENCE)
        except typer.Abort:
            _fail("interrupted", DIFFERENCE)
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> Never:
    if message:  # there is none when the help was shown for want of a command
        print(f"hal: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at the platform, and prove that memory wakes as it slept.",
)


class Nesting(enum.StrEnum):
    """Which of two nested pool scopes gets an allocation, or one pool open at a time."""

    LIFO = "lifo"
    FIFO = "fifo"
    FLATTEN = "flatten"


class Tier(enum.StrEnum):
    """How much of the matrix a run covers."""

    QUICK = "quick"
    CI = "ci"
    FULL = "full"
    BACKUPS = "backups"


class Execution(enum.StrEnum):
    """How the reference engine runs its decode steps."""

    EAGER = "eager"
    GRAPHS = "graphs"


@app.command()
def verify(
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="Default: detected.")] = None,
    device: Annotated[int, typer.Option(metavar="N", help="Index of the device.")] = 0,
    nesting: Annotated[Nesting | None, typer.Option(help="Default: as probed.")] = None,
    backing: Annotated[
        str | None,
        typer.Option(
            metavar="anonymous|pinned|file:DIR",
            help="Where backups live. Default: the platform's own.",
        ),
    ] = None,
    execution: Annotated[
        Execution,
        typer.Option(help="Decode operator by operator, or by replaying captured graphs."),
    ] = Execution.EAGER,
    requests: Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests a round. Default: 553, or the tier's."),
    ] = None,
    cycles: Annotated[int, typer.Option(metavar="N", help="Sleeps of the long case.")] = 20,
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights and requests.")] = 0,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run this case only; may be repeated. help: list them."),
    ] = None,
    break_: Annotated[
        str | None,
        typer.Option(
            "--break",
            metavar="CASE",
            help="Switch a real defect on, which must be found. help: list them.",
        ),
    ] = None,
    json_: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the report as JSON; - is standard output."
        ),
    ] = None,
    matrix: Annotated[
        Tier | None, typer.Option(help="Run a tier of the matrix: every cell, every gate.")
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Run this cell of the matrix only, as reports name it; repeatable."
        ),
    ] = None,
    matrix_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: ci/matrix.toml.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write report.json, junit.xml and report.html there."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes for cells; 0: this one. Default: by platform."),
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", help="Pin the tier's set of cells, without running it.")
    ] = False,
    bench: Annotated[
        bool, typer.Option(help="With a matrix, measure rates against the link too.")
    ] = True,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Compare two reports of the matrix by cell."),
    ] = None,
) -> None:
    """Prove that wakes are bit-exact: exit status 1 on any difference."""
    if break_ == "help" or (case and "help" in case):
        _list(cycles=None if break_ == "help" else cycles)
        return
    if compare:
        _compare(*compare)
        return
    if matrix or cell or pin:
        from hal.core.verify.matrix.plan import MatrixOptions

        _matrix(
            MatrixOptions(
                tier=matrix.value if matrix else None,
                cells=tuple(cell or ()),
                platform=platform,
                device=device,
                requests=requests,
                seed=seed,
                jobs=jobs,
                break_name=break_,
                matrix_file=matrix_file,
                bench=bench,
            ),
            json_path=json_,
            directory=report,
            pin=pin,
        )
        return
    from hal.core.verify.plan import VerifyOptions

    options = VerifyOptions(
        platform=platform,
        nesting=nesting.value if nesting else None,
        requests=requests if requests is not None else 553,
        cycles=cycles,
        backing=backing,
        execution=execution.value,
        cases=tuple(case or ()),
        break_name=break_,
        device=device,
        seed=seed,
    )
    _verify(options, json_)


def _list(*, cycles: int | None) -> None:
    """Print the cases, or the breaks when no cycles are given."""
    from hal.core.verify import breaks, cases

    for line in breaks.lines() if cycles is None else cases.lines(cycles):
        print(line)


def _verify(options: VerifyOptions, json_path: str | None) -> None:
    from rich.console import Console

    from hal.core.verify.plan import make_plan
    from hal.core.verify.terminal import Bars, Lines

    try:
        plan = make_plan(options)
        if json_path not in (None, "-"):
            _require_writable(Path(json_path))
    except (HalError, OSError) as error:
        _fail(str(error), USAGE)
    console = Console(stderr=json_path == "-")
    bars = console.is_terminal
    view = Bars(console, plan.cases, options.requests) if bars else Lines(console, plan.cases)
    with view:
        report = plan.run(view)
    view.summarize(report)
    if json_path:
        _write_json(report.as_dict(), json_path)
    if not report.passed:
        raise typer.Exit(DIFFERENCE)


def _matrix(
    options: MatrixOptions, *, json_path: str | None, directory: Path | None, pin: bool
) -> None:
    from rich.console import Console

    from hal.core.verify.matrix.plan import make_plan
    from hal.core.verify.matrix.terminal import Bar, Lines, summarize

    try:
        plan = make_plan(options)
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            _require_writable(directory / "report.json")
        if json_path not in (None, "-"):
            _require_writable(Path(json_path))
    except (HalError, OSError) as error:
        _fail(str(error), USAGE)
    if pin:
        _pin(plan)
        return
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 120)
    view = Bar(console, len(plan.cells)) if console.is_terminal else Lines(console)
    with view:
        report = plan.run(view)
    _write_reports(report, json_path, directory)
    summarize(console, report)
    if not report.passed:
        raise typer.Exit(DIFFERENCE)


def _pin(plan: MatrixPlan) -> None:
    plan.pin()
    print(f"{plan.pin_file}: {len(plan.runnable)} cells, {len(plan.missing)} unsupported")


def _write_reports(report: MatrixReport, json_path: str | None, directory: Path | None) -> None:
    if json_path:
        _write_json(report.as_dict(), json_path)
    if directory is None:
        return
    from hal.core.verify.matrix.html import page
    from hal.core.verify.matrix.junit import junit

    values = report.as_dict()
    _write_json(values, str(directory / "report.json"))
    (directory / "junit.xml").write_text(junit(report))
    (directory / "report.html").write_text(page(values))


def _compare(first: Path, second: Path) -> None:
    from hal.core.verify.matrix.compare import compare, lines, read

    try:
        comparison = compare(read(first), read(second))
    except (HalError, OSError) as error:
        _fail(str(error), USAGE)
    for line in lines(comparison):
        print(line)
    if not comparison.same:
        raise typer.Exit(DIFFERENCE)


def _require_writable(path: Path) -> None:
    """Raise `OSError` now, not after the work is done."""
    path.open("a").close()


def _write_json(value: dict[str, Any], path: str) -> None:
    text = json.dumps(value, indent=2)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")


@app.command()
def probe(
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="Default: detected.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Report versions, platform, capabilities, memory and what is missing: fit for a bug report."""
    from rich.console import Console

    from hal.core.probe import placement_report
    from hal.environment import collect

    environment = collect(platform)
    placements = placement_report(environment)
    if json_:
        print(json.dumps(environment.as_dict() | placements.as_dict(), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        environment.render(console)
        placements.render(console)
    if environment.problems or placements.problems:
        raise typer.Exit(DIFFERENCE)


@app.command()
def plan(
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="Default: detected.")] = None,
    device: Annotated[int, typer.Option(metavar="N", help="Index of the device.")] = 0,
    backing: Annotated[
        str | None, typer.Option(metavar="anonymous|pinned|file:DIR", help="Where backups live.")
    ] = None,
    level: Annotated[int, typer.Option(metavar="N", help="Of the sleep.")] = 1,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what a sleep of the reference engine would move and free, and what a wake would need."""
    from rich.console import Console

    from hal.core.verify.forecast import forecast
    from hal.core.verify.subject import Setup
    from hal.core.verify.terminal import forecast_lines
    from hal.detect import detect

    found = forecast(Setup(detect(platform), device, backing), level)
    if json_:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        for line in forecast_lines(found):
            console.print(line)
    if not found.sleep.fits or found.wake_fits is False:
        raise typer.Exit(DIFFERENCE)


@app.command()
def soak(
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="Default: detected.")] = None,
    device: Annotated[int, typer.Option(metavar="N", help="Index of the device.")] = 0,
    minutes: Annotated[float, typer.Option(metavar="N", min=0, help="How long it lives.")] = 2.0,
    seed: Annotated[int, typer.Option(metavar="S", help="Of engines and actions.")] = 0,
    life: Annotated[
        int | None, typer.Option(metavar="N", help="Repeat this life of the seed alone.")
    ] = None,
    json_: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write what was found; - is standard output."),
    ] = None,
) -> None:
    """Let engines live at random, with load and faults, against a model of what must be true."""
    from hal.core.soak.run import soak as run_soak
    from hal.core.soak.run import summary
    from hal.core.verify.matrix.cells import Site
    from hal.core.verify.matrix.table import Matrix, find_matrix
    from hal.detect import detect

    found = detect(platform)
    found.device(device)
    outcome = run_soak(
        Site(found.name, device, seed),
        Matrix.load(find_matrix()),
        seconds=minutes * 60,
        seed=seed,
        only=life,
        told=lambda text: print(text, file=sys.stderr),
    )
    if json_:
        _write_json(outcome.as_dict(), json_)
    out = sys.stderr if json_ == "-" else sys.stdout
    for line in summary(outcome, found.name):
        print(line, file=out)
    if not outcome.passed:
        raise typer.Exit(DIFFERENCE)


@app.command()
def bench(
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="Default: detected.")] = None,
    device: Annotated[int, typer.Option(metavar="N", help="Index of the device.")] = 0,
    backing: Annotated[
        str | None, typer.Option(metavar="anonymous|pinned|file:DIR", help="Where backups live.")
    ] = None,
    mib: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="MiB of weights. Default: by platform.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure sleep and wake against the link, which is measured in the same run."""
    from hal.core.bench import measure
    from hal.detect import detect

    size = None if mib is None else mib << 20
    found = measure(detect(platform), device, size=size, backing=backing).as_dict()
    if json_:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['bytes'] >> 20} MiB of weights, backups in {found['backing']} memory")
    for what, way in (("sleep", "out"), ("wake", "in")):
        rate, link = found[what] / 1e9, found["link"][way] / 1e9
        print(f"{what:<6} {rate:7.2f} GB/s of {link:.2f} GB/s ({found[f'{what}_of_link']:.0%})")


if __name__ == "__main__":
    app()
