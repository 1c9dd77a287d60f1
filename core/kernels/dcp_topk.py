"""The merge of every rank's local top-k into the global one, under decode-context parallelism.

Each rank scores the part of the context that it holds. A token of the global top-k is in the top-k
of the rank that holds it, so the ranks exchange their candidates alone. A candidate is one int64
whose order is the order of selection: the score's bits, made monotonic, above the complement of the
index. So the lowest global index wins a tie, no two candidates are equal, and the result depends
neither on the number of ranks nor on how the context is spread over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hal.core.kernels.gather import all_gather
from hal.core.kernels.scratch import KernelScratch
from hal.core.workspace import TensorSpec, WorkspaceManager
from hal.errors import InvalidArgument

CHUNK_ROWS = 1024
"""Rows that are merged at a time: what bounds the scratch."""
EMPTY = torch.iinfo(torch.int64).min
"""The candidate of no token, below every other."""
_LOW_BITS = (1 << 32) - 1
_scratch = KernelScratch("dcp_topk")


class TopK(NamedTuple):
    """The k best candidates of each row in order; places without a token hold -inf and -1.

    scores: float32 [T, k]; indices: int32 [T, k], global.
    """

    scores: Tensor
    indices: Tensor


def dcp_topk_specs(dcp: int, k: int, rows: int = CHUNK_ROWS) -> tuple[TensorSpec, ...]:
    """The scratch of a merge: (1 + 2 * dcp) * 8 * min(rows, 1024) * k bytes.

    One unit for packing, then the gathered candidates rank by rank and row by row.
    """
    unit = (min(rows, CHUNK_ROWS), k)
    gathered = (dcp, *unit)
    int64 = torch.int64
    return TensorSpec(unit, int64), TensorSpec(gathered, int64), TensorSpec(gathered, int64)


def reserve_dcp_topk(workspace: WorkspaceManager, *, dcp: int, k: int) -> int:
    """Reserve the scratch of merges with up to 1024 rows at a time; returns its bytes."""
    return _scratch.reserve(workspace, *dcp_topk_specs(dcp, k))


def merge_topk_global(
    local_scores: Tensor,
    local_indices: Tensor,
    k: int,
    group: dist.ProcessGroup | None,
    *,
    scratch: Sequence[Tensor] | None = None,
    workspace: WorkspaceManager | None = None,
) -> TopK:
    """The global top-k of rows whose candidates lie on the ranks of `group`; the same on each.

    local_scores: float32 [T, K]; local_indices: int32 or int64 [T, K], global, negative for no
    candidate, whose score is not looked at. A NaN counts as -inf. `group` None: this process alone.
    Every rank calls with the same T, K and k. `scratch` is what the caller requested for
    `dcp_topk_specs` together with scratch that stays in use across the merge; else it comes from
    `workspace`, the reservation of the device, or a buffer of the kernel's own.
    """
    rows, width = local_scores.shape
    dcp = dist.get_world_size(group) if group is not None else 1
    _check(local_scores, local_indices, k, dcp)
    specs = dcp_topk_specs(dcp, width, rows)
    if scratch is None:
        inputs = (local_scores, local_indices)
        scratch = _scratch.take(local_scores.device, *specs, workspace=workspace, inputs=inputs)
    buffers = [_flat(buffer, spec) for buffer, spec in zip(scratch, specs, strict=True)]
    out = TopK(local_scores.new_empty(rows, k), local_indices.new_empty(rows, k, dtype=torch.int32))
    for start in range(0, rows, CHUNK_ROWS):
        part = slice(start, min(start + CHUNK_ROWS, rows))
        merged = TopK(out.scores[part], out.indices[part])
        _merge_chunk(local_scores[part], local_indices[part], group, dcp, buffers, merged)
    return out


def _check(scores: Tensor, indices: Tensor, k: int, dcp: int) -> None:
    if scores.shape != indices.shape or scores.dtype != torch.float32:
        raise InvalidArgument(
            f"scores are {scores.dtype} {list(scores.shape)} and indices {list(indices.shape)}; "
            "give float32 scores and indices of one shape [T, K]"
        )
    if not 1 <= k <= dcp * scores.shape[1]:
        raise InvalidArgument(
            f"k={k} of {dcp} ranks with {scores.shape[1]} candidates each; use a k that they have"
        )


def _flat(buffer: Tensor, spec: TensorSpec) -> Tensor:
    if buffer.dtype != spec.dtype or buffer.nbytes < spec.bytes or not buffer.is_contiguous():
        raise InvalidArgument(
            f"scratch of {buffer.nbytes} bytes ({buffer.dtype}) is given where dcp_topk_specs() "
            f"asks for contiguous {spec.dtype} {list(spec.shape)}"
        )
    return buffer.view(-1)


def _merge_chunk(
    scores: Tensor,
    indices: Tensor,
    group: dist.ProcessGroup | None,
    dcp: int,
    buffers: Sequence[Tensor],
    out: TopK,
) -> None:
    """Merge up to 1024 rows, within the three flat buffers of `dcp_topk_specs`."""
    rows, width = scores.shape
    spare, gathered, by_row = buffers
    by_rank = gathered[: dcp * rows * width].view(dcp, rows, width)
    own = by_rank[dist.get_rank(group) if group is not None else 0]
    _pack(scores, indices, own, spare)
    if group is not None:
        all_gather(by_rank, own, group)
    candidates = by_row[: dcp * rows * width].view(rows, dcp, width)
    candidates.copy_(by_rank.transpose(0, 1))
    places = _room(spare, out.indices.numel()).view(out.indices.shape)
    best = _room(gathered, out.indices.numel()).view(out.indices.shape)
    torch.topk(candidates.view(rows, dcp * width), out.indices.shape[1], dim=1, out=(best, places))
    _unpack(best, places, by_row, out)


def _room(buffer: Tensor, count: int) -> Tensor:
    """`count` elements of a buffer, or new ones where k is larger than what a rank brings."""
    return buffer[:count] if count <= buffer.numel() else buffer.new_empty(count)


def _pack(scores: Tensor, indices: Tensor, out: Tensor, spare: Tensor) -> None:
    """Candidates int64 [rows, K] of scores and indices, without memory beyond the spare unit."""
    shape, count = scores.shape, scores.numel()
    words = spare.view(torch.int32)
    ordered = torch.add(scores, 0.0, out=words[:count].view(torch.float32).view(shape))  # -0 is 0
    ordered.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits, sign = words[:count].view(shape), words[count : 2 * count].view(shape)
    _flip_negative(bits, sign)
    out.copy_(bits).bitwise_left_shift_(32).add_(_LOW_BITS).sub_(indices)
    empty = spare.view(torch.bool)[:count].view(shape)
    out.masked_fill_(torch.lt(indices, 0, out=empty), EMPTY)


def _flip_negative(bits: Tensor, spare: Tensor) -> None:
    """Between a float's bits and an int32 of the same order, in place; its own inverse."""
    torch.bitwise_right_shift(bits, 31, out=spare)
    bits.bitwise_xor_(spare.bitwise_and_(torch.iinfo(torch.int32).max))


def _unpack(best: Tensor, spare: Tensor, spare_words: Tensor, out: TopK) -> None:
    """Scores and indices of candidates [rows, k]; both spares have at least as many elements."""
    shape, count = best.shape, best.numel()
    out.indices.copy_(torch.bitwise_and(best, _LOW_BITS, out=spare).neg_().add_(_LOW_BITS))
    empty = torch.eq(best, EMPTY, out=spare.view(-1).view(torch.bool)[:count].view(shape))
    words = spare_words.view(torch.int32)
    bits, sign = words[:count].view(shape), words[count : 2 * count].view(shape)
    bits.copy_(best.bitwise_right_shift_(32))
    _flip_negative(bits, sign)
    out.scores.copy_(bits.view(torch.float32)).masked_fill_(empty, -torch.inf)
    out.indices.masked_fill_(empty, -1)
