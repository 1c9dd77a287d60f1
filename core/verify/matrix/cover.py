"""Covering arrays: few rows in which every combination of values of any t axes is met.

A greedy construction in the manner of AETG (Cohen, Dalal, Fredman, Patton: The AETG system, IEEE
TSE 23(7), 1997), without its random candidates: the same axes give the same rows everywhere, so
that a set of cells can be pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = Mapping[str, str]
Allowed = Callable[[Row], bool]
"""Whether a row, or a part of one, may be; if a part may not, nothing that extends it may."""

_Combination = tuple[tuple[int, int], ...]
"""(axis, value) pairs by index, in the order of the axes."""


def cover(
    axes: Mapping[str, Sequence[str]],
    strength: int,
    allowed: Allowed = lambda _: True,
    rows: Sequence[Row] = (),
) -> tuple[Row, ...]:
    """Rows that, with those given, meet every allowed combination of `strength` axes' values."""
    return tuple(_Cover(axes, strength, allowed, rows).rows())


def missing(
    axes: Mapping[str, Sequence[str]],
    strength: int,
    allowed: Allowed,
    rows: Sequence[Row],
) -> Iterator[Row]:
    """Allowed combinations that no row meets: how a cover is checked, without its construction."""
    for names in combinations(axes, strength):
        met = {tuple(row[name] for name in names) for row in rows}
        for values in product(*(axes[name] for name in names)):
            part = dict(zip(names, values, strict=True))
            if values not in met and completion(axes, part, allowed) is not None:
                yield part


def completion(axes: Mapping[str, Sequence[str]], part: Row, allowed: Allowed) -> Row | None:
    """A whole allowed row that extends a part, by depth first; None when there is none."""
    if not allowed(part):
        return None
    free = next((name for name in axes if name not in part), None)
    if free is None:
        return part
    extended = (completion(axes, {**part, free: value}, allowed) for value in axes[free])
    return next((row for row in extended if row is not None), None)


class _Cover:
    """The construction: what is still uncovered, and rows that take the most of it."""

    def __init__(
        self,
        axes: Mapping[str, Sequence[str]],
        strength: int,
        allowed: Allowed,
        rows: Sequence[Row],
    ) -> None:
        self._axes, self._names, self._allowed = axes, tuple(axes), allowed
        self._values = tuple(tuple(values) for values in axes.values())
        self._strength = min(strength, len(axes))
        self._uncovered = dict.fromkeys(self._combinations())
        for row in rows:
            self._take(self._indices(row))

    def rows(self) -> Iterator[Row]:
        while self._uncovered:
            seed = next(iter(self._uncovered))
            chosen = self._grow(dict(seed))
            if chosen is None:  # no allowed row has this combination
                del self._uncovered[seed]
                continue
            self._take(chosen)
            yield self._row(chosen)

    def _combinations(self) -> Iterator[_Combination]:
        for axes in combinations(range(len(self._names)), self._strength):
            ranges = (range(len(self._values[axis])) for axis in axes)
            for values in product(*ranges):
                yield tuple(zip(axes, values, strict=True))

    def _grow(self, chosen: dict[int, int]) -> dict[int, int] | None:
        """A whole row from a part, value by value, each the one that covers the most."""
        if completion(self._axes, self._row(chosen), self._allowed) is None:
            return None
        for axis in range(len(self._names)):
            if axis not in chosen:
                chosen[axis] = self._best(chosen, axis)
        return chosen

    def _best(self, chosen: dict[int, int], axis: int) -> int:
        """The value of an axis that completes the most uncovered combinations and leaves a way."""
        gains = [
            (self._gain(chosen, axis, value), -value) for value in range(len(self._values[axis]))
        ]
        for _, negative in sorted(gains, reverse=True):
            part = self._row({**chosen, axis: -negative})
            if completion(self._axes, part, self._allowed) is not None:
                return -negative
        return 0  # not reached: the part so far has a completion

    def _gain(self, chosen: Mapping[int, int], axis: int, value: int) -> int:
        others = combinations(sorted(chosen.items()), self._strength - 1)
        added = (axis, value)
        return sum(tuple(sorted((*other, added))) in self._uncovered for other in others)

    def _take(self, chosen: Mapping[int, int]) -> None:
        for combination in combinations(sorted(chosen.items()), self._strength):
            self._uncovered.pop(combination, None)

    def _row(self, chosen: Mapping[int, int]) -> dict[str, str]:
        return {self._names[a]: self._values[a][v] for a, v in sorted(chosen.items())}

    def _indices(self, row: Row) -> dict[int, int]:
        return {
            index: self._values[index].index(row[name])
            for index, name in enumerate(self._names)
            if row.get(name) in self._values[index]
        }
