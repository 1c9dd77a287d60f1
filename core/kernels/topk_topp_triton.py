"""The Triton kernel of `topk_topp`: one program a row, exact, with few passes over the logits.

Every decision is made with integers. A logit's order is that of its bits as a monotonic int32 (its
key), its weight is a fixed-point number relative to the row's largest logit; sums of integers do
not depend on their order. So neither the number of programs nor the tile sizes show in a result.

A strided sample of the row suggests a threshold. One pass collects what lies above it, a few
hundred logits for a usual top-k, and the search for the exact threshold runs over these alone.
Without a top-k, two thresholds that enclose the end of the nucleus for certain are found first,
from the mass above a few pivots; a second pass weighs the row and collects what lies between the
two. Where the sample misled, or there is too much to collect, the search runs over the whole row:
slower, and as exact.

Passes work on groups of four neighbours, which one thread holds: a group that has something to
collect is noted by its number, and expanded when the pass is done.
"""

from __future__ import annotations

# ruff: noqa: N803 - compile-time parameters are in capitals, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(1099511627776.0)
"""The weight of a row's largest logit: 2^40, so that 2^18 of them add up within int64."""
UNIT = tl.constexpr(2147483648)
"""Probabilities and draws are multiples of 1 / 2^31."""
CHUNK = tl.constexpr(32)
"""Neighbours that are sampled together: one memory transaction."""
GROUP = tl.constexpr(4)
"""Neighbours that a thread loads at once."""
COUNTER_WORDS = tl.constexpr(32)
"""Scratch before a program's lists: its counter, on a cache line of its own."""
MARGIN = tl.constexpr(1e-4)
"""How far float32 sums can be off, generously: (V / TILE + 20) * 2^-24, and exp2's ulps."""
PIVOT_STEPS = tl.constexpr(18)
PASSES = tl.constexpr(4)
"""At most so many passes narrow what is collected."""


# -- keys, weights, tiles


