"""The engine's own steps before a sleep and after a wake, in a defined order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hal.errors import HookError

Hook = Callable[[], object]


@dataclass(frozen=True)
class _Entry:
    name: str
    call: Hook
    tag: str | None = None


class Hooks:
    """Before-sleep hooks run in reverse order of registration, after-wake hooks in order.

    So what an engine sets up first is torn down last. A hook that raises ends the transition with a
    `HookError`.
    """

    def __init__(self) -> None:
        self._before: list[_Entry] = []
        self._after: list[_Entry] = []

    def add_before_sleep(self, hook: Hook, name: str | None) -> None:
        self._before.append(_Entry(name or _name(hook), hook))

    def add_after_wake(self, hook: Hook, name: str | None, tag: str | None) -> None:
        self._after.append(_Entry(name or _name(hook), hook, tag))

    def run_before_sleep(self) -> bool:
        """Run the hooks; returns whether there were any."""
        _run("before_sleep", reversed(self._before))
        return bool(self._before)

    def run_after_wake(self, woken: frozenset[str]) -> None:
        """Run the hooks that wait for no tag or for one of `woken`."""
        _run("after_wake", (e for e in self._after if e.tag is None or e.tag in woken))


def _name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", repr(hook))


def _run(phase: str, entries: Iterable[_Entry]) -> None:
    for entry in entries:
        try:
            entry.call()
        except Exception as error:
            raise HookError(entry.name, phase, error) from error
