"""What each rank does in the tests of merges across ranks: a module, so that spawned processes can
import it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hal.core.kernels.dcp_topk import dcp_topk_specs, merge_topk_global, reserve_dcp_topk
from hal.core.kernels.lse import LogBase, merge_attention_across
from hal.core.workspace import TensorSpec, WorkspaceManager

K = 32
ROWS = 2 * 1024 + 5


def expected(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k of whole rows: the largest scores, the lowest index first among equals."""
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    return order.values[:, :k], order.indices[:, :k].to(torch.int32)


def candidates(scores: Tensor, columns: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A rank's local top-k over its columns, with global indices; -1 and NaN where it has none."""
    values, indices = torch.full((len(scores), k), torch.nan), torch.full((len(scores), k), -1)
    own = torch.sort(scores[:, columns], dim=1, descending=True, stable=True)
    count = min(k, len(columns))
    values[:, :count] = own.values[:, :count]
    indices[:, :count] = columns[own.indices[:, :count]]
    return values, indices.to(torch.int32)


def whole(columns: int, rows: int = ROWS, seed: int = 7) -> Tensor:
    """Scores of a context on every rank alike, with many ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 40, (rows, columns), generator=generator).float() / 8


class _NewBytes(TorchDispatchMode):
    """Counts the bytes of storages that appear."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = {
            address: size for address, size in _storages(result).items() if address not in known
        }
        self.total += sum(made.values())
        return result


def _storages(values: Any) -> dict[int, int]:
    """The storages of all tensors in a structure: address -> bytes."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    found = [leaf.untyped_storage() for leaf in leaves]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def merge_is_the_top_k_of_everything(group: dist.ProcessGroup) -> None:
    """Rows of two whole chunks and five more; the context dealt out in turns."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    scores = whole(96)
    local = candidates(scores, torch.arange(rank, 96, world), K)
    merged = merge_topk_global(*local, K, group)
    values, indices = expected(scores, K)
    assert torch.equal(merged.indices, indices)
    assert torch.equal(merged.scores, values)


def merge_does_not_depend_on_the_ranks(group: dist.ProcessGroup) -> None:
    """One rank alone, and every rank of the group, find the same."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    scores = whole(96, rows=64)
    alone = merge_topk_global(*candidates(scores, torch.arange(96), K), K, None)
    blocks = torch.arange(96).chunk(world)
    merged = merge_topk_global(*candidates(scores, blocks[rank], K), K, group)
    assert torch.equal(alone.indices, merged.indices)
    assert torch.equal(alone.scores, merged.scores)


def merge_stays_within_its_reservation(group: dist.ProcessGroup) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    workspace = WorkspaceManager("cpu", debug=True)
    size = reserve_dcp_topk(workspace, dcp=world, k=K)
    assert size <= (1 + 2 * world) * 8 * 1024 * K
    workspace.lock()
    scores = whole(96)
    local = candidates(scores, torch.arange(rank, 96, world), K)
    with _NewBytes() as made:
        merged = merge_topk_global(*local, K, group)
    assert made.total == ROWS * K * 8, "memory beyond the reservation and the result"
    assert torch.equal(merged.indices, expected(scores, K)[1])
    assert workspace.report().slots[0].bytes == size
    assert not workspace.findings


def prefill_shares_one_request_with_the_gathered_keys(group: dist.ProcessGroup) -> None:
    """The keys stay live across chunks, so the merge's scratch is part of the same request."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    workspace = WorkspaceManager("cpu", debug=True)
    keys, *scratch = workspace.get_simultaneous(
        TensorSpec((4096, 64), torch.uint8), *dcp_topk_specs(world, K), owner="prefill"
    )
    keys.fill_(rank + 1)
    scores = whole(96)
    for part in scores.split(1500):
        local = candidates(part, torch.arange(rank, 96, world), K)
        merged = merge_topk_global(*local, K, group, scratch=scratch)
        assert torch.equal(merged.indices, expected(part, K)[1])
    assert bool((keys == rank + 1).all())
    assert not workspace.findings


