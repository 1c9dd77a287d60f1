"""Decode steps from graphs: captured once a size, asleep with their pool, and replayed with the
same bits; the graphs are recorded on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hal.core import Policy, SleepManager
from hal.core.report import SleepReport, WakeReport
from hal.core.verify.breaks import choose_break
from hal.core.verify.cases import choose
from hal.core.verify.engine import ReferenceEngine
from hal.core.verify.graphs import GraphRunner, _capture_stream
from hal.core.verify.model import ModelConfig
from hal.core.verify.report import CaseResult, Gate
from hal.core.verify.requests import Completion, workload
from hal.core.verify.runner import run_cases
from hal.core.verify.state import EngineConfig
from hal.core.verify.subject import Setup, Subject
from recorded_graphs import RecordedGraph, RecordingPlatform, recorded_graphs

__all__ = ["recorded_graphs"]

SMALL = EngineConfig(
    model=ModelConfig(
        vocabulary=256, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, mlp=48
    ),
    rows=20,
    prefill_rows=4,
    blocks=80,
)
REQUESTS = workload(24, SMALL.shape)


class Silent:
    """An observer that looks away."""

    def started(self, case: Any) -> None: ...
    def served(self, requests: int) -> None: ...
    def finished(self, result: Any) -> None: ...


@pytest.fixture(autouse=True)
def _quiet(recorded_graphs: type[RecordedGraph]) -> Iterator[None]:
    """One thread, as in a verification, and no stream that another test made."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _capture_stream.cache_clear()
    yield
    _capture_stream.cache_clear()
    torch.set_num_threads(threads)


@pytest.fixture
def setup() -> Setup:
    return Setup(RecordingPlatform(), backing="anonymous", execution="graphs", engine=SMALL)


def run(setup: Setup, subject: type[Subject], *names: str) -> dict[str, CaseResult]:
    results = run_cases(lambda: subject(setup), REQUESTS, choose(names, cycles=2), Silent())
    return {result.name: result for result in results}


def subject_of(
    engine: type[ReferenceEngine] = ReferenceEngine, manager: type[SleepManager] = SleepManager
) -> type[Subject]:
    return type("Changed", (Subject,), {"engine_type": engine, "manager_type": manager})


def serve(setup: Setup, execution: Any) -> dict[int, Completion]:
    sleeper = SleepManager(setup.platform, debug=True)
    engine = ReferenceEngine(sleeper, SMALL, execution=execution)
    engine.submit(REQUESTS)
    done: dict[int, Completion] = {}
    while engine.unfinished:
        done.update({each.request: each for each in engine.step()})
    return done


def test_sizes_double_up_to_all_rows() -> None:
    assert SMALL.decode_sizes == (8, 16, 20)
    assert EngineConfig().decode_sizes == (8, 16, 32, 64)
    assert [SMALL.decode_size(rows) for rows in (1, 8, 9, 17, 20)] == [8, 8, 16, 20, 20]


def test_replays_give_the_bits_of_operators(
    setup: Setup, recorded_graphs: type[RecordedGraph]
) -> None:
    eager = serve(setup, "eager")
    assert recorded_graphs.replays == 0
    assert serve(setup, "graphs") == eager
    assert recorded_graphs.replays > 10


def test_every_case_is_bit_exact_and_the_graphs_pool_sleeps(
    setup: Setup, recorded_graphs: type[RecordedGraph]
) -> None:
    results = run(setup, Subject)
    assert [name for name, result in results.items() if not result.passed] == []
    slept = {name: set(result.slept) for name, result in results.items() if result.slept}
    assert len(slept) == len(results) - 1, "all but the awake case"
    assert all("cudagraph" in tags for tags in slept.values())
    assert recorded_graphs.replays > 100


def test_what_replays_write_is_registered_in_the_graphs_pool(setup: Setup) -> None:
    subject = Subject(setup)
    graphs = {n: e for n, e in subject.engine.registered().items() if n.startswith("graphs.")}
    assert list(graphs) == ["graphs.20", "graphs.16", "graphs.8"], "the largest is captured first"
    assert {entry.tag for entry in graphs.values()} == {"cudagraph"}
    assert {subject.sleeper.tag_of(e.tensor) for e in graphs.values()} == {"cudagraph"}
    del graphs
    subject.close()
    assert setup.platform.device().counters().mapped_bytes == 0


def test_a_graphs_pool_that_loses_its_contents_is_caught(setup: Setup) -> None:
    class Discarding(SleepManager):
        def sleep(self, level: int = 1, *, policy: Any = None, park: bool = False) -> SleepReport:
            offload = dict.fromkeys(("weights", "runtime"), Policy.OFFLOAD)
            discard = dict.fromkeys(("kv_cache", "workspace", "cudagraph"), Policy.DISCARD)
            return super().sleep(policy=offload | discard)

        def wake_up(self, tags: Any = None, **options: Any) -> WakeReport:
            report = super().wake_up(tags, **options)
            self.mark_loaded("cudagraph")  # or the manager itself would refuse the next step
            return report

    level_1 = run(setup, subject_of(manager=Discarding), "level-1")["level-1"]
    found = {f.tensor: f.tag for f in level_1.findings if f.gate is Gate.CONTENTS}
    assert found["graphs.20"] == "cudagraph"


def test_a_graph_that_reads_a_discarded_constant_is_caught(setup: Setup) -> None:
    subject = choose_break("runtime-in-kv").subject
    level_1 = run(setup, subject, "level-1")["level-1"]
    assert {Gate.PLACEMENT, Gate.CONTENTS} <= {finding.gate for finding in level_1.findings}


def test_replays_that_miss_a_write_are_caught(setup: Setup) -> None:
    """A graph that reads another address than the engine writes: here its copy of the rows."""

    class Detached(ReferenceEngine):
        def restart(self) -> None:
            super().restart()
            state = self.runtime
            moved = type(state)(**{**vars(state), "active": torch.zeros_like(state.active)})
            self.runtime = moved

    level_1 = run(setup, subject_of(Detached), "level-1")["level-1"]
    assert {f.gate for f in level_1.findings} >= {Gate.ADDRESS, Gate.REQUESTS}


def test_an_engine_that_cannot_be_captured_is_a_finding(setup: Setup) -> None:
    class ReadsBack(ReferenceEngine):
        def _capture(self) -> GraphRunner:
            def decode(size: int) -> torch.Tensor:
                return self._compute.decode(int(self.runtime.padding_slots[size]))

            return GraphRunner(decode, (8,), self.sleeper, self.device)

    results = run(setup, subject_of(ReadsBack))
    assert list(results) == ["awake"]
    assert results["awake"].findings[0].gate is Gate.BEHAVIOUR
    assert "making the engine raised RuntimeError: not while a graph is captured" in (
        results["awake"].findings[0].text
    )


def test_host_data_in_a_capture_is_refused(setup: Setup) -> None:
    sleeper = SleepManager(setup.platform)

    def function(size: int) -> torch.Tensor:
        return torch.tensor([size])

    with pytest.raises(RuntimeError, match="host data enters the graph"):
        GraphRunner(function, (1,), sleeper, torch.device("cpu"))
