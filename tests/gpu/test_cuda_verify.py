"""`hal verify` on a real GPU: bit-exact eager and from graphs, and defects that it finds there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hal.core import SleepManager
from hal.core.cli import app
from hal.core.verify.engine import ReferenceEngine
from hal.core.verify.requests import Completion, workload
from support import MIB

pytestmark = pytest.mark.cuda
FEW = ("--platform", "cuda", "--requests", "48", "--cycles", "3")
Make = Callable[..., SleepManager]


def verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the report of a short verification."""
    done = CliRunner().invoke(app, ["verify", *FEW, *arguments, "--json", "-"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_every_case_is_bit_exact(execution: str) -> None:
    status, report = verify("--execution", execution)
    assert status == 0, [case["findings"] for case in report["cases"]]
    assert len(report["cases"]) == 12
    assert sum(case["unstable"] for case in report["cases"]) == 0
    slept = [case["slept_bytes"] for case in report["cases"][1:]]
    assert all(("cudagraph" in tags) is (execution == "graphs") for tags in slept)


GATES = {
    "runtime-in-kv": {"placement", "audit", "contents"},
    "skip-restore": {"contents", "requests"},
    "bit-flip": {"contents", "requests"},
    "bit-flip-file": {"behaviour"},
    "stale-index": {"requests"},
}


@pytest.mark.parametrize("execution", ["eager", "graphs"])
@pytest.mark.parametrize("name", GATES)
def test_a_break_is_caught(name: str, execution: str) -> None:
    status, report = verify("--execution", execution, "--case", "level-1", "--break", name)
    assert status == 1
    found = {finding["gate"] for finding in report["cases"][1]["findings"]}
    assert GATES[name] <= found
    torch.cuda.synchronize()  # no defect may have cost the context


def serve(engine: ReferenceEngine) -> dict[int, Completion]:
    engine.submit(workload(80, engine.config.shape))
    done: dict[int, Completion] = {}
    while engine.unfinished:
        done.update({each.request: each for each in engine.step()})
    return done


def test_replays_give_the_tokens_of_operators(manager: Make) -> None:
    """Tokens, since a library may choose another kernel for a stream that is captured."""
    eager = serve(ReferenceEngine(manager()))
    graphs = serve(ReferenceEngine(manager(), execution="graphs"))
    same = sum(eager[request].tokens == graphs[request].tokens for request in eager)
    assert same >= 0.9 * len(eager)


def test_the_graphs_pool_holds_no_librarys_scratch(manager: Make) -> None:
    sleeper = manager()
    engine = ReferenceEngine(sleeper, execution="graphs")
    held = sum(segment.size for segment in sleeper._pools.segments("cudagraph"))
    assert 0 < held < 32 * MIB, "cuBLAS takes 32 MiB a stream on this chip"
    assert all(
        sleeper.tag_of(entry.tensor) == "cudagraph"
        for name, entry in engine.registered().items()
        if name.startswith("graphs.")
    )
