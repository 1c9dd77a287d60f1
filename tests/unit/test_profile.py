"""Memory profiles: a KV budget that holds, because reserved scratch is in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hal.core import BackupOptions, SleepManager
from hal.core.kernels import dcp_topk
from hal.core.kernels.dcp_topk import dcp_topk_specs, merge_topk_global, reserve_dcp_topk
from hal.core.kernels.scratch import KernelScratch
from hal.core.profile import MemoryProfile, peak_outside_pools, profile_memory
from hal.core.workspace import WorkspaceManager, total_bytes
from hal.cpu.platform import CpuPlatform
from hal.errors import StateError
from support import MIB

K, ROWS = 256, 2048
HIDDEN = 6 * MIB
MERGE = total_bytes(dcp_topk_specs(1, K))


@pytest.fixture
def sleeper() -> Iterator[SleepManager]:
    with SleepManager(CpuPlatform(), backup=BackupOptions(backing="anonymous")) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_topk, "_scratch", KernelScratch("dcp_topk"))


def forward() -> torch.Tensor:
    """A step without the merge: 6 MiB of activations, then the merge's result."""
    hidden = torch.ones(HIDDEN, dtype=torch.uint8)
    del hidden
    return torch.empty(ROWS, K, dtype=torch.int64)


def step(scores: torch.Tensor, indices: torch.Tensor) -> None:
    """The same step on a long prefill, which merges."""
    hidden = torch.ones(HIDDEN, dtype=torch.uint8)
    del hidden
    merge_topk_global(scores, indices, K, None)


def test_memory_is_told_by_what_it_is_for(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"):
        weights = torch.ones(8 * MIB, dtype=torch.uint8)
    with sleeper.pool("runtime"):
        tables = torch.ones(4 * MIB, dtype=torch.uint8)
    with sleeper.pool("kv_cache"):
        cache = torch.ones(16 * MIB, dtype=torch.uint8)
    captured: list[torch.Tensor] = []

    def capture() -> None:
        with sleeper.pool("cudagraph"):
            captured.append(torch.ones(2 * MIB, dtype=torch.uint8))

    found = profile_memory(sleeper, forward, capture=capture)
    assert (found.weights, found.runtime, found.workspace) == (8 * MIB, 4 * MIB, 0)
    assert (found.graphs, found.other_tags, found.pools) == (2 * MIB, 0, 14 * MIB)
    assert HIDDEN <= found.activation < HIDDEN + MIB
    assert found.rest is not None
    del weights, tables, cache


def test_activations_that_are_freed_count_once(sleeper: SleepManager) -> None:
    with peak_outside_pools(sleeper) as peak:
        for _ in range(3):
            torch.ones(MIB, dtype=torch.uint8).view(2, -1).sum()
        kept = torch.ones(2 * MIB, dtype=torch.uint8)
        kept.add_(1)
    assert 2 * MIB <= peak() < 3 * MIB


def budget_and_use(sleeper: SleepManager, *, reserve: bool, graphs: int) -> tuple[bool, bool]:
    """(whether the merge is in the profile, whether a real step stays within the limit)."""
    limit = 64 * MIB
    workspace = WorkspaceManager.of(sleeper)
    if reserve:
        reserve_dcp_topk(workspace, dcp=1, k=K)
    workspace.lock()
    found = profile_memory(sleeper, forward)
    budget = found.kv_budget(limit, graphs=graphs, rest=0)
    scores = torch.randn(ROWS, K)
    indices = torch.arange(K, dtype=torch.int32).expand(ROWS, K)
    with peak_outside_pools(sleeper) as peak:
        step(scores, indices)
    return found.workspace >= MERGE, budget + found.pools + peak() <= limit


@pytest.mark.parametrize("graphs", [0, MERGE + MIB])
@pytest.mark.parametrize("reserve", [True, False])
def test_the_merge_is_in_the_budget_because_it_is_reserved(
    sleeper: SleepManager, reserve: bool, graphs: int
) -> None:
    """An estimate of the graphs that is too large would hide a missing reservation."""
    in_profile, holds = budget_and_use(sleeper, reserve=reserve, graphs=graphs)
    assert in_profile is reserve
    assert holds is (reserve or graphs > MERGE)


def profile_of(**changes: int | str | None) -> MemoryProfile:
    values: dict[str, object] = {
        "weights": 10,
        "runtime": 1,
        "workspace": 2,
        "graphs": 3,
        "other_tags": 4,
        "activation": 5,
        "rest": 6,
    }
    return MemoryProfile(**(values | changes))  # type: ignore[arg-type]


def test_the_budget_is_what_is_left() -> None:
    assert profile_of().needed() == 31
    assert profile_of().kv_budget(100) == 69
    assert profile_of().kv_budget(100, graphs=13) == 59
    assert profile_of().kv_budget(20) == 0


def test_what_could_not_be_measured_is_asked_for() -> None:
    unknown = profile_of(rest=None, rest_reason="no source")
    with pytest.raises(StateError, match="unknown \\(no source\\); give rest="):
        unknown.kv_budget(100)
    assert unknown.kv_budget(100, rest=6) == 69


def test_a_profile_needs_memory_that_is_awake(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"):
        weights = torch.ones(MIB)
    sleeper.sleep()
    with pytest.raises(StateError):
        profile_memory(sleeper, forward)
    sleeper.wake_up()
    del weights