def r127_a_rank_without_kv_returns_the_merged_rows(group: dist.ProcessGroup) -> None:
    """Rank 0 alone has eight candidates; the others have none, and NaN for scores."""
    rank = dist.get_rank(group)
    scores = whole(8, rows=3)
    columns = torch.arange(8) if rank == 0 else torch.arange(0)
    merged = merge_topk_global(*candidates(scores, columns, 8), 8, group)
    values, indices = expected(scores, 8)
    assert torch.equal(merged.indices, indices)
    assert torch.equal(merged.scores, values)


def too_few_candidates_leave_empty_places(group: dist.ProcessGroup) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    scores = whole(2, rows=3)
    columns = torch.arange(2) if rank == world - 1 else torch.arange(0)
    merged = merge_topk_global(*candidates(scores, columns, 8), 8, group)
    assert torch.equal(merged.indices[:, :2], expected(scores, 2)[1])
    assert merged.indices[:, 2:].eq(-1).all()
    assert merged.scores[:, 2:].isneginf().all()


def indices_travel_as_bits(group: dist.ProcessGroup) -> None:
    """Global indices that float32 cannot hold, and scores that float32 orders unlike integers."""
    rank = dist.get_rank(group)
    large = torch.iinfo(torch.int32).max
    scores = torch.tensor([[-0.0, 0.0, -torch.inf, torch.nan]]) if rank == 0 else torch.zeros(1, 4)
    indices = torch.tensor([[large - 1, large, 5, 6]]) if rank == 0 else torch.full((1, 4), -1)
    merged = merge_topk_global(scores, indices.int(), 4, group)
    assert merged.indices.tolist() == [[large - 1, large, 5, 6]], "-0 equals 0, NaN equals -inf"


def r124_an_empty_shard_weighs_exactly_nothing(group: dist.ProcessGroup) -> None:
    """A context of two tokens: where there are more ranks, they have none and write NaN."""
    rank = dist.get_rank(group)
    keys = torch.tensor([0.25, -1.5])[:, None, None].expand(2, 5, 3)
    values = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(3))
    share = keys.softmax(0)
    if rank < 2:
        output, lse = values[rank], keys[rank].clone()
    else:
        output, lse = torch.full((5, 3, 8), torch.nan), torch.zeros(5, 3)
    empty = torch.full((5, 3), rank >= 2)
    merged, total = merge_attention_across(output, lse, group, base=LogBase.E, empty=empty)
    torch.testing.assert_close(merged, (share.unsqueeze(-1) * values).sum(0))
    torch.testing.assert_close(total, keys.logsumexp(0))


SCENARIOS: tuple[Callable[[dist.ProcessGroup], None], ...] = (
    merge_is_the_top_k_of_everything,
    merge_does_not_depend_on_the_ranks,
    prefill_shares_one_request_with_the_gathered_keys,
    r127_a_rank_without_kv_returns_the_merged_rows,
    too_few_candidates_leave_empty_places,
    indices_travel_as_bits,
    r124_an_empty_shard_weighs_exactly_nothing,
    merge_stays_within_its_reservation,  # the last: from then on the reservation serves
)
WORLD = 4


def main(rank: int, folder: str) -> None:
    """Run every scenario on four ranks and on the first two, and write how each ended."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    groups = {WORLD: dist.new_group(range(WORLD)), 2: dist.new_group(range(2))}
    for world, group in groups.items():
        if rank < world:
            outcomes = {scenario.__name__: _outcome(scenario, group) for scenario in SCENARIOS}
            Path(folder, f"{world}-{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


def _outcome(scenario: Callable[[dist.ProcessGroup], None], group: dist.ProcessGroup) -> str:
    try:
        scenario(group)
    except BaseException:  # noqa: BLE001 - reported to the test, which runs in another process
        return traceback.format_exc()
    return "done"
