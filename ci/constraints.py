"""Print `ci/constraints.txt` without the packages that this environment has already.

An environment beside a container's torch takes the tested version of what is missing and leaves
what is there, torch above all, as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(lines: Iterable[str], installed: Iterable[str]) -> Iterator[str]:
    """The constraints on packages that are not installed."""
    there = {normalized(name) for name in installed}
    for line in lines:
        name, separator, _ = line.partition("==")
        if separator and normalized(name) not in there:
            yield line


if __name__ == "__main__":
    names = [found.metadata["Name"] for found in distributions()]
    print("\n".join(missing(CONSTRAINTS.read_text().splitlines(), names)))