@triton.jit
def _key(value):
    """A float32 scalar's place in the order of floats, int64."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 at a place in the order of floats."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _float(number: tl.constexpr):
    """A float32 scalar."""
    return tl.full([], number, tl.float32)


@triton.jit
def _weight(x, top):
    """2^40 * exp(x - top), rounded down; x is at most `top`, which is finite."""
    return (tl.exp2((x - top) * LOG2_E) * ONE).to(tl.int64)


@triton.jit
def _share(total, parts):
    """total * parts / 2^31, rounded down, for total < 2^62 and parts <= 2^31."""
    return (total >> 31) * parts + (((total & (UNIT - 1)) * parts) >> 31)


@triton.jit
def _clean(logits):
    """Logits that can be compared and weighed: NaN counts as -inf, inf as the largest float."""
    is_number = logits == logits  # noqa: PLR0124 - NaN is not
    return tl.where(is_number, tl.minimum(logits, LARGEST), -float("inf"))


@triton.jit
def _groups(row, step, first, vocabulary, TILE: tl.constexpr):
    """Vocabulary indices and logits [TILE / 4, 4] of neighbouring groups; -inf beyond the row."""
    members = tl.arange(0, GROUP)[None, :]
    index = first + tl.arange(0, TILE // GROUP)[:, None] * GROUP + members
    at = row + index.to(tl.int64) * step
    return index, tl.load(at, mask=index < vocabulary, other=-float("inf"))


@triton.jit
def _tile(values, step, start, count, TILE: tl.constexpr):
    """Offsets and logits of candidates, as they are; -inf beyond `count`."""
    offsets = start + tl.arange(0, TILE)
    at = values + offsets.to(tl.int64) * step
    return offsets, tl.load(at, mask=offsets < count, other=-float("inf"))


@triton.jit
def _clean_tile(values, step, start, count, TILE: tl.constexpr):
    """Offsets and logits of candidates, to compare and weigh."""
    offsets, logits = _tile(values, step, start, count, TILE)
    return offsets, _clean(logits)


@triton.jit
def _index(indices, offsets, count, listed):
    """Vocabulary indices of a tile of candidates: from the list, or the offsets in the row."""
    inside = (offsets < count) & listed
    return tl.where(listed, tl.load(indices + offsets, mask=inside, other=0), offsets)


@triton.jit
def _is_kept(x, index, cut, last_tie):
    """Whether a logit passes: above the cut, or at it with an index up to the last tie kept."""
    return (x > cut) | ((x == cut) & (index <= last_tie))


# -- searches over candidates: a list in scratch (step 1), or a whole row


@triton.jit
def _from(values, step, count, bound, below, top, MASS: tl.constexpr, TILE: tl.constexpr):
    """The weight (without MASS: the number) of the logits in [bound, below), and their number."""
    mass = tl.zeros([TILE], tl.int64)
    number = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        _, x = _clean_tile(values, step, start, count, TILE)
        inside = (x >= bound) & (x < below)
        number += inside.to(tl.int32)
        if MASS:
            mass += tl.where(inside, _weight(x, top), 0)
    if MASS:
        both = tl.sum(tl.join(mass, number.to(tl.int64)), 0)
        whole, how_many = tl.split(both)
    else:
        how_many = tl.sum(number, 0).to(tl.int64)
        whole = how_many
    return whole, how_many


@triton.jit
def _find_cut(
    values, step, count, low, high, base, target, below, top, MASS: tl.constexpr, TILE: tl.constexpr
):
    """A key of [low, high] from which on there is `target` and above which there is less; how much.

    `base` is the number or weight from `below` on, which are no candidates; from `low` on there is
    enough. The search ends early where one candidate is left or the target is met exactly: then all
    ties at the key are needed, and what is said to be above it may be too little, never too much.
    """
    above = base
    number_low = count + low * 0
    number_above = low * 0
    while low < high:
        middle = (low + high + 1) >> 1
        total, number = _from(values, step, count, _value(middle), below, top, MASS, TILE)
        total += base
        if total >= target:
            low = middle
            number_low = number
            if total == target:
                high = middle
        else:
            high = middle - 1
            above = total
            number_above = number
        if number_low - number_above <= 1:
            high = low
    return low, above


@triton.jit
def _weigh_above(values, step, count, cut, below, top, TILE: tl.constexpr):
    """The weight of the candidates above a cut, and the number of those at it."""
    mass = tl.zeros([TILE], tl.int64)
    ties = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        _, x = _clean_tile(values, step, start, count, TILE)
        mass += tl.where((x > cut) & (x < below), _weight(x, top), 0)
        ties += (x == cut).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(ties, 0).to(tl.int64)


@triton.jit
def _find_index(
    values,
    indices,
    step,
    count,
    listed,
    vocabulary,
    cut,
    last_tie,
    top,
    target,
    DRAW: tl.constexpr,
    TILE: tl.constexpr,
):
    """The lowest index up to which there are `target` ties, or, with DRAW, that weight is kept."""
    low = 0
    high = vocabulary - 1
    while low < high:
        middle = (low + high) >> 1
        total = tl.zeros([TILE], tl.int64)
        for start in range(0, count, TILE):
            offsets, x = _clean_tile(values, step, start, count, TILE)
            index = _index(indices, offsets, count, listed)
            if DRAW:
                part = tl.where(_is_kept(x, index, cut, last_tie), _weight(x, top), 0)
            else:
                part = (x == cut).to(tl.int64)
            total += tl.where(index <= middle, part, 0)
        if tl.sum(total, 0) >= target:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _draw_in_row(row, step, vocabulary, cut, last_tie, top, target, TILE: tl.constexpr):
    """The lowest index up to which what is kept has a weight of `target`, in one pass at most."""
    token = 0
    before = target * 0
    start = 0
    while start < vocabulary:
        offsets, x = _clean_tile(row, step, start, vocabulary, TILE)
        part = tl.where(_is_kept(x, offsets, cut, last_tie), _weight(x, top), 0)
        mass = tl.sum(part, 0)
        if before + mass >= target:
            running = before + tl.cumsum(part, 0)
            token = start + tl.sum((running < target).to(tl.int32), 0)
            start = vocabulary
        before += mass
        start += TILE
    return token


# -- the sample


@triton.jit
def _sample(row, step, vocabulary, SAMPLE: tl.constexpr):
    """About SAMPLE logits, spread evenly over the row; of a short row, all of them."""
    place = tl.arange(0, SAMPLE)
    stride = tl.maximum(vocabulary // (SAMPLE // CHUNK), CHUNK)
    offsets = (place // CHUNK) * stride + place % CHUNK
    inside = offsets < vocabulary
    x = tl.load(row + offsets.to(tl.int64) * step, mask=inside, other=-float("inf"))
    return _clean(x), tl.sum(inside.to(tl.int32), 0)


@triton.jit
def _sample_threshold(sample, rank):
    """A value that about `rank` logits of the sample reach, rather more than fewer."""
    low = _key(_float(LOWEST))
    high = _key(tl.max(sample, 0))
    while low < high:
        middle = (low + high + 1) >> 1
        reached = tl.sum((sample >= _value(middle)).to(tl.int32), 0)
        if reached >= rank:
            low = middle
            if reached <= rank + rank // 4 + 2:
                high = middle
        else:
            high = middle - 1
    return _value(low)


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
    return _value((low + high + 1) >> 1)


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
    first = _key(low)
    last = tl.maximum(_key(tl.max(tl.where(inside, sample, low), 0)), first)
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
    return _value(low0), _value(low1), _value(low2), _value(low3), _value(low4), _value(low5)


# -- passes over a row


@triton.jit
def _place(counter, chosen):
    """A place of its own in a list for each chosen element, in any order."""
    zero = chosen.to(tl.int32) * 0
    return tl.atomic_add(counter + zero, 1, mask=chosen, sem="relaxed")


@triton.jit
def _note_groups(groups, counter, room, first, chosen, TILE: tl.constexpr):
    """Note the numbers of the chosen groups [TILE / 4]; what finds no room is only counted."""
    number = first // GROUP + tl.arange(0, TILE // GROUP)
    place = _place(counter, chosen)
    tl.store(groups + place, number, mask=chosen & (place < room))


@triton.jit
def _take_count(counter):
    """How much was noted by all threads; the next list begins at 0."""
    tl.debug_barrier()
    return tl.atomic_xchg(counter, 0)


@triton.jit
def _expand(
    row, step, vocabulary, low, below, groups, indices, values, counter, room, TILE: tl.constexpr
):
    """Collect the logits in [low, below) of the groups noted; their number, more than `room` if
    either list was too short.
    """
    noted = _take_count(counter)
    for start in range(0, tl.minimum(noted, room), TILE // GROUP):
        offsets = start + tl.arange(0, TILE // GROUP)
        inside = offsets < tl.minimum(noted, room)
        number = tl.load(groups + offsets, mask=inside, other=0)
        index = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        valid = inside[:, None] & (index < vocabulary)
        at = row + index.to(tl.int64) * step
        logits = tl.load(at, mask=valid, other=-float("inf"))
        x = _clean(logits)
        chosen = valid & (x >= low) & (x < below)
        place = _place(counter, chosen)
        fits = chosen & (place < room)
        tl.store(indices + place, index, mask=fits)
        tl.store(values + place, logits, mask=fits)
    count = _take_count(counter)
    return tl.where(noted <= room, count, room + 1)


@triton.jit
def _collect(
    row, step, vocabulary, low, groups, indices, values, counter, room, TILE: tl.constexpr
):
    """Collect the logits from `low` on; returns their number and the largest logit."""
    largest = tl.full([TILE // GROUP], -float("inf"), tl.float32)
    for first in tl.range(0, vocabulary, TILE, num_stages=3):
        _, logits = _groups(row, step, first, vocabulary, TILE)
        best = tl.max(logits, 1)
        largest = tl.maximum(largest, best)
        _note_groups(groups, counter, room, first, best >= low, TILE)
    top = tl.maximum(_clean(tl.max(largest, 0)), LOWEST)
    above = _float(float("inf"))
    count = _expand(row, step, vocabulary, low, above, groups, indices, values, counter, room, TILE)
    return count, top


@triton.jit
def _mass_of_groups(x, mass, pivot):
    """The mass of a group's logits from a pivot on."""
    return tl.sum(tl.where(x >= pivot, mass, 0.0), 1)


