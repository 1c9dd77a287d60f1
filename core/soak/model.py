"""What has to be true of an engine's tags after each action: a model without memory or devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hal.core.tags import LEVELS, SCRATCH, Policy


@dataclass
class Expected:
    """Which tags sleep, and how; which are dirty; whether the cache has lost its contents."""

    tags: tuple[str, ...]
    needed: frozenset[str]
    """Tags without which the engine cannot serve: all in which it has a tensor."""
    deferrable: frozenset[str]
    asleep: dict[str, Policy] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)

    @property
    def can_serve(self) -> bool:
        return not self.dirty and not self.needed & self.asleep.keys()

    def policies(self, level: int) -> dict[str, Policy]:
        """What a level does to each tag."""
        return {tag: LEVELS[level].policy(tag) for tag in self.tags}

    def sleep(self, policies: Mapping[str, Policy]) -> None:
        """Tags that sleep already keep their first policy."""
        for tag, policy in policies.items():
            if policy is Policy.KEEP or tag in self.asleep:
                continue
            self.asleep[tag] = policy
            if policy is Policy.DISCARD and tag not in SCRATCH:
                self.dirty.add(tag)

    def wake(self, tags: Iterable[str] | None) -> None:
        """A wake restores what was asked for, and all that is not deferrable."""
        wanted = None if tags is None else tuple(tags)
        if wanted == ():
            return
        for tag in tuple(self.asleep):
            if wanted is None or tag in wanted or tag not in self.deferrable:
                del self.asleep[tag]

    def load(self) -> None:
        """The weights were loaded again."""
        self.dirty.clear()
