"""`python -m hal`: print the environment report; exit status 1 when something is missing or
broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence

from hal.environment import Environment, collect


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report that the arguments ask for; 0 when the installation works."""
    options = _parser().parse_args(arguments)
    environment = collect(options.platform)
    if options.json or importlib.util.find_spec("rich") is None:
        print(json.dumps(environment.as_dict(), indent=2))
    else:
        _print_tables(environment)
    return 1 if environment.problems else 0


def _print_tables(environment: Environment) -> None:
    from rich.console import Console

    environment.render(Console(width=None if sys.stdout.isatty() else 160))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hal", description="Report versions, platform, memory and what is missing."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--platform", metavar="NAME", help="report on this platform (default: detect)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
