"""The Triton split-KV kernel of `mla_decode`, and its launch.

The KV tiles of all requests stand in one line, which is cut into equal shares, one a program (and
group of heads): so every multiprocessor reads as much as any other, whatever the lengths are, and
the host needs no lengths to launch it. A request that lies within one share is written as it is.
Of one that is cut, each share leaves its normalised part and log-sum-exp in scratch, at most two
parts a share, and a second kernel merges them. Nothing is counted and nothing is read that this
launch has not written, so scratch may hold any bytes before, and is free afterwards.
"""

from __future__ import annotations

# ruff: noqa: N803 - compile-time parameters are in capitals, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.core.kernels.launching import interpreted, multiprocessors, on_device
from hal.core.workspace import TensorSpec
from hal.core.workspace.checked import plain

PARTS = tl.constexpr(2)
"""A share cuts at most the request that it begins in and the one that it ends in."""
LOG2_E = 1.4426950408889634
MERGED = 16, 8
"""Parts that a program of the merge reads at once for one head, or heads part after part."""


# -- shares: `total` tiles in a line, cut into `shares`


@triton.jit
def _tile_counts(seq_lens, batch, TILE: tl.constexpr, ROWS: tl.constexpr):
    """The number of each request, its tiles, and the tiles up to its end, int32 [ROWS]."""
    rows = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < batch, other=0)
    tiles = (tl.maximum(lengths, 0) + TILE - 1) // TILE
    return rows, tiles, tl.cumsum(tiles, 0)


@triton.jit
def _share_count(total, programs):
    """How many shares there are: none is empty, unless all are."""
    return tl.maximum(tl.minimum(total, programs), 1)


