"""The soak itself: one engine after another lives by drawn actions until the time is over."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hal.core.report import is_asleep
from hal.core.soak.actions import Action, Fault, Finish, Serve, Sleep, Wake, draw
from hal.core.soak.model import Expected
from hal.core.tags import KV_CACHE, WEIGHTS, Policy
from hal.core.verify.checks import digests
from hal.core.verify.faults import all_memory_taken, failing
from hal.core.verify.matrix.cells import Site, setup_of
from hal.core.verify.matrix.table import Cell, Matrix
from hal.core.verify.requests import Completion, Request, differences, workload
from hal.core.verify.subject import Setup, Subject
from hal.errors import AsleepError, DirtyError, HalError

ACTIONS_A_LIFE = 40
_ENGINE_AXES = ("model", "speculation", "prefill", "connector", "kv", "state")
_ROUND = 24
_DEFERRABLE = frozenset({WEIGHTS, KV_CACHE})
"""What a subject's wakes may leave asleep, unless they are told otherwise."""
_ROWS = 8
"""Rows of an engine: so few that every step has the same shape, whoever is in the batch, and equal
requests get equal bits.
"""


class Violated(Exception):
    """Something that has to be true is not."""


@dataclass
class Outcome:
    """What a soak has done, and what it found: the action that showed it is the last one."""

    seed: int
    lives: int = 0
    actions: int = 0
    faults: int = 0
    """Transitions that failed, by a fault, as they must."""
    compared: int = 0
    seconds: float = 0.0
    life: int = 0
    """The number of the last life."""
    violation: str = ""
    cell: str = ""
    trace: list[str] = field(default_factory=list)
    """The actions of the life that ended with a violation."""

    @property
    def passed(self) -> bool:
        return not self.violation and self.compared > 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": "hal soak",
            "schema_version": 1,
            "passed": self.passed,
            "seed": self.seed,
            "lives": self.lives,
            "last_life": self.life,
            "actions": self.actions,
            "faults": self.faults,
            "compared": self.compared,
            "seconds": round(self.seconds, 1),
            "violation": self.violation,
            "cell": self.cell,
            "trace": self.trace,
        }


def soak(
    site: Site,
    matrix: Matrix,
    *,
    seconds: float | None = None,
    lives: int | None = None,
    seed: int = 0,
    only: int | None = None,
    told: Callable[[str], None] = lambda _: None,
    subject: type[Subject] = Subject,
) -> Outcome:
    """Live until the time is over, so many lives, or the first violation.

    Life n of a seed has the same engine and the same actions on every run: `only` repeats that
    life alone.
    """
    outcome, started = Outcome(seed), time.monotonic()
    numbers: Iterator[int] = itertools.count() if lives is None else iter(range(lives))
    for number in numbers if only is None else iter((only,)):
        if seconds is not None and time.monotonic() - started >= seconds:
            break
        cell = _engine(matrix, seed, number)
        told(f"life {number}: {cell.name}")
        outcome.life = number
        setup = setup_of(site, cell)
        setup = replace(setup, engine=replace(setup.engine, rows=_ROWS, prefill_rows=_ROWS))
        _live(setup, f"{seed}/{number}", cell, outcome, subject)
        outcome.seconds = time.monotonic() - started
        if outcome.violation:
            outcome.violation = f"life {number}: {outcome.violation}"
            break
    return outcome


def _engine(matrix: Matrix, seed: int, number: int) -> Cell:
    """An engine drawn for one life: any model, with any of its options."""
    chance = random.Random(f"engine {seed}/{number}")  # noqa: S311 - it has to be repeatable
    return matrix.cell({axis: chance.choice(matrix.axes[axis]) for axis in _ENGINE_AXES})


def _live(setup: Setup, seed: str, cell: Cell, outcome: Outcome, subject: type[Subject]) -> None:
    outcome.lives += 1
    with _quiet():
        life = _Life(setup, outcome, subject)
        trace: list[str] = []
        try:
            for action in life.actions(seed):
                trace.append(str(action))
                life.take(action)
                outcome.actions += 1
            life.close()
        except Violated as violation:
            outcome.violation, outcome.cell = str(violation), cell.name
            outcome.trace = trace
        except Exception as error:  # noqa: BLE001 - on damaged memory it may be anything
            outcome.violation = f"{trace[-1]} raised {type(error).__name__}: {error}"
            outcome.cell, outcome.trace = cell.name, trace
        if outcome.violation:
            life.abandon()
    gc.collect()


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread, and no warnings: faults are warned of."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


