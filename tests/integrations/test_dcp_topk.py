"""Merges across ranks, over real process groups of two and four."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import dcp_ranks
from hal.core.kernels.dcp_topk import dcp_topk_specs, merge_topk_global
from hal.core.workspace import WorkspaceManager, total_bytes
from hal.errors import InvalidArgument

Outcomes = dict[str, list[str]]
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four processes have written how each scenario ended."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(dcp_ranks.main, (str(folder),), nprocs=dcp_ranks.WORLD)
    return folder


@pytest.fixture(params=[2, 4])
def outcomes(request: pytest.FixtureRequest, folder: Path) -> Outcomes:
    """How each scenario ended on each rank of a group of two or four."""
    world = request.param
    each = [json.loads(Path(folder, f"{world}-{rank}.json").read_text()) for rank in range(world)]
    return {name: [outcome[name] for outcome in each] for name in each[0]}


def require_done(outcomes: Outcomes, scenario: str) -> None:
    assert set(outcomes[scenario]) == {"done"}, "\n".join(outcomes[scenario])


def test_the_merge_is_the_top_k_of_everything(outcomes: Outcomes) -> None:
    require_done(outcomes, "merge_is_the_top_k_of_everything")


def test_the_merge_does_not_depend_on_the_ranks(outcomes: Outcomes) -> None:
    require_done(outcomes, "merge_does_not_depend_on_the_ranks")


def test_the_merge_stays_within_its_reservation(outcomes: Outcomes) -> None:
    require_done(outcomes, "merge_stays_within_its_reservation")


def test_prefill_shares_one_request_with_the_gathered_keys(outcomes: Outcomes) -> None:
    require_done(outcomes, "prefill_shares_one_request_with_the_gathered_keys")


def test_r127_a_rank_without_kv_returns_the_merged_rows(outcomes: Outcomes) -> None:
    require_done(outcomes, "r127_a_rank_without_kv_returns_the_merged_rows")


def test_r124_an_empty_shard_weighs_exactly_nothing(outcomes: Outcomes) -> None:
    require_done(outcomes, "r124_an_empty_shard_weighs_exactly_nothing")


def test_too_few_candidates_leave_empty_places(outcomes: Outcomes) -> None:
    require_done(outcomes, "too_few_candidates_leave_empty_places")


def test_indices_travel_as_bits(outcomes: Outcomes) -> None:
    require_done(outcomes, "indices_travel_as_bits")


def test_the_scratch_is_bounded_whatever_the_batch() -> None:
    assert total_bytes(dcp_topk_specs(4, 2048)) == 144 * MIB
    assert total_bytes(dcp_topk_specs(4, 2048, rows=8192)) == 144 * MIB
    assert total_bytes(dcp_topk_specs(4, 2048, rows=16)) < 3 * MIB


def test_the_merge_alone_uses_a_workspace_that_is_given() -> None:
    workspace = WorkspaceManager("cpu")
    merged = merge_topk_global(
        torch.tensor([[1.0, 3.0, 3.0]]),
        torch.tensor([[4, 9, 2]], dtype=torch.int32),
        2,
        None,
        workspace=workspace,
    )
    assert merged.indices.tolist() == [[2, 9]]
    assert merged.scores.tolist() == [[3.0, 3.0]]
    assert workspace.report().slots[0].high_water_owner == "dcp_topk"


@pytest.mark.parametrize(
    ("scores", "indices", "k"),
    [
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.int32), 4),
        (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int32), 4),
        (torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32), 5),
        (torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32), 0),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    scores: torch.Tensor, indices: torch.Tensor, k: int
) -> None:
    with pytest.raises(InvalidArgument):
        merge_topk_global(scores, indices, k, None)


def test_scratch_that_is_too_small_is_refused() -> None:
    small = [torch.empty(spec.shape, dtype=spec.dtype) for spec in dcp_topk_specs(1, 4, rows=1)]
    with pytest.raises(InvalidArgument, match="dcp_topk_specs"):
        merge_topk_global(
            torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32), 4, None, scratch=small
        )