@triton.jit
def _estimate(row, step, vocabulary, reference, t0, t1, t2, t3, t4, t5, TILE: tl.constexpr):
    """The largest logit, and in float32 the mass of the row and from each of six pivots on."""
    largest = tl.full([TILE // GROUP], -float("inf"), tl.float32)
    whole = tl.zeros([TILE // GROUP], tl.float32)
    s0, s1, s2, s3, s4, s5 = whole, whole, whole, whole, whole, whole
    for first in tl.range(0, vocabulary, TILE, num_stages=3):
        _, logits = _groups(row, step, first, vocabulary, TILE)
        x = _clean(logits)
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
def _enclose(row, step, vocabulary, p, room, SAMPLE: tl.constexpr, TILE: tl.constexpr):
    """(low, below, top): the logit that completes a share `p` of the mass is in [low, below)."""
    sample, sampled = _sample(row, step, vocabulary, SAMPLE)
    reference = tl.maximum(tl.max(sample, 0), LOWEST)
    sample_mass = tl.exp2((sample - reference) * LOG2_E)
    low = _float(LOWEST)
    below = _float(float("inf"))
    share = p
    top = reference
    passes = 0
    while passes < PASSES:
        t0, t1, t2, t3, t4, t5 = _pivots(sample, sample_mass, low, below, share)
        top, whole, r0, r1, r2, r3, r4, r5 = _estimate(
            row, step, vocabulary, reference, t0, t1, t2, t3, t4, t5, TILE
        )
        if top > reference + 40.0:  # float32 would overflow: sum once more, against the top
            reference = top
            top, whole, r0, r1, r2, r3, r4, r5 = _estimate(
                row, step, vocabulary, reference, t0, t1, t2, t3, t4, t5, TILE
            )
        most = (p + MARGIN) * whole
        least = (p - MARGIN) * whole
        at_low = whole
        at_below = _float(0.0)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t0, r0, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t1, r1, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t2, r2, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t3, r3, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t4, r4, most, least)
        low, below, at_low, at_below = _narrow(low, below, at_low, at_below, t5, r5, most, least)
        share = (p * whole - at_below) / tl.maximum(at_low - at_below, 1e-30)
        inside = tl.sum(((sample >= low) & (sample < below)).to(tl.int32), 0)
        passes += 1
        if inside.to(tl.int64) * vocabulary <= sampled.to(tl.int64) * (room // 2):
            passes = PASSES
    return low, below, tl.maximum(top, LOWEST)


@triton.jit
def _weigh(
    row,
    step,
    vocabulary,
    low,
    below,
    top,
    groups,
    indices,
    values,
    counter,
    room,
    MASK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weigh the row and what is from `below` on; collect [low, below); MASK what is lower."""
    whole = tl.zeros([TILE // GROUP], tl.int64)
    above = tl.zeros([TILE // GROUP], tl.int64)
    for first in tl.range(0, vocabulary, TILE, num_stages=3):
        index, logits = _groups(row, step, first, vocabulary, TILE)
        x = _clean(logits)
        weight = _weight(x, top)
        whole += tl.sum(weight, 1)
        above += tl.sum(tl.where(x >= below, weight, 0), 1)
        between = (x >= low) & (x < below)
        _note_groups(groups, counter, room, first, tl.max(between.to(tl.int32), 1) > 0, TILE)
        if MASK:
            masked = tl.where(x < low, -float("inf"), logits)
            tl.store(row + index.to(tl.int64) * step, masked, mask=index < vocabulary)
    both = tl.sum(tl.join(whole, above), 0)
    total, total_above = tl.split(both)
    count = _expand(row, step, vocabulary, low, below, groups, indices, values, counter, room, TILE)
    return total, total_above, count


@triton.jit
def _mask_row(row, step, vocabulary, cut, last_tie, TILE: tl.constexpr):
    """Mask what is not kept, in one pass over the row."""
    for first in tl.range(0, vocabulary, TILE, num_stages=3):
        index, logits = _groups(row, step, first, vocabulary, TILE)
        masked = tl.where(_is_kept(_clean(logits), index, cut, last_tie), logits, -float("inf"))
        tl.store(row + index.to(tl.int64) * step, masked, mask=index < vocabulary)


@triton.jit
def _mask_listed(row, step, indices, values, count, cut, last_tie, TILE: tl.constexpr):
    """Mask the collected logits that are not kept."""
    for start in range(0, count, TILE):
        offsets, x = _clean_tile(values, 1, start, count, TILE)
        index = _index(indices, offsets, count, True)
        removed = (offsets < count) & ~_is_kept(x, index, cut, last_tie)
        tl.store(row + index.to(tl.int64) * step, -float("inf"), mask=removed)


@triton.jit
def _write_listed(
    row,
    step,
    vocabulary,
    indices,
    values,
    count,
    cut,
    last_tie,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Mask the whole row without reading it, then put back what is kept."""
    for start in range(0, vocabulary, TILE):
        offsets = start + tl.arange(0, TILE)
        masked = tl.full([TILE], -float("inf"), tl.float32)
        tl.store(row + offsets.to(tl.int64) * step, masked, mask=offsets < vocabulary)
    tl.debug_barrier()
    for start in range(0, count, LIST_TILE):
        offsets, logits = _tile(values, 1, start, count, LIST_TILE)
        index = _index(indices, offsets, count, True)
        kept = (offsets < count) & _is_kept(_clean(logits), index, cut, last_tie)
        tl.store(row + index.to(tl.int64) * step, logits, mask=kept)


# -- a row


@triton.jit
def _ties_needed(target, above, cut, top):
    """How many ties at the cut it takes to reach a weight."""
    each = tl.maximum(_weight(cut, top), 1)
    return (target - above + each - 1) // each


@triton.jit
def _candidates(values, count, row, step, vocabulary, listed):
    """What to search: the list (values, step, count) where it is complete, else the whole row."""
    if listed:  # noqa: SIM108 - Triton knows no conditional pointers
        where = values
    else:
        where = row
    return where, tl.where(listed, 1, step), tl.where(listed, count, vocabulary)


@triton.jit
def _last_tie(
    source, indices, stride, count, listed, vocabulary, cut, needed, ties, top, TILE: tl.constexpr
):
    """The index up to which ties are kept."""
    last = vocabulary
    if needed < ties:
        last = _find_index(
            source, indices, stride, count, listed, vocabulary, cut, 0, top, needed, False, TILE
        )
    return last


@triton.jit
def _top_k_row(
    row,
    step,
    vocabulary,
    k,
    parts,
    draw,
    token,
    groups,
    indices,
    values,
    counter,
    room,
    HAS_P: tl.constexpr,
    DRAW: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Top-k, then top-p on what remains; masks the row, or draws a token from what is kept."""
    sample, sampled = _sample(row, step, vocabulary, SAMPLE)
    expected = k * (sampled / vocabulary)
    rank = (expected + 4.0 * tl.sqrt(expected) + 6.0).to(tl.int32)
    low = _sample_threshold(sample, rank)
    count, top = _collect(row, step, vocabulary, low, groups, indices, values, counter, room, TILE)
    if (count < k) & (low > LOWEST):  # the sample misled: once more, with much to spare
        low = _sample_threshold(sample, 4 * rank + 64)
        count, top = _collect(
            row, step, vocabulary, low, groups, indices, values, counter, room, TILE
        )
    listed = (count <= room) & ((count >= k) | (low <= LOWEST))
    low = tl.where(listed, low, LOWEST)
    none_above = _float(float("inf"))
    source, stride, count = _candidates(values, count, row, step, vocabulary, listed)

    target = k.to(tl.int64)
    cut_key, above = _find_cut(
        source,
        stride,
        count,
        _key(low),
        _key(top),
        target * 0,
        target,
        none_above,
        top,
        False,
        LIST_TILE,
    )
    cut = _value(cut_key)
    needed = target - above
    mass_above, ties = _weigh_above(source, stride, count, cut, none_above, top, LIST_TILE)
    if HAS_P:  # noqa: SIM102 - known when compiling, unlike the other
        if parts < UNIT:
            mass = mass_above + tl.minimum(needed, ties) * _weight(cut, top)
            target = tl.maximum(_share(mass, parts), 1)
            p_key, above = _find_cut(
                source,
                stride,
                count,
                cut_key,
                _key(top),
                target * 0,
                target,
                none_above,
                top,
                True,
                LIST_TILE,
            )
            p_needed = _ties_needed(target, above, _value(p_key), top)
            needed = tl.where(p_key > cut_key, p_needed, tl.minimum(needed, p_needed))
            cut = _value(p_key)
            mass_above, ties = _weigh_above(source, stride, count, cut, none_above, top, LIST_TILE)
    last_tie = _last_tie(
        source, indices, stride, count, listed, vocabulary, cut, needed, ties, top, LIST_TILE
    )
    if DRAW:
        mass = mass_above + tl.minimum(needed, ties) * _weight(cut, top)
        target = _share(mass, draw) + 1
        if listed:
            drawn = _find_index(
                source,
                indices,
                stride,
                count,
                listed,
                vocabulary,
                cut,
                last_tie,
                top,
                target,
                True,
                LIST_TILE,
            )
        else:
            drawn = _draw_in_row(row, step, vocabulary, cut, last_tie, top, target, TILE)
        tl.store(token, tl.where(mass > 0, drawn, 0))
    elif listed:
        _write_listed(row, step, vocabulary, indices, values, count, cut, last_tie, TILE, LIST_TILE)
    else:
        _mask_row(row, step, vocabulary, cut, last_tie, TILE)


@triton.jit
def _top_p_row(
    row,
    step,
    vocabulary,
    p,
    parts,
    draw,
    token,
    groups,
    indices,
    values,
    counter,
    room,
    DRAW: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Top-p of a whole row; masks it, or draws a token from what is kept."""
    low, below, top = _enclose(row, step, vocabulary, p, room, SAMPLE, TILE)
    whole, base, count = _weigh(
        row,
        step,
        vocabulary,
        low,
        below,
        top,
        groups,
        indices,
        values,
        counter,
        room,
        not DRAW,
        TILE,
    )
    listed = count <= room
    source, stride, count = _candidates(values, count, row, step, vocabulary, listed)
    target = tl.maximum(_share(whole, parts), 1)
    high = tl.minimum(_key(top), _key(below) - 1)
    cut_key, above = _find_cut(
        source,
        stride,
        count,
        _key(low),
        high,
        base,
        target,
        below,
        top,
        True,
        LIST_TILE,
    )
    cut = _value(cut_key)
    needed = _ties_needed(target, above, cut, top)
    mass_above, ties = _weigh_above(source, stride, count, cut, below, top, LIST_TILE)
    last_tie = _last_tie(
        source, indices, stride, count, listed, vocabulary, cut, needed, ties, top, LIST_TILE
    )
    if DRAW:
        mass = base + mass_above + tl.minimum(needed, ties) * _weight(cut, top)
        target = _share(mass, draw) + 1
        drawn = _draw_in_row(row, step, vocabulary, cut, last_tie, top, target, TILE)
        tl.store(token, tl.where(mass > 0, drawn, 0))
    elif listed:
        _mask_listed(row, step, indices, values, count, cut, last_tie, LIST_TILE)
    else:
        _mask_row(row, step, vocabulary, cut, last_tie, TILE)


@triton.jit
def _draw_of_all(
    row,
    step,
    vocabulary,
    draw,
    token,
    groups,
    indices,
    values,
    counter,
    TILE: tl.constexpr,
):
    """Draw a token from a row that nothing is removed from."""
    none = _float(float("inf"))
    _, top = _collect(row, step, vocabulary, none, groups, indices, values, counter, 0, TILE)
    whole, _, _ = _weigh(
        row, step, vocabulary, none, none, top, groups, indices, values, counter, 0, False, TILE
    )
    target = _share(whole, draw) + 1
    drawn = _draw_in_row(row, step, vocabulary, LOWEST, vocabulary, top, target, TILE)
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
    values = (indices + room).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(counter, 0)
    for number in range(program, rows, tl.num_programs(0)):
        tl.debug_barrier()  # the row before may still read the list
        row = logits + number * tl.cast(row_step, tl.int64)
        k = vocabulary
        if HAS_K:
            asked = tl.load(k_of_rows + number)
            k = tl.where((asked > 0) & (asked < vocabulary), asked, vocabulary).to(tl.int32)
        p = _float(1.0)
        if HAS_P:
            p = tl.minimum(tl.maximum(tl.load(p_of_rows + number), 0.0), 1.0)
        parts = (p * UNIT).to(tl.int64)
        draw = parts * 0
        if DRAW:
            draw = tl.load(draws + number)
        if k < vocabulary:
            _top_k_row(
                row,
                step,
                vocabulary,
                k,
                parts,
                draw,
                tokens + number,
                groups,
                indices,
                values,
                counter,
                room,
                HAS_P,
                DRAW,
                SAMPLE,
                TILE,
                LIST_TILE,
            )
        elif parts < UNIT:
            _top_p_row(
                row,
                step,
                vocabulary,
                p,
                parts,
                draw,
                tokens + number,
                groups,
                indices,
                values,
                counter,
                room,
                DRAW,
                SAMPLE,
                TILE,
                LIST_TILE,
            )
        elif DRAW:
            _draw_of_all(
                row,
                step,
                vocabulary,
                draw,
                tokens + number,
                groups,
                indices,
                values,
                counter,
                TILE,
            )
