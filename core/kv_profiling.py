"""A memory-profiling pass that leaves nothing: its state is undone, and what stays is named."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hal.core.appearances import Appearances, Appeared

_Container = list[Any] | dict[Any, Any] | set[Any]


@dataclass(frozen=True)
class _Saved:
    """An object's attributes, and what its containers hold."""

    attributes: dict[str, Any]
    values: dict[str, Any]
    contents: tuple[tuple[_Container, _Container], ...]

    @classmethod
    def of(cls, holder: object) -> _Saved:
        attributes = vars(holder)
        containers = [v for v in attributes.values() if type(v) in (list, dict, set)]
        return cls(attributes, dict(attributes), tuple((c, c.copy()) for c in containers))

    def restore(self) -> None:
        self.attributes.clear()
        self.attributes.update(self.values)
        for container, contents in self.contents:
            container.clear()
            if isinstance(container, list):
                container.extend(contents)
            else:
                container.update(contents)


@contextmanager
def undone(holders: Sequence[object]) -> Iterator[list[Appeared]]:
    """Give the holders their attributes and containers back at the end.

    Yields a list that then has every tensor of the scope which something else still holds.
    """
    saved = [_Saved.of(holder) for holder in holders]
    left_over: list[Appeared] = []
    made = Appearances(locate=True)
    try:
        with made:
            yield left_over
    finally:
        for state in saved:
            state.restore()
    gc.collect()
    left_over += made.live.values()
