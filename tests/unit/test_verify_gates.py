"""Every gate of the verification can fail: what is wrong in one way is caught and named."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from hal.core import Policy, SleepManager
from hal.core.report import SleepReport, WakeReport
from hal.core.verify.cases import AWAKE, Case, Drain, Part, Sleep, Submit, all_cases, choose
from hal.core.verify.engine import ReferenceEngine, Registered
from hal.core.verify.model import ModelConfig
from hal.core.verify.report import CaseResult, Gate, VerifyReport
from hal.core.verify.requests import Completion, workload
from hal.core.verify.runner import run_cases
from hal.core.verify.state import EngineConfig
from hal.core.verify.subject import Setup, Subject
from hal.core.verify.terminal import Bars, Lines, verdict_line
from hal.cpu.platform import CpuPlatform
from hal.errors import AsleepError, InvalidArgument
from hal.platform import Flag

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = EngineConfig(
    model=ModelConfig(
        vocabulary=256, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, mlp=48
    ),
    rows=12,
    prefill_rows=4,
    blocks=80,
)
REQUESTS = workload(16, SMALL.shape)
NAN_BITS = 0x7FC00000


class Silent:
    """An observer that only counts."""

    def __init__(self) -> None:
        self.cases: list[str] = []
        self.requests = 0

    def started(self, case: Case) -> None:
        self.cases.append(case.name)

    def served(self, requests: int) -> None:
        self.requests += requests

    def finished(self, result: CaseResult) -> None:
        assert result.name == self.cases[-1]


@pytest.fixture
def setup() -> Setup:
    return Setup(CpuPlatform(), backing="anonymous", engine=SMALL)


def run(setup: Setup, subject: type[Subject], *names: str) -> dict[str, CaseResult]:
    cases = choose(names, cycles=2)
    results = run_cases(lambda: subject(setup), REQUESTS, cases, Silent())
    return {result.name: result for result in results}


def gates(result: CaseResult) -> set[Gate]:
    return {finding.gate for finding in result.findings}


def subject_of(
    engine: type[ReferenceEngine] = ReferenceEngine, manager: type[SleepManager] = SleepManager
) -> type[Subject]:
    """A subject with one part exchanged."""
    return type("Changed", (Subject,), {"engine_type": engine, "manager_type": manager})


# ---- nothing is wrong ----------------------------------------------------------------------------


def test_an_engine_without_a_defect_passes_every_case(setup: Setup) -> None:
    results = run(setup, Subject)
    assert [name for name, result in results.items() if not result.passed] == []
    assert list(results) == [case.name for case in all_cases(2)]
    slept = results["level-1"].slept
    assert set(slept) == {"weights", "runtime", "kv_cache", "workspace"}
    assert all(size > 0 for size in slept.values())
    rounds = {case.name: case.rounds for case in all_cases(2)}
    for name, result in results.items():
        assert result.rounds == rounds[name]
        assert result.compared == len(REQUESTS) * (rounds[name] - (name == "awake"))
        assert result.unstable == result.damaged == 0
        assert result.warnings == ()


def test_the_observer_sees_every_request(setup: Setup) -> None:
    seen = Silent()
    run_cases(lambda: Subject(setup), REQUESTS, choose(("level-1",), 2), seen)
    assert seen.cases == ["awake", "level-1"]
    assert seen.requests == len(REQUESTS) * 4


def test_host_threads_are_what_they_were(setup: Setup) -> None:
    before = torch.get_num_threads()
    run(setup, Subject, "awake")
    assert torch.get_num_threads() == before


# ---- requests ------------------------------------------------------------------------------------


class _FlipsLogprobs(ReferenceEngine):
    """Flips a bit of the output logprobs of some requests in every other round."""

    flipped: frozenset[int] = frozenset({3})
    rounds = 0

    def step(self) -> tuple[Completion, ...]:
        finished = super().step()
        out = tuple(self._flip(each) for each in finished)
        self.rounds += not self.unfinished
        return out

    def _flip(self, done: Completion) -> Completion:
        if done.request not in self.flipped or self.rounds % 2 == 0:
            return done
        return replace(done, logprob_bits=(done.logprob_bits[0] ^ 1, *done.logprob_bits[1:]))


class _FlipsAllLogprobs(_FlipsLogprobs):
    flipped = frozenset(range(len(REQUESTS)))


def test_what_differs_between_awake_rounds_is_unstable_and_not_damage(setup: Setup) -> None:
    results = run(setup, subject_of(_FlipsLogprobs), "level-1")
    assert all(result.passed for result in results.values())
    assert results["awake"].unstable == 1
    assert results["awake"].compared == len(REQUESTS) - 1
    assert results["level-1"].unstable == 1


def test_unstable_requests_do_not_hide_damage_elsewhere(setup: Setup) -> None:
    class Unsettled(_FlipsLogprobs):
        def restart(self) -> None:
            """Trust the prefix index over the sleep."""

    level_1 = run(setup, subject_of(Unsettled), "level-1")["level-1"]
    assert not level_1.passed
    assert level_1.damaged > 0
    assert level_1.unstable == 1
    finding = next(f for f in level_1.findings if f.gate is Gate.REQUESTS)
    assert 3 not in finding.requests


def test_nothing_to_compare_is_no_pass(setup: Setup) -> None:
    awake = run(setup, subject_of(_FlipsAllLogprobs), "level-1")["awake"]
    assert not awake.passed
    assert awake.unstable == len(REQUESTS)
    assert "nothing can be compared" in awake.findings[0].text


def test_one_bit_of_one_logprob_is_damage(setup: Setup) -> None:
    class OneBit(ReferenceEngine):
        def step(self) -> tuple[Completion, ...]:
            woken = self.sleeper.wake_count > 0
            return tuple(
                replace(
                    d,
                    prompt_logprob_bits=(d.prompt_logprob_bits[0] ^ 1, *d.prompt_logprob_bits[1:]),
                )
                if woken and d.request == 7
                else d
                for d in super().step()
            )

    result = run(setup, subject_of(OneBit), "level-1")["level-1"]
    assert result.damaged == 1
    assert [f.requests for f in result.findings] == [(7,)]
    assert (
        "1 of 16 requests differ from the awake round (prompt logprobs)" in result.findings[0].text
    )


def test_requests_without_an_answer_are_damage(setup: Setup) -> None:
    class Forgetful(ReferenceEngine):
        def step(self) -> tuple[Completion, ...]:
            forget = self.sleeper.wake_count > 0
            return tuple(done for done in super().step() if not forget or done.request != 5)

    result = run(setup, subject_of(Forgetful), "level-1")["level-1"]
    assert result.damaged == 1
    assert "no answer" in result.findings[0].text


def test_an_engine_that_never_serves_ends_the_run_without_a_pass(setup: Setup) -> None:
    class Broken(ReferenceEngine):
        def step(self) -> tuple[Completion, ...]:
            raise RuntimeError("no kernel for this device")

    results = run(setup, subject_of(Broken))
    assert list(results) == ["awake"]
    assert not results["awake"].passed
    assert "no kernel for this device" in results["awake"].findings[0].text


def test_an_engine_that_cannot_be_made_is_a_finding(setup: Setup) -> None:
    class Unmakeable(ReferenceEngine):
        def _allocate(self) -> None:
            raise RuntimeError("no memory for the model")

    results = run(setup, subject_of(Unmakeable))
    assert list(results) == ["awake"]
    assert not results["awake"].passed
    assert (
        "making the engine raised RuntimeError: no memory for" in results["awake"].findings[0].text
    )


# ---- memory --------------------------------------------------------------------------------------


def test_a_tensor_that_moves_is_named(setup: Setup) -> None:
    class Moving(ReferenceEngine):
        def restart(self) -> None:
            super().restart()
            weight = self.model.head.weight
            weight.data = weight.data.clone()

    level_1 = run(setup, subject_of(Moving), "level-1")["level-1"]
    assert gates(level_1) == {Gate.PLACEMENT, Gate.ADDRESS}
    assert {finding.tensor for finding in level_1.findings} == {"model.head.weight"}
    assert "lies in ordinary memory" in next(iter(level_1.findings)).text


def test_a_tensor_in_no_pool_is_named_before_the_first_sleep(setup: Setup) -> None:
    class Outside(ReferenceEngine):
        def registered(self) -> dict[str, Registered]:
            return super().registered() | {"stray": Registered(self.stray, "runtime")}

        def _connect(self) -> None:
            self.stray = torch.zeros(8)
            super()._connect()

    awake = run(setup, subject_of(Outside), "awake")["awake"]
    assert [(f.gate, f.tensor, f.tag) for f in awake.findings] == [
        (Gate.PLACEMENT, "stray", "runtime")
    ]


def test_changed_contents_are_named_with_tag_and_segment(setup: Setup) -> None:
    class Scribbling(ReferenceEngine):
        def restart(self) -> None:
            super().restart()
            self.runtime.context_offsets[3] = 0

    level_1 = run(setup, subject_of(Scribbling), "level-1")["level-1"]
    contents = [f for f in level_1.findings if f.gate is Gate.CONTENTS]
    assert [(f.tensor, f.tag) for f in contents] == [("runtime.context_offsets", "runtime")]
    assert contents[0].segment is not None


def test_a_wake_that_takes_more_than_the_sleep_gave_is_caught(setup: Setup) -> None:
    class Leaking(ReferenceEngine):
        def restart(self) -> None:
            super().restart()
            with self.sleeper.pool("leak"):
                self.leaked = [*getattr(self, "leaked", []), torch.zeros(1 << 20)]

        def close(self) -> None:
            super().close()
            self.leaked = []

    cycles = run(setup, subject_of(Leaking), "cycles")["cycles"]
    books = {f.text.split(":")[0] for f in cycles.findings if f.gate is Gate.BOOKS}
    assert books >= {"mapped_bytes", "handles", "reservations"}


def test_backups_that_stay_after_the_wake_are_caught(setup: Setup) -> None:
    class Hoarding(SleepManager):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options["backup"] = replace(options["backup"], retain=True)
            super().__init__(*arguments, **options)

    level_1 = run(setup, subject_of(manager=Hoarding), "level-1")["level-1"]
    assert any(f.text.startswith("host bytes") for f in level_1.findings)


@pytest.mark.parametrize("grows", [False, True])
def test_retained_backups_stay_as_large_as_what_they_encode_at_most(
    setup: Setup, grows: bool
) -> None:
    class Hoarding(SleepManager):
        @property
        def backup_bytes(self) -> int:
            return super().backup_bytes + (1 << 30) * (grows and not self.is_sleeping)

    kept = replace(setup, retain=True, compress="zstd")
    cycles = run(kept, subject_of(manager=Hoarding), "cycles")["cycles"]
    found = [f.text for f in cycles.findings if f.text.startswith("host bytes")]
    assert bool(found) is grows
    assert all("that they encode" in text for text in found)


class _ReadsScratch(ReferenceEngine):
    """Its log-probabilities are NaN in every round alike, as of poison that nothing overwrote."""

    def _append(self, running: Any, sampled: torch.Tensor) -> None:
        sampled[1] = NAN_BITS
        super()._append(running, sampled)


def test_log_probabilities_that_are_no_numbers_are_caught_where_no_round_differs(
    setup: Setup,
) -> None:
    results = run(setup, subject_of(_ReadsScratch), "awake", "level-1")
    for result in results.values():
        assert result.damaged == result.unstable == 0
        [found] = result.findings
        assert found.gate is Gate.REQUESTS
        assert found.text.startswith("16 requests have log-probabilities that are not finite")
        assert found.requests == (0, 1, 2, 3, 4)


def test_a_request_that_is_not_compared_still_has_to_be_finite(setup: Setup) -> None:
    class Unstable(_FlipsLogprobs):
        def _flip(self, done: Completion) -> Completion:
            flipped = super()._flip(done)
            if done.request not in self.flipped or not self.sleeper.wake_count:
                return flipped
            return replace(done, logprob_bits=(NAN_BITS, *done.logprob_bits[1:]))

    results = run(setup, subject_of(Unstable), "awake", "level-1")
    level_1 = results["level-1"]
    assert results["awake"].passed
    assert level_1.damaged == 0
    assert [(f.gate, f.requests) for f in level_1.findings] == [(Gate.REQUESTS, (3,))]
    assert "not finite" in level_1.findings[0].text


def test_a_sleep_that_keeps_a_tag_mapped_is_caught(setup: Setup) -> None:
    class Keeping(SleepManager):
        def sleep(self, level: int = 1, *, policy: Any = None, park: bool = False) -> SleepReport:
            return super().sleep(policy={"weights": Policy.OFFLOAD})

    level_1 = run(setup, subject_of(manager=Keeping), "level-1")["level-1"]
    assert any("still mapped although every tag sleeps" in f.text for f in level_1.findings)


def test_a_sleep_that_does_nothing_is_caught(setup: Setup) -> None:
    class Sleepless(SleepManager):
        def sleep(self, level: int = 1, *, policy: Any = None, park: bool = False) -> SleepReport:
            return SleepReport((), 0.0, 0.0, 0.0, 0.0, 0, 0, level)

    level_1 = run(setup, subject_of(manager=Sleepless), "level-1")["level-1"]
    assert gates(level_1) == {Gate.BEHAVIOUR, Gate.BOOKS}


def test_memory_that_outlives_its_engine_is_caught(setup: Setup) -> None:
    kept = []

    class Clinging(ReferenceEngine):
        def close(self) -> None:
            kept.append(self.pages)
            super().close()

    awake = run(setup, subject_of(Clinging), "awake")["awake"]
    assert [f.gate for f in awake.findings] == [Gate.BOOKS]
    assert "stayed mapped after the engine was closed" in awake.findings[0].text


def test_a_device_is_never_let_read_through_damaged_indices(setup: Setup) -> None:
    class Scribbling(ReferenceEngine):
        def restart(self) -> None:
            super().restart()
            self.runtime.context_offsets[3] = 1 << 40

    class Remote(SleepManager):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            no = Flag(False, "device memory is out of the host's reach")
            self.capabilities = replace(self.capabilities, host_access=no)

    result = run(setup, subject_of(Scribbling, Remote), "level-1")["level-1"]
    assert result.rounds == 1
    assert "runtime.context_offsets would be read as indices" in result.findings[-1].text


# ---- behaviour -----------------------------------------------------------------------------------


def test_an_engine_that_serves_while_asleep_is_caught(setup: Setup) -> None:
    class Reckless(ReferenceEngine):
        def step(self) -> tuple[Completion, ...]:
            return () if self.sleeper.is_sleeping else super().step()

    result = run(setup, subject_of(Reckless), "requests-while-asleep")["requests-while-asleep"]
    assert any("instead of raising AsleepError" in f.text for f in result.findings)


def test_an_engine_that_serves_unloaded_weights_is_caught(setup: Setup) -> None:
    class Careless(ReferenceEngine):
        def step(self) -> tuple[Completion, ...]:
            return () if self.sleeper.dirty else super().step()

    result = run(setup, subject_of(Careless), "level-2")["level-2"]
    assert any("instead of raising DirtyError" in f.text for f in result.findings)


def test_a_selective_wake_that_wakes_everything_is_caught(setup: Setup) -> None:
    class Eager(SleepManager):
        def wake_up(self, tags: Any = None, **options: Any) -> WakeReport:
            return super().wake_up(None, **options)

    result = run(setup, subject_of(manager=Eager), "level-1-selective")["level-1-selective"]
    text = "after wake_up(weights), what sleeps is nothing, not kv_cache"
    assert [f.text for f in result.findings] == [text]


def test_an_ignored_level_without_a_warning_is_caught(setup: Setup) -> None:
    class Mute(SleepManager):
        def sleep(self, level: int = 1, *, policy: Any = None, park: bool = False) -> SleepReport:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return super().sleep(level, policy=policy)

    result = run(setup, subject_of(manager=Mute), "level-1-then-2")["level-1-then-2"]
    assert [f.text for f in result.findings] == ["sleep(level=2) while asleep gave no warning"]


def test_a_warning_that_nobody_expects_is_reported(setup: Setup) -> None:
    class Talking(ReferenceEngine):
        def restart(self) -> None:
            super().restart()
            warnings.warn("the kernel library is old", stacklevel=2)

    results = run(setup, subject_of(Talking), "level-1")
    assert results["level-1"].passed
    assert results["level-1"].warnings == ("the kernel library is old",)
    assert "warning: the kernel library is old" in plain(report_of(tuple(results.values())))


def test_an_engine_that_cannot_be_closed_is_caught(setup: Setup) -> None:
    kept = []

    class Clinging(ReferenceEngine):
        def close(self) -> None:
            kept.append(self.model)
            super().close()

    class Sleepy(SleepManager):
        def wake_up(self, tags: Any = None, **options: Any) -> WakeReport:
            raise AsleepError(["weights"])

    level_1 = run(setup, subject_of(Clinging, Sleepy), "level-1")["level-1"]
    assert level_1.findings[-1].gate is Gate.BOOKS
    assert "closing raised StateError" in level_1.findings[-1].text


def test_a_second_sleep_that_does_something_is_caught(setup: Setup) -> None:
    class Restless(SleepManager):
        def sleep(self, level: int = 1, *, policy: Any = None, park: bool = False) -> SleepReport:
            report = super().sleep(level, policy=policy)
            self.last = report if report.tags else self.last
            return self.last

    result = run(setup, subject_of(manager=Restless), "double-sleep")["double-sleep"]
    assert any("a sleep while asleep released" in f.text for f in result.findings)


def test_a_second_wake_that_does_something_is_caught(setup: Setup) -> None:
    class Restless(SleepManager):
        def wake_up(self, tags: Any = None, **options: Any) -> WakeReport:
            report = super().wake_up(tags, **options)
            self.last = report if report.tags else self.last
            return self.last

    result = run(setup, subject_of(manager=Restless), "double-wake")["double-wake"]
    assert any("a wake while awake took" in f.text for f in result.findings)


def test_errors_of_a_step_become_findings_and_the_engine_is_given_back(setup: Setup) -> None:
    class Failing(SleepManager):
        def wake_up(self, tags: Any = None, **options: Any) -> WakeReport:
            raise AsleepError(["weights"], "and it stays so")

    level_1 = run(setup, subject_of(manager=Failing), "level-1")["level-1"]
    assert [f.gate for f in level_1.findings] == [Gate.BEHAVIOUR]
    assert level_1.findings[0].text.startswith("wake_up() raised AsleepError")
    assert setup.platform.device().counters().mapped_bytes == 0


# ---- cases ---------------------------------------------------------------------------------------


def test_the_halves_of_a_round_are_the_round() -> None:
    for count in (1, 2, 553):
        numbers = list(range(count))
        assert numbers[Part.FIRST_HALF.of(count)] + numbers[Part.SECOND_HALF.of(count)] == numbers
        assert numbers[Part.ALL.of(count)] == numbers


@pytest.mark.parametrize("case", all_cases(20), ids=lambda case: case.name)
def test_each_case_compares_whole_rounds(case: Case) -> None:
    submitted: list[Part] = []
    for step in case.steps:
        if isinstance(step, Submit):
            submitted.append(step.part)
        elif isinstance(step, Drain):
            assert submitted in ([Part.ALL], [Part.FIRST_HALF, Part.SECOND_HALF])
            submitted.clear()
    assert not submitted
    assert isinstance(case.steps[-1], Drain)


def test_twenty_cycles_alternate_and_are_compared_each() -> None:
    cycles = next(case for case in all_cases(20) if case.name == "cycles")
    assert sum(isinstance(step, Sleep) for step in cycles.steps) == 20
    assert cycles.rounds == 20


def test_chosen_cases_come_behind_the_reference() -> None:
    assert [case.name for case in choose(("double-wake",), 2)] == [AWAKE.name, "double-wake"]
    with pytest.raises(InvalidArgument, match="level-1-selective"):
        choose(("nothing",), 2)


# ---- reports -------------------------------------------------------------------------------------


def report_of(results: Sequence[CaseResult]) -> VerifyReport:
    environment = {"platform": "cpu", "capabilities": {"device_name": "CPU"}}
    options = {"requests": len(REQUESTS), "execution": "graphs"}
    return VerifyReport(tuple(results), environment, options, 1.5)


@pytest.fixture
def damaged(setup: Setup) -> VerifyReport:
    class Scribbling(ReferenceEngine):
        def restart(self) -> None:
            super().restart()
            self.runtime.context_offsets.fill_(0)
            self.runtime.prompt_offsets.fill_(0)

    return report_of(tuple(run(setup, subject_of(Scribbling), "level-1", "double-wake").values()))


def test_a_report_is_plain_values(damaged: VerifyReport) -> None:
    value = json.loads(json.dumps(damaged.as_dict()))
    assert value["schema_version"] == 1
    assert value["passed"] is False
    assert [case["passed"] for case in value["cases"]] == [True, False, False]
    finding = value["cases"][1]["findings"][0]
    assert finding["gate"] == "contents"
    assert finding["tensor"] == "runtime.context_offsets"
    assert finding["tag"] == "runtime"
    assert re.fullmatch("0x[0-9a-f]+", finding["segment"])


def test_a_report_without_cases_is_no_pass() -> None:
    assert not report_of([]).passed


def test_tensors_of_one_kind_share_a_line(damaged: VerifyReport) -> None:
    lines = plain(damaged)
    contents = [line for line in lines if line.startswith("contents: runtime.context_offsets")]
    assert len(contents) == 1
    assert "(and 1 more tensor) [level-1 and 1 more case]" in contents[0]


def test_the_verdict_names_the_failed_cases(damaged: VerifyReport) -> None:
    assert verdict_line(damaged).startswith("FAILED: 2 of 3 cases (level-1, double-wake)")
    passed = report_of(damaged.cases[:1])
    assert verdict_line(passed) == "bit-exact: 1 case, 16 requests compared, 0 unstable, 1.5 s"


def plain(report: VerifyReport) -> list[str]:
    console = Console(force_terminal=False, record=True, width=100, quiet=False, file=Nowhere())
    with Lines(console, choose((), 2)) as lines:
        for result in report.cases:
            lines.finished(result)
    lines.summarize(report)
    return console.export_text().splitlines()


class Nowhere:
    """A file that forgets."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def test_plain_lines_have_no_boxes_and_no_escapes(damaged: VerifyReport) -> None:
    text = "\n".join(plain(damaged))
    assert text.isascii() or set(text) - set(map(chr, range(128))) == {"…"}
    assert re.search(r"^level-1 +FAILED +2 +32 ", text, re.MULTILINE)


@pytest.mark.parametrize(("width", "described"), [(80, False), (160, True)])
def test_a_terminal_gets_bars_and_a_table(
    damaged: VerifyReport, width: int, described: bool
) -> None:
    console = Console(force_terminal=True, record=True, width=width, file=Nowhere())
    with Bars(console, choose((), 2), len(REQUESTS)) as bars:
        for case, result in zip(choose((), 2), damaged.cases, strict=False):
            bars.started(case)
            bars.served(len(REQUESTS))
            bars.finished(result)
    bars.summarize(damaged)
    text = console.export_text()
    assert "Sleep and wake on cpu (CPU), graphs" in " ".join(text.split())
    assert ("two rounds without a sleep" in text) is described