@triton.jit
def _share_begin(total, share, shares):
    """The first tile of a share, and so the end of the one before it."""
    return (total.to(tl.int64) * share // shares).to(tl.int32)


@triton.jit
def _share_of(tile, total, shares):
    """The share that a tile lies in."""
    return (((tile + 1).to(tl.int64) * shares - 1) // total).to(tl.int32)


@triton.jit
def _of_row(values, rows, row):
    """One element of a block."""
    return tl.sum(tl.where(rows == row, values, 0), 0)


# -- attention over a run of tiles


@triton.jit
def _page_of(table, token, length, PAGE: tl.constexpr):
    """The page number of each token; 0 beyond the length, where a table may hold anything."""
    return tl.load(table + token // PAGE, mask=token < length, other=0).to(tl.int64)


@triton.jit
def _tokens(first, TILE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """The tokens of a tile whose pages are looked up: its first one where one page holds all."""
    return first if ONE_PAGE else first + tl.arange(0, TILE)


@triton.jit
def _attend(
    query,
    query_head_step,
    table,
    cache,
    page_step,
    token_step,
    first_tile,
    stop_tile,
    length,
    scale,
    heads,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    APART: tl.constexpr,
):
    """Normalised output float32 [HEADS, LATENT] over a request's tiles, and base-2 log-sum-exp."""
    one_page: tl.constexpr = PAGE % TILE == 0
    head = tl.arange(0, HEADS)
    latent = tl.arange(0, LATENT)
    rope = LATENT + tl.arange(0, ROPE)
    own = query + head[:, None] * query_head_step
    is_head = head[:, None] < heads
    query_latent = tl.load(own + latent[None, :], mask=is_head, other=0.0)
    query_rope = tl.load(own + rope[None, :], mask=is_head, other=0.0)

    largest = tl.full([HEADS], -float("inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    output = tl.zeros([HEADS, LATENT], tl.float32)
    page = _page_of(table, _tokens(first_tile * TILE, TILE, one_page), length, PAGE)
    for tile in range(first_tile, stop_tile):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < length
        at = cache + page * page_step + (token % PAGE) * token_step
        # What lies beyond the length may be NaN, and 0 times NaN is not 0: it is not loaded.
        context = tl.load(at[:, None] + latent[None, :], mask=inside[:, None], other=0.0)
        position = tl.load(at[:, None] + rope[None, :], mask=inside[:, None], other=0.0)
        page = _page_of(table, _tokens((tile + 1) * TILE, TILE, one_page), length, PAGE)

        if APART:
            # The branch is always taken. Where the compiler sees that one product feeds another, it
            # lets every group of warps compute all scores, instead of a part each.
            scores = tl.broadcast_to(largest[:, None], [HEADS, TILE])
            if tile * TILE < length:
                scores = tl.dot(query_latent, context.T) * scale
                scores += tl.dot(query_rope, position.T) * scale
        else:
            scores = tl.dot(query_rope, position.T, tl.dot(query_latent, context.T)) * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - higher)
        share = tl.exp2(scores - higher[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        output = tl.dot(share.to(context.dtype), context, output * shrink[:, None])
        largest = higher
    return output / weight[:, None], largest + tl.log2(weight)


@triton.jit
def mla_decode_kernel(
    query,
    query_row_step,
    query_head_step,
    cache,
    page_step,
    token_step,
    tables,
    table_step,
    seq_lens,
    out,
    out_row_step,
    out_head_step,
    lse,
    parts,
    part_lse,
    scale,
    lse_unit,
    batch,
    heads,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    LSE: tl.constexpr,
    APART: tl.constexpr,
):
    """A share of the tiles, for one group of heads; `scale` includes log2(e)."""
    group, share = tl.program_id(0), tl.program_id(1)
    groups = tl.num_programs(0)
    rows, tiles, ends = _tile_counts(seq_lens, batch, TILE, ROWS)
    total = tl.sum(tiles, 0)
    shares = _share_count(total, tl.num_programs(1))
    begin = _share_begin(total, share, shares)
    end = tl.where(share < shares, _share_begin(total, share + 1, shares), begin)
    head = group * HEADS + tl.arange(0, HEADS)
    latent = tl.arange(0, LATENT)[None, :]
    at = begin
    while at < end:
        row = tl.sum((ends <= at).to(tl.int32), 0)
        row_end = _of_row(ends, rows, row)
        row_begin = row_end - _of_row(tiles, rows, row)
        stop = tl.minimum(end, row_end)
        number = row.to(tl.int64)
        output, logs = _attend(
            query + number * query_row_step + group * HEADS * query_head_step,
            query_head_step,
            tables + number * table_step,
            cache,
            page_step,
            token_step,
            at - row_begin,
            stop - row_begin,
            tl.load(seq_lens + row),
            scale,
            heads - group * HEADS,
            HEADS,
            TILE,
            PAGE,
            LATENT,
            ROPE,
            APART,
        )
        if (at == row_begin) & (stop == row_end):
            to = out + number * out_row_step + head[:, None] * out_head_step + latent
            tl.store(to, output.to(out.dtype.element_ty), mask=head[:, None] < heads)
            if LSE:
                tl.store(lse + number * heads + head, logs * lse_unit, mask=head < heads)
        else:
            part = share * PARTS + (at != begin).to(tl.int32)
            place = (part * groups * HEADS + head).to(tl.int64)
            tl.store(parts + place[:, None] * LATENT + latent, output)
            tl.store(part_lse + place, logs)
        at = stop


# -- the merge of requests that lie in several shares


@triton.jit
def mla_merge_kernel(
    seq_lens,
    out,
    out_row_step,
    out_head_step,
    lse,
    parts,
    part_lse,
    lse_unit,
    batch,
    heads,
    padded_heads,
    programs,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    LSE: tl.constexpr,
):
    """One request and a few heads, BLOCK parts at once; a request without a token is 0, and -inf
    its log-sum-exp.
    """
    row = tl.program_id(0)
    rows, tiles, ends = _tile_counts(seq_lens, batch, TILE, ROWS)
    total = tl.sum(tiles, 0)
    row_end = _of_row(ends, rows, row)
    row_begin = row_end - _of_row(tiles, rows, row)
    is_empty = row_begin == row_end
    shares = _share_count(total, programs)
    safe_total = tl.maximum(total, 1)
    first = _share_of(row_begin, safe_total, shares)
    last = _share_of(row_end - 1, safe_total, shares)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    latent = tl.arange(0, LATENT)
    # One share holds the whole: it has written it.
    if is_empty | (first != last):
        largest = tl.full([HEADS], -float("inf"), tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        output = tl.zeros([HEADS, LATENT], tl.float32)
        for block in range(first, tl.where(is_empty, first, last + 1), BLOCK):
            share = block + tl.arange(0, BLOCK)
            is_there = (share <= last)[:, None]
            cut_before = row_begin > _share_begin(total, share, shares)
            part = share * PARTS + cut_before.to(tl.int32)
            place = part.to(tl.int64)[:, None] * padded_heads + head[None, :]
            logs = tl.load(part_lse + place, mask=is_there, other=-float("inf"))
            at = parts + place[:, :, None] * LATENT + latent[None, None, :]
            values = tl.load(at, mask=is_there[:, :, None], other=0.0)
            higher = tl.maximum(largest, tl.max(logs, 0))
            shrink = tl.exp2(largest - higher)
            grown = tl.exp2(logs - higher[None, :])
            weight = weight * shrink + tl.sum(grown, 0)
            output = output * shrink[:, None] + tl.sum(values * grown[:, :, None], 0)
            largest = higher
        weight = tl.where(is_empty, 1.0, weight)
        output = output / weight[:, None]
        logs = largest + tl.log2(weight)
        number = row.to(tl.int64)
        to = out + number * out_row_step + head[:, None] * out_head_step + latent[None, :]
        tl.store(to, output.to(out.dtype.element_ty), mask=head[:, None] < heads)
        if LSE:
            tl.store(lse + number * heads + head, logs * lse_unit, mask=head < heads)


# -- launch


@dataclass(frozen=True)
class Shape:
    """How a launch works: heads a program and tokens a tile, programs that share a multiprocessor,
    warps, stages of the loads, and whether groups of warps compute scores apart.
    """

    heads: int
    tile: int
    sharing: int
    warps: int
    stages: int
    apart: bool = False

    def groups(self, heads: int) -> int:
        """Programs that read the same context, each for heads of its own."""
        return -(-heads // self.heads)

    def shares(self, heads: int, device: torch.device) -> int:
        """Parts that the context of a batch is cut into: all programs run at once."""
        return max(1, self.sharing * multiprocessors(device) // self.groups(heads))


def shape_of(heads: int) -> Shape:
    """64 heads fill the tensor cores, and a multiprocessor's memory with their queries and two
    tiles; fewer wait for memory, so two programs share a multiprocessor.
    """
    if interpreted():
        return Shape(16, tile=16, sharing=1, warps=4, stages=1)
    if heads > 32:
        return Shape(64, tile=64, sharing=1, warps=8, stages=2)
    return Shape(16 if heads <= 16 else 32, tile=32, sharing=2, warps=4, stages=3)


def part_specs(
    heads: int, latent: int, device: torch.device, shape: Shape | None = None
) -> tuple[TensorSpec, TensorSpec]:
    """The scratch of a launch, for any batch: parts float32 and their log-sum-exps."""
    shape = shape or shape_of(heads)
    size = (shape.shares(heads, device), int(PARTS.value), shape.groups(heads) * shape.heads)
    return TensorSpec((*size, latent), torch.float32), TensorSpec(size, torch.float32)


def launch(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    lse_unit: float,
    parts: Tensor,
    part_lse: Tensor,
    shape: Shape | None = None,
) -> None:
    """Write out, and lse in units of `lse_unit` a bit if there is one; `parts` as `part_specs`."""
    batch, heads, _ = query.shape
    latent = out.shape[2]
    shape = shape or shape_of(heads)
    shares, groups = shape.shares(heads, out.device), shape.groups(heads)
    parts, part_lse = plain(parts), plain(part_lse)
    rows = max(16, triton.next_power_of_2(batch))
    # A few long requests have many parts each, and heads enough for all multiprocessors.
    block, merged_heads = (MERGED[0], 1) if shares > batch * MERGED[1] else (1, MERGED[1])
    with on_device(out.device):
        mla_decode_kernel[(groups, shares)](
            query,
            query.stride(0),
            query.stride(1),
            cache,
            cache.stride(0),
            cache.stride(1),
            tables,
            tables.stride(0),
            seq_lens,
            out,
            out.stride(0),
            out.stride(1),
            part_lse if lse is None else lse,
            parts,
            part_lse,
            scale * LOG2_E,
            lse_unit,
            batch,
            heads,
            HEADS=shape.heads,
            TILE=shape.tile,
            PAGE=cache.shape[1],
            LATENT=latent,
            ROPE=query.shape[2] - latent,
            ROWS=rows,
            LSE=lse is not None,
            APART=shape.apart,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        mla_merge_kernel[(batch, -(-heads // merged_heads))](
            seq_lens,
            out,
            out.stride(0),
            out.stride(1),
            part_lse if lse is None else lse,
            parts,
            part_lse,
            lse_unit,
            batch,
            heads,
            groups * shape.heads,
            shares,
            BLOCK=block,
            HEADS=merged_heads,
            TILE=shape.tile,
            LATENT=latent,
            ROWS=rows,
            LSE=lse is not None,
            num_warps=4,
        )