class _Life:
    """One engine with its model of what has to be true."""

    def __init__(self, setup: Setup, outcome: Outcome, subject: type[Subject]) -> None:
        self.outcome = outcome
        self.requests = workload(_ROUND, setup.engine.shape, setup.engine.seed)
        self.reference = _reference(setup, self.requests)
        self.subject = subject(setup)
        self.engine, self.sleeper = self.subject.engine, self.subject.sleeper
        self.device = self.subject.device
        self.expected = Expected(self.sleeper.tags, frozenset(self.engine.needs), _DEFERRABLE)
        self.mapped = self.device.counters().mapped_bytes
        self._next = 0
        self._waiting: dict[int, int] = {}
        """Request of the engine -> request of the round."""
        self._contents = digests(self.subject)

    def actions(self, seed: str) -> Iterator[Action]:
        """The life's actions, which end with everything served."""
        known = not self.sleeper.capabilities.unified_memory
        known = known and bool(self.sleeper.capabilities.free_is_truthful)
        drawn = draw(seed, self.expected.tags, capacity_known=known)
        yield from itertools.islice(drawn, ACTIONS_A_LIFE)
        yield Finish()

    def take(self, action: Action) -> None:
        match action:
            case Sleep():
                self._sleep(action)
            case Wake():
                self._wake(action)
            case Serve():
                self._serve(action)
            case Finish():
                self._finish()
        self._check()

    def close(self) -> None:
        self.subject.close()
        kept = self.device.counters().mapped_bytes - self.subject.others_mapped
        _require(not kept, f"{kept} bytes stayed mapped after the engine was closed")

    def abandon(self) -> None:
        """Give back what can be given back after a violation, which stays what is reported."""
        self.device.clear_faults()
        with suppress(HalError, RuntimeError):
            self.subject.close()

    # -- transitions

    def _sleep(self, action: Sleep) -> None:
        level = action.level
        policies = self.expected.policies(level) if level else dict(action.policy)

        def act() -> None:
            if action.level:
                self.engine.sleep(action.level)
            else:
                self.engine.sleep(policy=policies)

        going = {tag for tag, policy in policies.items() if policy is not Policy.KEEP}
        if self._happens(act, action.fault, ends=frozenset(self.expected.asleep) | going):
            self.expected.sleep(policies)

    def _wake(self, action: Wake) -> None:
        if action.memory_taken and not self.expected.asleep:
            return
        with all_memory_taken(self.device) if action.memory_taken else nullcontext():
            happened = self._happens(
                lambda: self.sleeper.wake_up(action.tags),
                action.fault,
                may_fail=action.memory_taken,
            )
        if happened:
            self.expected.wake(action.tags)

    def _happens(
        self,
        act: Callable[[], object],
        fault: Fault | None,
        *,
        may_fail: bool = False,
        ends: frozenset[str] | None = None,
    ) -> bool:
        """Whether a transition went through; without a cause it may not fail.

        A sleep that fails after something was released for good `ends` asleep, and says so.
        """
        before = self.sleeper.sleeping_tags, self.device.counters().mapped_bytes
        with failing(self.device, fault.point, fault.nth) if fault else nullcontext() as armed:
            try:
                act()
            except HalError as error:
                failure: HalError | None = error
            else:
                failure = None
        if failure is None:
            return True
        _require(may_fail or (armed is not None and armed.hit), f"nothing failed, but {failure}")
        self.outcome.faults += 1
        if ends is not None and getattr(failure, "__notes__", None):
            return self.sleeper.sleeping_tags == ends
        now = self.sleeper.sleeping_tags, self.device.counters().mapped_bytes
        _require(now == before, f"a failed transition changed {before} to {now}: {failure}")
        return False

    # -- load

    def _serve(self, action: Serve) -> None:
        self._submit(action.requests)
        for _ in range(action.steps):
            self._step()

    def _submit(self, count: int) -> None:
        chosen = [self.requests[(self._next + i) % len(self.requests)] for i in range(count)]
        renamed = [replace(request, id=self._next + i) for i, request in enumerate(chosen)]
        self._waiting |= {r.id: chosen[i].id for i, r in enumerate(renamed)}
        self._next += count
        self.engine.submit(renamed)

    def _step(self) -> None:
        try:
            done = self.engine.step()
        except (AsleepError, DirtyError) as error:
            _require(not self.expected.can_serve, f"an awake engine refused a step: {error}")
            return
        _require(self.expected.can_serve, "a step ran on memory that sleeps or is dirty")
        for each in done:
            self._compare(each)

    def _compare(self, done: Completion) -> None:
        """Every bit on the host; an accelerator may compute a row differently in another batch, but
        no answer may be short, or show poison.
        """
        expected = self.reference[self._waiting.pop(done.request)]
        if self.sleeper.capabilities.host_access:
            parts = differences(expected, done)
            _require(not parts, f"request {done.request} differs in {', '.join(parts)}")
        whole = len(done.tokens) == len(expected.tokens)
        numbers = all(map(math.isfinite, (*done.logprobs, *done.prompt_logprobs)))
        _require(whole and numbers, f"request {done.request} is short, or not of numbers")
        self.outcome.compared += 1

    def _finish(self) -> None:
        """Everything awake and loaded, everything answered."""
        self.sleeper.wake_up()
        self.expected.wake(None)
        if self.expected.dirty:
            self.engine.reload_weights()
            self.expected.load()
        while self.engine.unfinished:
            self._step()
        _require(not self._waiting, f"{len(self._waiting)} requests have no answer")
        now = self.device.counters().mapped_bytes
        _require(now == self.mapped, f"{now} bytes are mapped, {self.mapped} at the start")
        names = [
            name
            for name, digest in digests(self.subject).items()
            if name.startswith("model.") and digest != self._contents[name]
        ]
        _require(not names, f"contents differ: {', '.join(names[:3])}")

    # -- what is always true

    def _check(self) -> None:
        expected = self.expected
        sleeping = self.sleeper.sleeping_tags
        _require(sleeping == frozenset(expected.asleep), f"{set(sleeping)} sleep")
        dirty = WEIGHTS in expected.dirty
        _require(bool(self.sleeper.dirty) == dirty, f"dirty: {self.sleeper.dirty[:3]}")
        segments = self.device.segments()
        asleep = sum(segment.size for segment in segments if is_asleep(segment.state))
        counters = self.device.counters()
        _require(counters.asleep_bytes == asleep, "the books of what sleeps do not add up")
        mapped = sum(segment.size for segment in segments) - asleep
        _require(counters.mapped_bytes == mapped, "the books of what is mapped do not add up")
        if not sleeping:
            _require(not self.sleeper.backup_bytes, "backups stay although nothing sleeps")


def _reference(setup: Setup, requests: tuple[Request, ...]) -> dict[int, Completion]:
    """The round's answers of an engine that never slept."""
    subject = Subject(setup)
    subject.engine.submit(requests)
    done: dict[int, Completion] = {}
    while subject.engine.unfinished:
        done |= {each.request: each for each in subject.engine.step()}
    subject.close()
    return done


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise Violated(otherwise)


def summary(outcome: Outcome, platform: str) -> Iterator[str]:
    """The outcome for people; a violation comes with the actions that led to it."""
    counted = (
        f"{outcome.lives} lives, {outcome.actions} actions, {outcome.faults} faults survived, "
        f"{outcome.compared:,} requests compared, {outcome.seconds:.0f} s, seed {outcome.seed}"
    )
    if outcome.passed:
        yield f"nothing was violated: {counted}"
        return
    yield f"engine: {outcome.cell}"
    yield from (f"  {action}" for action in outcome.trace)
    yield f"VIOLATED: {outcome.violation or 'nothing was compared'}; {counted}"
    yield f"again: hal soak --platform {platform} --seed {outcome.seed} --life {outcome.life}"
