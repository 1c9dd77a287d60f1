"""The Triton kernel of `topk_topp`: one program a row, exact, with few passes over the logits.

A strided sample of the row suggests a threshold. One pass collects what lies above it, a few
hundred logits for a usual top-k, and the search for the exact threshold runs over these alone.
Without a top-k, two thresholds that enclose the end of the nucleus for certain are found first,
from the mass above a few pivots; a second pass weighs the row and collects what lies between the
two. Where the sample misled, or there is too much to collect, the search runs over the whole row:
slower, and as exact.
"""

from __future__ import annotations

# ruff: noqa: N803 - compile-time parameters are in capitals, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
import triton
import triton.language as tl

from hal.core.kernels.topk_topp_passes import (
    Lists,
    collect,
    draw_in_row,
    enclose,
    mask_listed,
    mask_row,
    sample_of,
    sample_threshold,
    weigh,
    write_listed,
)
from hal.core.kernels.topk_topp_search import (
    LOWEST,
    UNIT,
    Candidates,
    Row,
    find_cut,
    find_index,
    key_of,
    last_tie_of,
    scalar,
    share_of,
    ties_needed,
    value_of,
    weigh_above,
    weight_of,
)

COUNTER_WORDS = tl.constexpr(32)
"""Scratch before a program's lists: its counter, on a cache line of its own."""


@triton.jit
def _candidates(row, lists, count, listed):
    """What to search: the list where it is complete, else the whole row."""
    if listed:  # noqa: SIM108 - Triton knows no conditional pointers
        start = lists.logits
    else:
        start = row.start
    step = tl.where(listed, 1, row.step)
    return Candidates(start, step, tl.where(listed, count, row.count), lists.indices, listed)


