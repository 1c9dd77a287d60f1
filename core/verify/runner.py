"""Runs cases on fresh engines and compares every round, bit for bit, with the first awake one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch

from hal.core.report import SleepReport
from hal.core.sleep import SleepManager, State
from hal.core.tags import SCRATCH, Policy
from hal.core.verify import checks
from hal.core.verify.cases import (
    Case,
    Drain,
    Faulted,
    Refuse,
    Refused,
    Reload,
    Sleep,
    Step,
    Submit,
    Wake,
)
from hal.core.verify.engine import ReferenceEngine
from hal.core.verify.faults import all_memory_taken, failing
from hal.core.verify.history import History
from hal.core.verify.report import CaseResult, Finding, Gate
from hal.core.verify.requests import Completion, Request, differences
from hal.core.verify.subject import Subject
from hal.core.verify.timing import Stopwatch
from hal.errors import HalError, StateError

SHOWN_REQUESTS = 5
"""How many request ids a finding names."""
MOST_POSITIONS = 200
"""Positions at which a call may fail in one transition: a small engine has fewer calls."""

Completions = Mapping[int, Completion]


class Observer(Protocol):
    """Is told how a verification goes on."""

    def started(self, case: Case) -> None: ...
    def served(self, requests: int) -> None: ...
    def finished(self, result: CaseResult) -> None: ...


class Reference:
    """The first awake round, and which requests differ between two rounds without a sleep."""

    def __init__(self) -> None:
        self._first: Completions = {}
        self._learned = 0
        self.unstable: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether two awake rounds are known."""
        return self._learned == 2

    def learn(self, completions: Completions) -> None:
        """Take the first round as the reference, and what differs in the second as unstable."""
        if self._learned == 0:
            self._first = completions
        else:
            self.unstable = frozenset(self.differing(completions))
        self._learned += 1

    def differing(self, completions: Completions) -> dict[int, tuple[str, ...]]:
        """Request id -> what differs in at least one bit, or that there was no answer."""
        found: dict[int, tuple[str, ...]] = {}
        for request, expected in self._first.items():
            other = completions.get(request)
            parts = differences(expected, other) if other else ("no answer",)
            if parts:
                found[request] = parts
        return found


def run_cases(
    make: Callable[[], Subject],
    requests: Sequence[Request],
    cases: Sequence[Case],
    observer: Observer,
) -> tuple[CaseResult, ...]:
    """Run each case on a subject of its own; the first case must be the awake one.

    Without a reference there is nothing to compare with, so an awake case that fails to serve ends
    the run.
    """
    reference = Reference()
    results = []
    with _one_thread():
        for case in cases:
            observer.started(case)
            results.append(_run_case(make, requests, case, reference, observer))
            observer.finished(results[-1])
            if not reference.complete:
                break
    return tuple(results)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Host kernels on one thread: how work is split must not depend on the load of the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run_case(
    make: Callable[[], Subject],
    requests: Sequence[Request],
    case: Case,
    reference: Reference,
    observer: Observer,
) -> CaseResult:
    with warnings.catch_warnings(record=True) as caught, Stopwatch() as watch:
        warnings.simplefilter("always")
        try:
            subject = make()
        except Exception as error:  # noqa: BLE001 - what a device cannot do may raise anything
            return _not_made(case, error)
        run = _CaseRun(subject, requests, reference, observer, caught)
        run.execute(case.steps)
        run.close()
    return CaseResult(
        name=case.name,
        description=case.description,
        rounds=run.rounds,
        compared=run.compared,
        damaged=run.damaged,
        unstable=run.unstable,
        slept=run.slept,
        seconds=watch.seconds,
        findings=tuple(run.findings),
        warnings=tuple(str(warning.message) for warning in caught),
        history=run.history.ended(),
    )


def _not_made(case: Case, error: Exception) -> CaseResult:
    """The result of a case whose engine could not even be made."""
    text = f"making the engine raised {type(error).__name__}: {error}"
    return CaseResult(
        name=case.name,
        description=case.description,
        rounds=0,
        compared=0,
        damaged=0,
        unstable=0,
        slept={},
        seconds=0.0,
        findings=(Finding(Gate.BEHAVIOUR, text),),
    )


