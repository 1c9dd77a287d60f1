"""The sampler's Triton kernel, second part: a row's sample, and the passes over a row.

Passes work on groups of four neighbours, which one thread holds: a group that has something to
collect is noted by its number, and expanded when the pass is done.
"""

from __future__ import annotations

# ruff: noqa: N803 - compile-time parameters are in capitals, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from typing import Any, NamedTuple

import triton
import triton.language as tl

from hal.core.kernels.topk_topp_search import (
    LOG2_E,
    LOWEST,
    clean,
    clean_tile,
    is_kept,
    key_of,
    scalar,
    tile_of,
    value_of,
    weight_of,
)

CHUNK = tl.constexpr(32)
"""Neighbours that are sampled together: one memory transaction."""
GROUP = tl.constexpr(4)
"""Neighbours that a thread loads at once."""
MARGIN = tl.constexpr(1e-4)
"""How far float32 sums can be off, generously: (V / TILE + 20) * 2^-24, and exp2's ulps."""
PIVOT_STEPS = tl.constexpr(18)
PASSES = tl.constexpr(4)
"""At most so many passes narrow what is collected."""


class Lists(NamedTuple):
    """A program's scratch: a counter, and lists of `room` groups, vocabulary indices and logits."""

    counter: Any
    groups: Any
    indices: Any
    logits: Any
    room: Any


@triton.jit
def _groups(row, first, TILE: tl.constexpr):
    """Vocabulary indices and logits [TILE / 4, 4] of neighbouring groups; -inf beyond the row."""
    index = first + tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = row.start + index.to(tl.int64) * row.step
    return index, tl.load(at, mask=index < row.count, other=-float("inf"))


# -- the sample


