"""A stopwatch as a context manager."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self


class Stopwatch:
    """Measures the seconds between entering and leaving."""

    seconds = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds = time.perf_counter() - self._start
