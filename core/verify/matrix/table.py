"""The matrix as data: axes, named cells, exclusions and tiers, read from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hal.core.verify.matrix.cover import Row, cover
from hal.errors import InvalidArgument

SCHEMA = 1
BASE = "base"
"""The name of the cell that has the first value of every axis."""


@dataclass(frozen=True)
class Cell:
    """One point of the matrix: a value for every axis. `why` says what it stands for."""

    name: str
    values: Mapping[str, str]
    why: str = ""

    def __getitem__(self, axis: str) -> str:
        return self.values[axis]


@dataclass(frozen=True)
class Tier:
    """How much of the matrix one run covers: the named cells, and all combinations of `strength`
    axes (0: no more than the named cells). `requests` are served a round; `without` are values,
    by axis, that would take too long for it. With `varied`, it is combinations of these axes alone,
    without the named cells.
    """

    name: str
    strength: int
    requests: int
    minutes: float
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    varied: tuple[str, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Values of the axes that do not vary, where they are not the first."""
    also: tuple[str, ...] = ()
    """Cells by name that it has nevertheless."""

    def has(self, row: Row) -> bool:
        """Whether the tier takes a row."""
        return all(row.get(axis) not in values for axis, values in self.without.items())


@dataclass(frozen=True)
class Exclusion:
    """Values that mean nothing together: axis -> the values that exclude each other, and why."""

    values: Mapping[str, tuple[str, ...]]
    why: str

    def hits(self, row: Row) -> bool:
        """Whether a row, or a part of one, has a value of each of these axes."""
        return all(row.get(axis) in values for axis, values in self.values.items())


