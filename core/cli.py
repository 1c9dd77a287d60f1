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
    requests: Annotated[int, typer.Option(metavar="N", help="Requests a round.")] = 553,
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
) -> None:
    """Prove that wakes are bit-exact: exit status 1 on any difference."""
    if break_ == "help" or (case and "help" in case):
        _list(cycles=None if break_ == "help" else cycles)
        return
    from hal.core.verify.plan import VerifyOptions

    options = VerifyOptions(
        platform=platform,
        nesting=nesting.value if nesting else None,
        requests=requests,
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


if __name__ == "__main__":
    app()