@triton.jit
def _top_k_row(
    row,
    k,
    parts,
    draw,
    token,
    lists,
    HAS_P: tl.constexpr,
    DRAW: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Top-k, then top-p on what remains; masks the row, or draws a token from what is kept."""
    sample, sampled = sample_of(row, SAMPLE)
    expected = k * (sampled / row.count)
    rank = (expected + 4.0 * tl.sqrt(expected) + 6.0).to(tl.int32)
    low = sample_threshold(sample, rank)
    count, top = collect(row, low, lists, TILE)
    if (count < k) & (low > LOWEST):  # the sample misled: once more, with much to spare
        low = sample_threshold(sample, 4 * rank + 64)
        count, top = collect(row, low, lists, TILE)
    listed = (count <= lists.room) & ((count >= k) | (low <= LOWEST))
    low = tl.where(listed, low, LOWEST)
    source = _candidates(row, lists, count, listed)

    no_bound = scalar(float("inf"))
    target = k.to(tl.int64)
    zero, high = target * 0, key_of(top)
    cut_key, above = find_cut(
        source, key_of(low), high, zero, target, no_bound, top, False, LIST_TILE
    )
    cut = value_of(cut_key)
    needed = target - above
    mass_above, ties = weigh_above(source, cut, no_bound, top, LIST_TILE)
    if HAS_P:  # noqa: SIM102 - known when compiling, unlike the other
        if parts < UNIT:
            mass = mass_above + tl.minimum(needed, ties) * weight_of(cut, top)
            target = tl.maximum(share_of(mass, parts), 1)
            p_key, above = find_cut(
                source, cut_key, high, zero, target, no_bound, top, True, LIST_TILE
            )
            p_needed = ties_needed(target, above, value_of(p_key), top)
            needed = tl.where(p_key > cut_key, p_needed, tl.minimum(needed, p_needed))
            cut = value_of(p_key)
            mass_above, ties = weigh_above(source, cut, no_bound, top, LIST_TILE)
    last_tie = last_tie_of(source, row.count, cut, needed, ties, top, LIST_TILE)
    if DRAW:
        mass = mass_above + tl.minimum(needed, ties) * weight_of(cut, top)
        target = share_of(mass, draw) + 1
        if listed:
            drawn = find_index(source, row.count, cut, last_tie, top, target, True, LIST_TILE)
        else:
            drawn = draw_in_row(row, cut, last_tie, top, target, TILE)
        tl.store(token, tl.where(mass > 0, drawn, 0))
    elif listed:
        write_listed(row, source, cut, last_tie, TILE, LIST_TILE)
    else:
        mask_row(row, cut, last_tie, TILE)


@triton.jit
def _top_p_row(
    row,
    p,
    parts,
    draw,
    token,
    lists,
    DRAW: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Top-p of a whole row; masks it, or draws a token from what is kept."""
    low, below, top = enclose(row, p, lists.room, SAMPLE, TILE)
    whole, base, count = weigh(row, low, below, top, lists, not DRAW, TILE)
    listed = count <= lists.room
    source = _candidates(row, lists, count, listed)
    target = tl.maximum(share_of(whole, parts), 1)
    high = tl.minimum(key_of(top), key_of(below) - 1)
    cut_key, above = find_cut(source, key_of(low), high, base, target, below, top, True, LIST_TILE)
    cut = value_of(cut_key)
    needed = ties_needed(target, above, cut, top)
    mass_above, ties = weigh_above(source, cut, below, top, LIST_TILE)
    last_tie = last_tie_of(source, row.count, cut, needed, ties, top, LIST_TILE)
    if DRAW:
        mass = base + mass_above + tl.minimum(needed, ties) * weight_of(cut, top)
        drawn = draw_in_row(row, cut, last_tie, top, share_of(mass, draw) + 1, TILE)
        tl.store(token, tl.where(mass > 0, drawn, 0))
    elif listed:
        mask_listed(row, source, cut, last_tie, LIST_TILE)
    else:
        mask_row(row, cut, last_tie, TILE)


@triton.jit
def _draw_of_all(row, draw, token, lists, TILE: tl.constexpr):
    """Draw a token from a row that nothing is removed from."""
    none = scalar(float("inf"))
    _, top = collect(row, none, lists, TILE)
    whole, _, _ = weigh(row, none, none, top, lists, False, TILE)
    drawn = draw_in_row(row, LOWEST, row.count, top, share_of(whole, draw) + 1, TILE)
    tl.store(token, tl.where(whole > 0, drawn, 0))


@triton.jit
def top_k_top_p_kernel(
    logits,
    row_step,
    step,
    k_of_rows,
    p_of_rows,
    draws,
    tokens,
    scratch,
    scratch_step,
    rows,
    vocabulary,
    room,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    DRAW: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Rows of float32 logits, several programs in turn: masked in place, or with DRAW a token each.

    scratch: int32, `scratch_step` a program: the counter's line, then lists of `room` groups,
    indices and values.
    """
    program = tl.program_id(0)
    counter = scratch + program.to(tl.int64) * scratch_step
    groups = counter + COUNTER_WORDS
    indices = groups + room
    listed = (indices + room).to(tl.pointer_type(tl.float32), bitcast=True)
    lists = Lists(counter, groups, indices, listed, room)
    tl.store(counter, 0)
    for number in range(program, rows, tl.num_programs(0)):
        tl.debug_barrier()  # the row before may still read the list
        start = logits + number * tl.cast(row_step, tl.int64)
        row, token = Row(start, step, vocabulary), tokens + number
        k = vocabulary
        if HAS_K:
            asked = tl.load(k_of_rows + number)
            k = tl.where((asked > 0) & (asked < vocabulary), asked, vocabulary).to(tl.int32)
        p = scalar(1.0)
        if HAS_P:
            p = tl.minimum(tl.maximum(tl.load(p_of_rows + number), 0.0), 1.0)
        parts = (p * UNIT).to(tl.int64)
        draw = parts * 0
        if DRAW:
            draw = tl.load(draws + number)
        if k < vocabulary:
            _top_k_row(row, k, parts, draw, token, lists, HAS_P, DRAW, SAMPLE, TILE, LIST_TILE)
        elif parts < UNIT:
            _top_p_row(row, p, parts, draw, token, lists, DRAW, SAMPLE, TILE, LIST_TILE)
        elif DRAW:
            _draw_of_all(row, draw, token, lists, TILE)
