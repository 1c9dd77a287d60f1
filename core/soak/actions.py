"""Actions of a soak as data: drawn from a seed, printed as they were, and run again from it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hal.core.tags import KV_CACHE, WEIGHTS, Policy

FAULTS = "create map access unmap release copy_to_host copy_to_device fill synchronize".split()


@dataclass(frozen=True)
class Fault:
    """A driver call that fails during an action: the nth from its start."""

    point: str
    nth: int

    def __str__(self) -> str:
        return f" with {self.point} failing at {self.nth}"


@dataclass(frozen=True)
class Sleep:
    """A sleep by level, or by a policy a tag."""

    level: int | None
    policy: tuple[tuple[str, Policy], ...] = ()
    fault: Fault | None = None

    def __str__(self) -> str:
        how = ", ".join(f"{tag}={policy.value}" for tag, policy in self.policy)
        return f"sleep({self.level or how}){self.fault or ''}"


@dataclass(frozen=True)
class Wake:
    """A wake of everything (None) or of some tags."""

    tags: tuple[str, ...] | None
    fault: Fault | None = None
    memory_taken: bool = False

    def __str__(self) -> str:
        taken = " with all memory taken" if self.memory_taken else ""
        return f"wake_up({', '.join(self.tags or ())}){taken}{self.fault or ''}"


@dataclass(frozen=True)
class Serve:
    """Submit a number of the round's requests and, where memory is awake, serve some steps."""

    requests: int
    steps: int

    def __str__(self) -> str:
        return f"submit({self.requests}), {self.steps} steps"


@dataclass(frozen=True)
class Finish:
    """Wake and load what is missing, serve all that waits, and compare every answer."""

    def __str__(self) -> str:
        return "finish"


Action = Sleep | Wake | Serve | Finish


def draw(seed: str, tags: tuple[str, ...], *, capacity_known: bool) -> Iterator[Action]:
    """Endless actions that depend on the seed, the tags and one capability alone."""
    chance = random.Random(seed)  # noqa: S311 - it has to be repeatable
    while True:
        yield _draw(chance, tags, capacity_known=capacity_known)


def _draw(chance: random.Random, tags: tuple[str, ...], *, capacity_known: bool) -> Action:
    kind = chance.choices(("sleep", "wake", "serve", "finish"), (5, 6, 5, 2))[0]
    match kind:
        case "sleep":
            return _sleep(chance, tags)
        case "wake":
            return _wake(chance, capacity_known=capacity_known)
        case "serve":
            return Serve(chance.randint(1, 12), chance.randint(0, 6))
    return Finish()


def _sleep(chance: random.Random, tags: tuple[str, ...]) -> Sleep:
    fault = _fault(chance)
    if chance.random() < 0.7:
        return Sleep(chance.choice((1, 1, 2)), fault=fault)
    some = [tag for tag in tags if chance.random() < 0.6]
    return Sleep(None, tuple((tag, _policy(chance, tag)) for tag in some), fault)


def _policy(chance: random.Random, tag: str) -> Policy:
    """Any, but that only what an engine can make again is ever given up."""
    if tag in _CAN_DISCARD:
        return chance.choice(tuple(Policy))
    return chance.choice((Policy.OFFLOAD, Policy.KEEP))


def _wake(chance: random.Random, *, capacity_known: bool) -> Wake:
    tags = chance.choice((None, None, (WEIGHTS,), (KV_CACHE,), ()))
    taken = capacity_known and chance.random() < 0.1
    return Wake(tags, None if taken else _fault(chance), taken)


def _fault(chance: random.Random) -> Fault | None:
    if chance.random() < 0.75:
        return None
    return Fault(chance.choice(FAULTS), chance.randint(1, 6))


_CAN_DISCARD: Mapping[str, bool] = {WEIGHTS: True, KV_CACHE: True, "workspace": True}