@dataclass(frozen=True)
class Matrix:
    """The whole table; the first value of an axis is what a cell has unless it says otherwise."""

    axes: Mapping[str, tuple[str, ...]]
    named: tuple[Cell, ...]
    exclusions: tuple[Exclusion, ...]
    tiers: Mapping[str, Tier]

    @classmethod
    def load(cls, path: Path) -> Matrix:
        """Read and check a file; `InvalidArgument` says what is wrong in it."""
        try:
            with path.open("rb") as file:
                table = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise InvalidArgument(f"the matrix {path} cannot be read: {error}") from error
        if table.get("schema") != SCHEMA:
            raise InvalidArgument(f"{path} has schema {table.get('schema')}, not {SCHEMA}")
        return cls.of(table)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Matrix:
        """From the values of a file."""
        axes = {name: tuple(map(str, values)) for name, values in table["axes"].items()}
        exclusions = tuple(_exclusion(entry) for entry in table.get("exclude", ()))
        tiers = {name: _tier(name, entry) for name, entry in table["tiers"].items()}
        empty = cls(axes, (), exclusions, tiers)
        named = tuple(
            empty.cell({k: v for k, v in entry.items() if k != "why"}, entry.get("why", ""))
            for entry in table.get("cell", ())
        )
        return cls(axes, named, exclusions, tiers)

    @cached_property
    def defaults(self) -> dict[str, str]:
        return {axis: values[0] for axis, values in self.axes.items()}

    def cell(self, values: Mapping[str, Any], why: str = "") -> Cell:
        """The cell with these values, and the first of every other axis."""
        given = {axis: str(value) for axis, value in values.items()}
        for axis, value in given.items():
            if axis not in self.axes:
                raise InvalidArgument(f"no axis {axis!r}; axes: {', '.join(self.axes)}")
            if value not in self.axes[axis]:
                known = ", ".join(self.axes[axis])
                raise InvalidArgument(f"{axis} has no value {value!r}; values: {known}")
        whole = self.defaults | given
        self._refuse(whole)
        return Cell(self.name_of(whole), whole, why)

    def parse(self, name: str) -> Cell:
        """The cell of a name, as reports print it: "model=mla,sleep=level-2", or "base"."""
        if name == BASE:
            return self.cell({})
        pairs = [part.partition("=") for part in name.split(",")]
        if any(not sign for _, sign, _ in pairs):
            raise InvalidArgument(f"a cell is {BASE!r} or axis=value,axis=value…, not {name!r}")
        known = {cell.name: cell.why for cell in self.named}
        cell = self.cell({axis: value for axis, _, value in pairs})
        return Cell(cell.name, cell.values, known.get(cell.name, ""))

    def name_of(self, values: Row) -> str:
        """What differs from the base cell, in the order of the axes."""
        differing = [
            f"{axis}={values[axis]}" for axis in self.axes if values[axis] != self.defaults[axis]
        ]
        return ",".join(differing) or BASE

    def allows(self, row: Row) -> bool:
        """Whether no exclusion hits a row, or a part of one."""
        return not any(exclusion.hits(row) for exclusion in self.exclusions)

    def _refuse(self, row: Row) -> None:
        for exclusion in self.exclusions:
            if exclusion.hits(row):
                raise InvalidArgument(f"{self.name_of(row)} is no cell: {exclusion.why}")

    def tier(self, name: str) -> Tier:
        if name not in self.tiers:
            raise InvalidArgument(f"unknown tier {name!r}; tiers: {', '.join(self.tiers)}")
        return self.tiers[name]

    def cells(self, tier: Tier, unsupported: Mapping[tuple[str, str], str]) -> tuple[Cell, ...]:
        """The tier's cells on a platform that lacks some values, (axis, value) -> why.

        The named cells come first, then one for each value that none of them has, then a cover of
        what the platform supports.
        """
        first = () if tier.varied else (*self.named, *self._single())
        found = {cell.name: cell for cell in first}
        if tier.strength:
            axes = self._supported(unsupported, tier)
            known = [cell.values for cell in found.values() if self._is_in(axes, cell.values)]
            rows = cover(axes, tier.strength, self.allows, known)
            found |= {name: Cell(name, row) for row in rows if (name := self.name_of(row))}
        taken = {name: cell for name, cell in found.items() if tier.has(cell.values)}
        return tuple((taken | {name: self.parse(name) for name in tier.also}).values())

    def _single(self) -> list[Cell]:
        """A cell for each value that no named cell has, where such a cell may be."""
        met = {(axis, cell[axis]) for cell in self.named for axis in self.axes}
        return [
            self.cell({axis: value})
            for axis, values in self.axes.items()
            for value in values
            if (axis, value) not in met and self.allows(self.defaults | {axis: value})
        ]

    def _supported(
        self, unsupported: Mapping[tuple[str, str], str], tier: Tier
    ) -> dict[str, tuple[str, ...]]:
        """The axes with the values that the platform and the tier have."""
        fixed = self.defaults | dict(tier.fixed) if tier.varied else {}
        return {
            axis: tuple(
                value
                for value in values
                if (axis, value) not in unsupported
                and tier.has({axis: value})
                and (axis in tier.varied or value == fixed.get(axis, value))
            )
            for axis, values in self.axes.items()
        }

    @staticmethod
    def _is_in(axes: Mapping[str, Sequence[str]], values: Row) -> bool:
        return all(values[axis] in supported for axis, supported in axes.items())


def _tier(name: str, entry: Mapping[str, Any]) -> Tier:
    without = {axis: tuple(map(str, values)) for axis, values in entry.get("without", {}).items()}
    return Tier(
        name,
        entry["strength"],
        entry["requests"],
        entry["minutes"],
        without,
        varied=tuple(entry.get("varied", ())),
        fixed={axis: str(value) for axis, value in entry.get("fixed", {}).items()},
        also=tuple(entry.get("also", ())),
    )


def _exclusion(entry: Mapping[str, Any]) -> Exclusion:
    values = {
        axis: tuple(map(str, value)) if isinstance(value, list) else (str(value),)
        for axis, value in entry.items()
        if axis != "why"
    }
    return Exclusion(values, entry["why"])


def find_matrix() -> Path:
    """The matrix of this source tree, of the working directory, or the one that was installed."""
    here = Path(__file__).resolve().parent
    places = (here.parents[2] / "ci" / "matrix.toml", Path("ci/matrix.toml"), here / "matrix.toml")
    for place in places:
        if place.is_file():
            return place
    raise InvalidArgument(f"no matrix file at {', '.join(map(str, places))}; give --matrix-file")
