"""The cases of the verification as data: what happens to an engine, step by step."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from hal.core.tags import Policy
from hal.errors import AsleepError, DirtyError, HalError, InvalidArgument


class Part(enum.Enum):
    """Which of a round's requests a step submits."""

    ALL = "all"
    FIRST_HALF = "first half"
    SECOND_HALF = "second half"

    def of(self, count: int) -> slice:
        """The slice of `count` requests."""
        middle = count // 2
        match self:
            case Part.ALL:
                return slice(0, count)
            case Part.FIRST_HALF:
                return slice(0, middle)
            case Part.SECOND_HALF:
                return slice(middle, count)


@dataclass(frozen=True)
class Submit:
    """Submit requests, whether the engine is awake or not."""

    part: Part = Part.ALL

    def __str__(self) -> str:
        return f"submit({self.part.value})"


@dataclass(frozen=True)
class Drain:
    """Serve everything submitted since the last drain, which is one whole round, and compare it."""

    def __str__(self) -> str:
        return "serving a round"


@dataclass(frozen=True)
class Sleep:
    """Sleep by a level, or by `policy`, (tag, policy) pairs; a tag that has no pool is left out.

    `ignored`: everything sleeps already, so nothing may change; `warns`: and the caller is told.
    `kept`: tags whose every live block is compared over the sleep, whoever made it; `park`: the
    process leaves the device too.
    """

    level: int = 1
    ignored: bool = False
    warns: bool = False
    policy: tuple[tuple[str, Policy], ...] | None = None
    kept: tuple[str, ...] = ()
    park: bool = False

    def __str__(self) -> str:
        if self.policy is None:
            return f"sleep(level={self.level}{', park=True' if self.park else ''})"
        return f"sleep({', '.join(f'{tag}: {policy.value}' for tag, policy in self.policy)})"


@dataclass(frozen=True)
class Wake:
    """Wake `tags` (None: all).

    `leaves`: what must still sleep then; `ignored`: all is awake already, so nothing may change.
    """

    tags: tuple[str, ...] | None = None
    leaves: tuple[str, ...] = ()
    ignored: bool = False

    def __str__(self) -> str:
        return f"wake_up({', '.join(self.tags or ())})"


@dataclass(frozen=True)
class Reload:
    """Load the weights' checkpoint again."""

    def __str__(self) -> str:
        return "loading the weights again"


@dataclass(frozen=True)
class Refuse:
    """A step of the engine must raise `error`."""

    error: type[HalError]

    def __str__(self) -> str:
        return f"a step that must raise {self.error.__name__}"


@dataclass(frozen=True)
class Faulted:
    """A transition in which a driver call fails, at its first position, its second, and so on.

    Each failure must leave the state as it was, with a typed error, and the last attempt, which the
    fault does not reach any more, must succeed.
    """

    point: str
    step: Sleep | Wake

    def __str__(self) -> str:
        return f"{self.step} with a failing {self.point}"


@dataclass(frozen=True)
class Refused:
    """A transition that must raise `error` and change nothing.

    `memory_taken`: while it is tried, somebody else holds all free device memory.
    """

    step: Sleep | Wake
    error: type[HalError]
    memory_taken: bool = False

    def __str__(self) -> str:
        return f"{self.step} that must raise {self.error.__name__}"


Step = Submit | Drain | Sleep | Wake | Reload | Refuse | Faulted | Refused


@dataclass(frozen=True)
class Case:
    """A named life of a fresh engine; each full wake checks its tensors and the device's books."""

    name: str
    description: str
    steps: tuple[Step, ...]

    @property
    def rounds(self) -> int:
        return sum(isinstance(step, Drain) for step in self.steps)


ROUND: tuple[Step, ...] = (Submit(), Drain())
WEIGHTS_FIRST: tuple[Step, ...] = (
    Wake(("weights",), leaves=("kv_cache",)),
    Wake(("kv_cache",)),
)
CACHE_FIRST: tuple[Step, ...] = (
    Wake(("kv_cache",), leaves=("weights",)),
    Wake(("weights",)),
)
AWAKE = Case("awake", "two rounds without a sleep: the reference", (*ROUND, *ROUND))


def all_cases(cycles: int) -> tuple[Case, ...]:
    """Every case in order, the awake one first; `cycles` is the length of the long one."""
    return (
        AWAKE,
        Case(
            "level-1",
            "level 1, full wake",
            (*ROUND, Sleep(1), Wake(), *ROUND),
        ),
        Case(
            "level-1-selective",
            "level 1, weights woken, then the KV cache",
            (*ROUND, Sleep(1), *WEIGHTS_FIRST, *ROUND),
        ),
        Case(
            "level-1-cache-first",
            "level 1, the KV cache woken, then the weights",
            (*ROUND, Sleep(1), *CACHE_FIRST, *ROUND),
        ),
        Case(
            "level-2",
            "level 2, full wake, weights loaded again",
            (*ROUND, Sleep(2), Wake(), Refuse(DirtyError), Reload(), *ROUND),
        ),
        Case(
            "level-2-selective",
            "level 2, weights woken and loaded again, then the KV cache",
            (*ROUND, Sleep(2), WEIGHTS_FIRST[0], Reload(), WEIGHTS_FIRST[1], *ROUND),
        ),
        Case(
            "double-sleep",
            "a second sleep changes nothing",
            (*ROUND, Sleep(1), Sleep(1, ignored=True), Wake(), *ROUND),
        ),
        Case(
            "double-wake",
            "a second wake changes nothing",
            (*ROUND, Sleep(1), Wake(), Wake(ignored=True), *ROUND),
        ),
        Case(
            "level-1-then-2",
            "level 2 while level 1 sleeps is ignored with a warning; no reload",
            (*ROUND, Sleep(1), Sleep(2, ignored=True, warns=True), Wake(), *ROUND),
        ),
        Case(
            "sleep-at-start",
            "sleep before the first request",
            (Sleep(1), Wake(), *ROUND),
        ),
        Case(
            "requests-while-asleep",
            "requests queue while asleep and half-awake, and complete after the full wake",
            (
                *ROUND,
                Sleep(1),
                Submit(Part.FIRST_HALF),
                Refuse(AsleepError),
                WEIGHTS_FIRST[0],
                Submit(Part.SECOND_HALF),
                Refuse(AsleepError),
                WEIGHTS_FIRST[1],
                Drain(),
            ),
        ),
        Case(
            "cycles",
            f"{cycles} sleeps at level 1, woken in full and selectively by turns",
            tuple(step for index in range(cycles) for step in _cycle(index)),
        ),
    )


def _cycle(index: int) -> tuple[Step, ...]:
    wakes: tuple[Step, ...] = WEIGHTS_FIRST if index % 2 else (Wake(),)
    return (Sleep(1), *wakes, *ROUND)


def choose(names: tuple[str, ...], cycles: int) -> tuple[Case, ...]:
    """The awake case and those named, or all; `InvalidArgument` for a name that is unknown."""
    known = {case.name: case for case in all_cases(cycles)}
    for name in names:
        if name not in known:
            raise InvalidArgument(f"unknown case {name!r}; cases: {', '.join(known)}")
    wanted = {AWAKE.name, *(names or known)}
    return tuple(case for name, case in known.items() if name in wanted)


def lines(cycles: int) -> Iterator[str]:
    """The cases for people, one a line."""
    cases = all_cases(cycles)
    width = max(len(case.name) for case in cases)
    return (f"{case.name:<{width}}  {case.description}" for case in cases)
