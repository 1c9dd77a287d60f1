"""The regions that a thread has open, of which the innermost alone gets what is allocated.

An outer region's scope is left while an inner one is open, so it does not matter in which order the
platform nests pools.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import TracebackType

from hal.errors import AsleepError

Scope = Callable[[], AbstractContextManager[object]]
"""Makes a context manager that directs allocations to a pool; called anew for each entering."""


class _Region:
    """A scope that can be left and entered again while the region goes on."""

    def __init__(self, scope: Scope) -> None:
        self._scope, self._entered = scope, ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._scope())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)

    def leave(self) -> None:
        self._entered.close()

    def enter_again(self) -> None:
        """Go on where it was left; while its tag is paused nothing can be allocated there."""
        with suppress(AsleepError):
            self.__enter__()


class Regions:
    """The open regions of each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def open(self) -> list[_Region]:
        """Those of this thread, innermost last."""
        regions: list[_Region] = self._local.__dict__.setdefault("open", [])
        return regions

    @contextmanager
    def entered(self, scope: Scope) -> Iterator[None]:
        """A region within those that are open: until its end allocations go to it alone."""
        region = _Region(scope)
        with self.left(), region:
            self.open.append(region)
            try:
                yield
            finally:
                self.open.remove(region)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Allocate outside every region; at the end the innermost is entered again, unless its tag
        is paused by then.
        """
        innermost = self.open[-1] if self.open else None
        if innermost is None:
            yield
            return
        innermost.leave()
        try:
            yield
        finally:
            innermost.enter_again()