@triton.jit
def sample_of(row, SAMPLE: tl.constexpr):
    """About SAMPLE logits, spread evenly over the row, and their number; of a short row, all."""
    place = tl.arange(0, SAMPLE)
    stride = tl.maximum(row.count // (SAMPLE // CHUNK), CHUNK)
    offsets = (place // CHUNK) * stride + place % CHUNK
    inside = offsets < row.count
    x = tl.load(row.start + offsets.to(tl.int64) * row.step, mask=inside, other=-float("inf"))
    return clean(x), tl.sum(inside.to(tl.int32), 0)


@triton.jit
def sample_threshold(sample, rank):
    """A value that about `rank` logits of the sample reach, rather more than fewer."""
    low = key_of(scalar(LOWEST))
    high = key_of(tl.max(sample, 0))
    while low < high:
        middle = (low + high + 1) >> 1
        reached = tl.sum((sample >= value_of(middle)).to(tl.int32), 0)
        if reached >= rank:
            low = middle
            if reached <= rank + rank // 4 + 2:
                high = middle
        else:
            high = middle - 1
    return value_of(low)


@triton.jit
def _sum8(a, b, c, d, e, f, g, h):
    """Eight sums in one reduction."""
    left = tl.join(tl.join(a, b), tl.join(c, d))
    right = tl.join(tl.join(e, f), tl.join(g, h))
    left_sums, right_sums = tl.split(tl.sum(tl.join(left, right), 0))
    ab, cd = tl.split(left_sums)
    ef, gh = tl.split(right_sums)
    a_sum, b_sum = tl.split(ab)
    c_sum, d_sum = tl.split(cd)
    e_sum, f_sum = tl.split(ef)
    g_sum, h_sum = tl.split(gh)
    return a_sum, b_sum, c_sum, d_sum, e_sum, f_sum, g_sum, h_sum


@triton.jit
def _halve(low, high, reached, target):
    """The half of [low, high] with the largest key that still reaches its target."""
    middle = (low + high + 1) >> 1
    enough = reached >= target
    return tl.where(enough, middle, low), tl.where(enough, high, tl.maximum(middle - 1, low))


@triton.jit
def _middle(low, high):
    """The value half-way, in the order of floats."""
    return value_of((low + high + 1) >> 1)


@triton.jit
def _pivots(sample, mass, low, below, share):
    """Six values in [low, below) that may enclose the logit which completes a share of its mass.

    Four by the sample's mass, up to three standard errors to either side; two by count, for rows
    whose mass lies in a few logits that the sample misses.
    """
    inside = (sample >= low) & (sample < below)
    mass = tl.where(inside, mass, 0.0)
    one = tl.where(inside, 1.0, 0.0)
    whole, squares, count, _, _, _, _, _ = _sum8(mass, mass * mass, one, one, one, one, one, one)
    spread = squares * tl.maximum(share * (1.0 - share), 0.0)
    error = 3.0 * tl.sqrt(spread) + 0.001 * whole
    goal = share * whole
    first = key_of(low)
    last = tl.maximum(key_of(tl.max(tl.where(inside, sample, low), 0)), first)
    low0, low1, low2, low3, low4, low5 = first, first, first, first, first, first
    high0, high1, high2, high3, high4, high5 = last, last, last, last, last, last
    for _step in range(PIVOT_STEPS):
        r0, r1, r2, r3, r4, r5, _, _ = _sum8(
            tl.where(sample >= _middle(low0, high0), mass, 0.0),
            tl.where(sample >= _middle(low1, high1), mass, 0.0),
            tl.where(sample >= _middle(low2, high2), mass, 0.0),
            tl.where(sample >= _middle(low3, high3), mass, 0.0),
            tl.where(sample >= _middle(low4, high4), one, 0.0),
            tl.where(sample >= _middle(low5, high5), one, 0.0),
            one,
            one,
        )
        low0, high0 = _halve(low0, high0, r0, goal + error)
        low1, high1 = _halve(low1, high1, r1, goal + error / 4)
        low2, high2 = _halve(low2, high2, r2, goal - error / 4)
        low3, high3 = _halve(low3, high3, r3, goal - error)
        low4, high4 = _halve(low4, high4, r4, count / 8)
        low5, high5 = _halve(low5, high5, r5, count / 64)
    return (
        value_of(low0),
        value_of(low1),
        value_of(low2),
        value_of(low3),
        value_of(low4),
        value_of(low5),
    )


# -- collecting


@triton.jit
def _place(counter, chosen):
    """A place of its own in a list for each chosen element, in any order."""
    zero = chosen.to(tl.int32) * 0
    return tl.atomic_add(counter + zero, 1, mask=chosen, sem="relaxed")


@triton.jit
def _note_groups(lists, first, chosen, TILE: tl.constexpr):
    """Note the numbers of the chosen groups [TILE / 4]; what finds no room is only counted."""
    number = first // GROUP + tl.arange(0, TILE // GROUP)
    place = _place(lists.counter, chosen)
    tl.store(lists.groups + place, number, mask=chosen & (place < lists.room))


@triton.jit
def _take_count(counter):
    """How much was noted by all threads; the next list begins at 0."""
    tl.debug_barrier()
    return tl.atomic_xchg(counter, 0)


@triton.jit
def _expand(row, low, below, lists, TILE: tl.constexpr):
    """Collect the logits in [low, below) of the groups noted; their number, more than there is room
    for if either list was too short.
    """
    noted = _take_count(lists.counter)
    kept = tl.minimum(noted, lists.room)
    for start in range(0, kept, TILE // GROUP):
        offsets = start + tl.arange(0, TILE // GROUP)
        inside = offsets < kept
        number = tl.load(lists.groups + offsets, mask=inside, other=0)
        index = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        valid = inside[:, None] & (index < row.count)
        at = row.start + index.to(tl.int64) * row.step
        logits = tl.load(at, mask=valid, other=-float("inf"))
        x = clean(logits)
        chosen = valid & (x >= low) & (x < below)
        place = _place(lists.counter, chosen)
        fits = chosen & (place < lists.room)
        tl.store(lists.indices + place, index, mask=fits)
        tl.store(lists.logits + place, logits, mask=fits)
    count = _take_count(lists.counter)
    return tl.where(noted <= lists.room, count, lists.room + 1)


@triton.jit
def collect(row, low, lists, TILE: tl.constexpr):
    """Collect the logits from `low` on; returns their number and the largest logit."""
    largest = tl.full([TILE // GROUP], -float("inf"), tl.float32)
    for first in tl.range(0, row.count, TILE, num_stages=3):
        _, logits = _groups(row, first, TILE)
        best = tl.max(logits, 1)
        largest = tl.maximum(largest, best)
        _note_groups(lists, first, best >= low, TILE)
    top = tl.maximum(clean(tl.max(largest, 0)), LOWEST)
    return _expand(row, low, scalar(float("inf")), lists, TILE), top


# -- the end of a nucleus


@triton.jit
def _mass_of_groups(x, mass, pivot):
    """The mass of a group's logits from a pivot on."""
    return tl.sum(tl.where(x >= pivot, mass, 0.0), 1)


@triton.jit
def _estimate(row, reference, t0, t1, t2, t3, t4, t5, TILE: tl.constexpr):
    """The largest logit, and in float32 the mass of the row and from each of six pivots on."""
    largest = tl.full([TILE // GROUP], -float("inf"), tl.float32)
    whole = tl.zeros([TILE // GROUP], tl.float32)
    s0, s1, s2, s3, s4, s5 = whole, whole, whole, whole, whole, whole
    for first in tl.range(0, row.count, TILE, num_stages=3):
        _, logits = _groups(row, first, TILE)
        x = clean(logits)
        mass = tl.exp2((x - reference) * LOG2_E)
        largest = tl.maximum(largest, tl.max(x, 1))
        whole += tl.sum(mass, 1)
        s0 += _mass_of_groups(x, mass, t0)
        s1 += _mass_of_groups(x, mass, t1)
        s2 += _mass_of_groups(x, mass, t2)
        s3 += _mass_of_groups(x, mass, t3)
        s4 += _mass_of_groups(x, mass, t4)
        s5 += _mass_of_groups(x, mass, t5)
    all_mass, r0, r1, r2, r3, r4, r5, _ = _sum8(whole, s0, s1, s2, s3, s4, s5, whole)
    return tl.max(largest, 0), all_mass, r0, r1, r2, r3, r4, r5


@triton.jit
def _narrow(low, below, at_low, at_below, pivot, reached, most, least):
    """The enclosing thresholds, and the mass from each on, after one more pivot."""
    raises = (reached >= most) & (pivot > low)
    lowers = (reached <= least) & (pivot < below)
    return (
        tl.where(raises, pivot, low),
        tl.where(lowers, pivot, below),
        tl.where(raises, reached, at_low),
        tl.where(lowers, reached, at_below),
    )


@triton.jit
def enclose(row, p, room, SAMPLE: tl.constexpr, TILE: tl.constexpr):
    """(low, below, top): the logit that completes a share `p` of the mass is in [low, below)."""
    sample, sampled = sample_of(row, SAMPLE)
    reference = tl.maximum(tl.max(sample, 0), LOWEST)
    sample_mass = tl.exp2((sample - reference) * LOG2_E)
    low = scalar(LOWEST)
    below = scalar(float("inf"))
    share = p
    top = reference
    passes = 0
    while passes < PASSES:
        t0, t1, t2, t3, t4, t5 = _pivots(sample, sample_mass, low, below, share)
        top, whole, r0, r1, r2, r3, r4, r5 = _estimate(row, reference, t0, t1, t2, t3, t4, t5, TILE)
        if top > reference + 40.0:  # float32 would overflow: sum once more, against the top
            reference = top
            top, whole, r0, r1, r2, r3, r4, r5 = _estimate(
                row, reference, t0, t1, t2, t3, t4, t5, TILE
            )
        most = (p + MARGIN) * whole
        least = (p - MARGIN) * whole
        at_low = whole
        at_below = scalar(0.0)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t0, r0, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t1, r1, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t2, r2, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t3, r3, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t4, r4, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t5, r5, most, least)
        share = (p * whole - at_below) / tl.maximum(at_low - at_below, 1e-30)
        inside = tl.sum(((sample >= low) & (sample < below)).to(tl.int32), 0)
        passes += 1
        if inside.to(tl.int64) * row.count <= sampled.to(tl.int64) * (room // 2):
            passes = PASSES
    return low, below, tl.maximum(top, LOWEST)


@triton.jit
def weigh(row, low, below, top, lists, MASK: tl.constexpr, TILE: tl.constexpr):
    """Weigh the row and what is from `below` on; collect [low, below); MASK what is lower."""
    whole = tl.zeros([TILE // GROUP], tl.int64)
    above = tl.zeros([TILE // GROUP], tl.int64)
    for first in tl.range(0, row.count, TILE, num_stages=3):
        index, logits = _groups(row, first, TILE)
        x = clean(logits)
        weight = weight_of(x, top)
        whole += tl.sum(weight, 1)
        above += tl.sum(tl.where(x >= below, weight, 0), 1)
        between = (x >= low) & (x < below)
        _note_groups(lists, first, tl.max(between.to(tl.int32), 1) > 0, TILE)
        if MASK:
            masked = tl.where(x < low, -float("inf"), logits)
            tl.store(row.start + index.to(tl.int64) * row.step, masked, mask=index < row.count)
    total, total_above = tl.split(tl.sum(tl.join(whole, above), 0))
    return total, total_above, _expand(row, low, below, lists, TILE)


# -- results


@triton.jit
def draw_in_row(row, cut, last_tie, top, target, TILE: tl.constexpr):
    """The lowest index up to which what is kept has a weight of `target`, in one pass at most."""
    token = 0
    before = target * 0
    start = 0
    while start < row.count:
        offsets, x = clean_tile(row, start, TILE)
        part = tl.where(is_kept(x, offsets, cut, last_tie), weight_of(x, top), 0)
        mass = tl.sum(part, 0)
        if before + mass >= target:
            running = before + tl.cumsum(part, 0)
            token = start + tl.sum((running < target).to(tl.int32), 0)
            start = row.count
        before += mass
        start += TILE
    return token


@triton.jit
def mask_row(row, cut, last_tie, TILE: tl.constexpr):
    """Mask what is not kept, in one pass over the row."""
    for first in tl.range(0, row.count, TILE, num_stages=3):
        index, logits = _groups(row, first, TILE)
        masked = tl.where(is_kept(clean(logits), index, cut, last_tie), logits, -float("inf"))
        tl.store(row.start + index.to(tl.int64) * row.step, masked, mask=index < row.count)


@triton.jit
def mask_listed(row, source, cut, last_tie, TILE: tl.constexpr):
    """Mask the collected logits that are not kept."""
    for start in range(0, source.count, TILE):
        offsets, x = clean_tile(source, start, TILE)
        inside = offsets < source.count
        index = tl.load(source.indices + offsets, mask=inside, other=0)
        removed = inside & (is_kept(x, index, cut, last_tie) == 0)
        tl.store(row.start + index.to(tl.int64) * row.step, -float("inf"), mask=removed)


@triton.jit
def write_listed(row, source, cut, last_tie, TILE: tl.constexpr, LIST_TILE: tl.constexpr):
    """Mask the whole row without reading it, then put back what is kept."""
    for start in range(0, row.count, TILE):
        offsets = start + tl.arange(0, TILE)
        masked = tl.full([TILE], -float("inf"), tl.float32)
        at = row.start + offsets.to(tl.int64) * row.step
        tl.store(at, masked, mask=offsets < row.count)
    tl.debug_barrier()
    for start in range(0, source.count, LIST_TILE):
        offsets, logits = tile_of(source, start, LIST_TILE)
        inside = offsets < source.count
        index = tl.load(source.indices + offsets, mask=inside, other=0)
        kept = inside & is_kept(clean(logits), index, cut, last_tie)
        tl.store(row.start + index.to(tl.int64) * row.step, logits, mask=kept)