class _CaseRun:
    """The steps of one case on one subject, and what they found so far."""

    def __init__(
        self,
        subject: Subject,
        requests: Sequence[Request],
        reference: Reference,
        observer: Observer,
        caught: list[warnings.WarningMessage],
    ) -> None:
        self.subject, self.requests, self.reference = subject, requests, reference
        self.observer, self.caught = observer, caught
        self.rounds = self.compared = self.damaged = self.unstable = 0
        self.slept: dict[str, int] = {}
        self.findings: dict[Finding, None] = {}
        self._baseline = checks.Baseline.of(subject)
        self._slept_with: dict[str, str] | None = None
        self._blocks_slept_with: dict[checks.Block, str] = {}
        self._slept_by: Sleep | None = None
        self._reached: dict[str, int] = {}
        self.history = History.of(subject)

    @property
    def engine(self) -> ReferenceEngine:
        return self.subject.engine

    @property
    def sleeper(self) -> SleepManager:
        return self.subject.sleeper

    def note(self, findings: Iterable[Finding]) -> None:
        """Keep findings, each once."""
        self.findings.update(dict.fromkeys(findings))

    def _expect(self, held: bool, otherwise: str) -> None:
        if not held:
            self.note([Finding(Gate.BEHAVIOUR, otherwise)])

    def execute(self, steps: Sequence[Step]) -> None:
        """Take the steps until one fails, or a round shows damage."""
        self.note(checks.check_placement(self.subject))
        self.note(checks.check_audit(self.subject))
        for step in steps:
            try:
                self._take(step)
            except Exception as error:  # noqa: BLE001 - on damaged memory it may be anything
                self.note([checks.finding_of(self.subject, step, error)])
                return
            if isinstance(step, Drain) and self.damaged:
                return
        self.note(self.history.creep())
        for point, positions in self._reached.items():
            self._expect(positions > 0, f"no call of {point} was there to fail")

    def close(self) -> None:
        """Give the subject back, and look whether it is all there."""
        try:
            self.subject.close()
        except HalError as error:
            self.note([Finding(Gate.BOOKS, f"closing raised {type(error).__name__}: {error}")])
            return
        self.note(checks.check_given_back(self.subject))

    def _take(self, step: Step) -> None:
        match step:
            case Submit(part):
                self.engine.submit(self.requests[part.of(len(self.requests))])
            case Drain():
                self._drain()
            case Reload():
                self.engine.reload_weights()
                self._check_if_awake()
            case Refuse(error):
                self._refuse(error)
            case _:
                self._change(step)

    def _change(self, step: Sleep | Wake | Faulted | Refused) -> None:
        match step:
            case Sleep():
                self._sleep(step)
            case Wake():
                self._wake(step)
            case Faulted():
                self._faulted(step)
            case Refused():
                self._refused(step)

    # -- rounds

    def _drain(self) -> None:
        self._refuse_wild_reads()
        self.rounds += 1
        completions: dict[int, Completion] = {}
        try:
            while self.engine.unfinished:
                finished = self.engine.step()
                completions.update({each.request: each for each in finished})
                self.observer.served(len(finished))
        except Exception:
            self._compare(completions)
            raise
        if self.reference.complete:
            self._compare(completions)
        else:
            self._learn(completions)

    def _refuse_wild_reads(self) -> None:
        """Let no device read through damaged indices: unlike the host's, its fault is the end."""
        registered = self.engine.registered()
        damaged = [f.tensor for f in self.findings if f.gate is Gate.CONTENTS and f.tensor]
        wild = [name for name in damaged if not registered[name].tensor.is_floating_point()]
        if wild and not self.sleeper.capabilities.host_access:
            raise StateError(f"not served, since {', '.join(wild)} would be read as indices")

    def _learn(self, completions: Completions) -> None:
        self._expect_finite(completions)
        self.reference.learn(completions)
        if self.reference.complete:
            self.unstable = len(self.reference.unstable)
            self.compared = len(self.requests) - self.unstable
            text = "every request differs between two awake rounds: nothing can be compared"
            self._expect(self.compared > 0, text)

    def _compare(self, completions: Completions) -> None:
        differing = self.reference.differing(completions)
        unstable = self.reference.unstable
        damaged = {key: parts for key, parts in differing.items() if key not in unstable}
        self.unstable += len(differing) - len(damaged)
        self.compared += len(self.requests) - len(unstable)
        self.damaged += len(damaged)
        if damaged:
            self.note([_damage(damaged, len(self.requests) - len(unstable))])
        self._expect_finite(completions)

    def _expect_finite(self, completions: Completions) -> None:
        """Scratch that is read before it is written may hold the same NaN in every round, which
        then do not differ.
        """
        wild = [request for request, done in completions.items() if not done.is_finite]
        if wild:
            text = f"{len(wild)} requests have log-probabilities that are not finite"
            self.note([_of_requests(text, wild)])

    # -- sleep and wake

    def _sleep(self, step: Sleep) -> None:
        told = len(self.caught)
        if not step.ignored:
            self._remember(step)
        mapped = self.subject.device.counters().mapped_bytes
        report = self._go_to_sleep(step)
        self.history.slept(report)
        if step.ignored:
            text = f"a sleep while asleep released {report.total_bytes:,} bytes again"
            self._expect(not report.total_bytes, text)
            self._expect_warning(step, told)
        else:
            self._expect(report.total_bytes > 0, "the sleep released nothing")
            if step.park:
                is_parked = self.sleeper.state is State.PARKED
                self._expect(is_parked, "the process is not parked")
            for tag in report.tags:
                self.slept[tag.tag] = max(tag.bytes, self.slept.get(tag.tag, 0))
        if step.policy is None:
            self.note(checks.check_asleep(self.subject))
        else:
            self.note(checks.check_released(self.subject, mapped, report))

    def _go_to_sleep(self, step: Sleep) -> SleepReport:
        if step.policy is None:
            return self.engine.sleep(step.level, park=step.park)
        known = {tag: policy for tag, policy in step.policy if tag in self.sleeper.tags}
        return self.engine.sleep(policy=known)

    def _remember(self, step: Sleep) -> None:
        """Note what must be the same after the wake."""
        self._slept_by = step
        self.engine.drain()
        lost = {tag for tag, policy in step.policy or () if policy is Policy.DISCARD}
        lost = lost if step.policy is not None else set(SCRATCH)
        self._slept_with = checks.digests(self.subject, frozenset(lost & SCRATCH))
        self._blocks_slept_with = checks.block_digests(self.subject, step.kept)

    def _expect_warning(self, step: Sleep, told: int) -> None:
        """Check that the step warned, or not; a warning that had to come is none to report."""
        warned = len(self.caught) > told
        text = f"{step} while asleep gave {'a' if warned else 'no'} warning"
        self._expect(warned == step.warns, text)
        if step.warns:
            del self.caught[told:]

    def _wake(self, step: Wake) -> None:
        report = self.sleeper.wake_up(step.tags)
        self.history.woke(report)
        if step.ignored:
            text = f"a wake while awake took {report.total_bytes:,} bytes"
            self._expect(not report.total_bytes, text)
        asleep = self.sleeper.sleeping_tags
        self._expect(
            asleep == set(step.leaves),
            f"after {step}, what sleeps is {_names(asleep)}, not {_names(step.leaves)}",
        )
        self._check_if_awake()

    def _check_if_awake(self) -> None:
        """Once everything is awake and loaded again, everything must be what and where it was."""
        if self._slept_with is None or self.sleeper.is_sleeping or self.sleeper.dirty:
            return
        self.note(checks.check_placement(self.subject))
        self.note(checks.check_addresses(self.subject, self._baseline))
        self.note(checks.check_contents(self.subject, self._slept_with))
        self.note(checks.check_blocks(self.subject, self._blocks_slept_with))
        if self.subject.retains and not self.history.full_wakes:
            self._baseline = self._baseline.with_backups(self.subject)
        self.history.full_wakes += 1
        self.note(checks.check_books(self.subject, self._baseline))
        self._slept_with = None

    # -- faults

    def _faulted(self, step: Faulted) -> None:
        """Fail the n-th call for each n that there is; the attempt that none reaches is the step
        itself.
        """
        for nth in range(1, MOST_POSITIONS + 1):
            before, loaded = self._standing(), not self.sleeper.dirty
            if isinstance(step.step, Sleep):
                self._remember(step.step)
            told = len(self.caught)
            with failing(self.subject.device, step.point, nth) as fault:
                error = self._attempt(step.step)
            if not fault.hit:
                self._reached[step.point] = self._reached.get(step.point, 0) + nth - 1
                self._finish_faulted(step, error)
                return
            del self.caught[told:]  # a fault may well be warned of
            if error is None:
                self._undo(step.step, before[0], loaded=loaded)
            else:
                self._expect_unchanged(f"{step} ({nth})", before, error)
            self.history.faults += 1
        self._expect(False, f"{step} did not end after {MOST_POSITIONS} positions")

    def _finish_faulted(self, step: Faulted, error: Exception | None) -> None:
        if error is not None:
            raise error
        if isinstance(step.step, Wake):
            self._check_if_awake()

    def _attempt(self, step: Sleep | Wake) -> Exception | None:
        """Try a transition; the error that it raised, which has to be a typed one."""
        try:
            if isinstance(step, Sleep):
                self.history.slept(self._go_to_sleep(step))
            else:
                self.history.woke(self.sleeper.wake_up(step.tags))
        except HalError as error:
            return error
        return None

    def _undo(self, step: Sleep | Wake, asleep: frozenset[str], *, loaded: bool) -> None:
        """The transition went through in spite of the fault: go back to these sleeping tags, to try
        the next position.
        """
        if isinstance(step, Sleep):
            self.history.woke(self.sleeper.wake_up())
        elif self._slept_by is not None:
            self.history.slept(self._go_to_sleep(self._slept_by))
            if awake := self.sleeper.sleeping_tags - asleep:
                self.history.woke(self.sleeper.wake_up(awake))
        if loaded and self.sleeper.dirty:
            self.engine.reload_weights()

    def _refused(self, step: Refused) -> None:
        before = self._standing()
        if isinstance(step.step, Sleep):
            self._remember(step.step)
        with all_memory_taken(self.subject.device) if step.memory_taken else nullcontext():
            error = self._attempt(step.step)
        self.history.faults += 1
        text = f"{step} raised {type(error).__name__ if error else 'nothing'}"
        self._expect(isinstance(error, step.error), text)
        if error is not None:
            self._expect_unchanged(str(step), before, error)

    def _standing(self) -> tuple[frozenset[str], dict[str, int]]:
        """What a failed transition must leave alone: who sleeps, and the device's books."""
        return self.sleeper.sleeping_tags, checks.books(self.subject)

    def _expect_unchanged(self, what: str, before: tuple[object, ...], error: Exception) -> None:
        now = self._standing()
        if now != before:
            text = f"{what} raised {type(error).__name__} and changed {before} to {now}"
            self.note([Finding(Gate.FAULTS, text)])
            raise StateError("not continued: what counts as awake may have no memory")
        if self._slept_with is not None and not self.sleeper.is_sleeping:
            self.note(checks.check_contents(self.subject, self._slept_with))
            self.note(checks.check_addresses(self.subject, self._baseline))

    def _refuse(self, error: type[Exception]) -> None:
        try:
            self.engine.step()
        except error:
            return
        self._expect(False, f"a step of the engine ran instead of raising {error.__name__}")


def _damage(damaged: Mapping[int, tuple[str, ...]], compared: int) -> Finding:
    """One finding for a round: how many requests differ, in what, and the first of them."""
    parts = sorted({part for found in damaged.values() for part in found})
    text = f"{len(damaged)} of {compared} requests differ from the awake round ({', '.join(parts)})"
    return _of_requests(text, damaged)


def _of_requests(text: str, requests: Collection[int]) -> Finding:
    """A finding that names the first of its requests."""
    first = tuple(sorted(requests)[:SHOWN_REQUESTS])
    more = ", …" if len(requests) > len(first) else ""
    listed = ", ".join(map(str, first))
    return Finding(Gate.REQUESTS, f"{text}: requests {listed}{more}", requests=first)


def _names(tags: Iterable[str]) -> str:
    return ", ".join(sorted(tags)) or "nothing"
