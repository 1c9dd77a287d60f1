"""The sampler's Triton kernel, first part: keys, weights, and searches over candidates.

Every decision is made with integers. A logit's order is that of its bits as a monotonic int32 (its
key), its weight is a fixed-point number relative to the row's largest logit; sums of integers do
not depend on their order. So neither the number of programs nor the tile sizes show in a result.
"""

from __future__ import annotations

# ruff: noqa: N803 - compile-time parameters are in capitals, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(1099511627776.0)
"""The weight of a row's largest logit: 2^40, so that 2^18 of them add up within int64."""
UNIT = tl.constexpr(2147483648)
"""Probabilities and draws are multiples of 1 / 2^31."""


class Row(NamedTuple):
    """A row of logits: its address, the step from one to the next, and how many."""

    start: Any
    step: Any
    count: Any


class Candidates(NamedTuple):
    """Logits to search: a list with vocabulary indices (`listed`, step 1), or a whole row."""

    start: Any
    step: Any
    count: Any
    indices: Any
    listed: Any


# -- keys, weights, tiles


@triton.jit
def key_of(value):
    """A float32 scalar's place in the order of floats, int64."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 at a place in the order of floats."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scalar(number: tl.constexpr):
    """A float32 scalar."""
    return tl.full([], number, tl.float32)


@triton.jit
def weight_of(x, top):
    """2^40 * exp(x - top), rounded down; x is at most `top`, which is finite."""
    return (tl.exp2((x - top) * LOG2_E) * ONE).to(tl.int64)


@triton.jit
def share_of(total, parts):
    """total * parts / 2^31, rounded down, for total < 2^62 and parts <= 2^31."""
    return (total >> 31) * parts + (((total & (UNIT - 1)) * parts) >> 31)


@triton.jit
def clean(logits):
    """Logits that can be compared and weighed: NaN counts as -inf, inf as the largest float."""
    is_number = logits == logits  # noqa: PLR0124 - NaN is not
    return tl.where(is_number, tl.minimum(logits, LARGEST), -float("inf"))


@triton.jit
def tile_of(source, start, TILE: tl.constexpr):
    """Offsets and logits of a row or of candidates, as they are; -inf beyond their end."""
    offsets = start + tl.arange(0, TILE)
    at = source.start + offsets.to(tl.int64) * source.step
    return offsets, tl.load(at, mask=offsets < source.count, other=-float("inf"))


@triton.jit
def clean_tile(source, start, TILE: tl.constexpr):
    """Offsets and logits of a row or of candidates, to compare and weigh."""
    offsets, logits = tile_of(source, start, TILE)
    return offsets, clean(logits)


@triton.jit
def index_of(source, offsets):
    """Vocabulary indices of a tile of candidates: from the list, or the offsets in the row."""
    inside = offsets < tl.where(source.listed, source.count, 0)
    return tl.where(source.listed, tl.load(source.indices + offsets, mask=inside, other=0), offsets)


@triton.jit
def is_kept(x, index, cut, last_tie):
    """Whether a logit passes: above the cut, or at it with an index up to the last tie kept."""
    return (x > cut) | ((x == cut) & (index <= last_tie))


# -- searches over candidates: the first tile stays in registers, which for a list is mostly all


@triton.jit
def _mass_inside(x, bound, below, top, MASS: tl.constexpr):
    """Each logit's weight (without MASS: 1) if it is in [bound, below), and whether it is."""
    inside = (x >= bound) & (x < below)
    number = inside.to(tl.int64)
    return tl.where(inside, weight_of(x, top), 0) if MASS else number, number


@triton.jit
def _mass_from(source, first, bound, below, top, MASS: tl.constexpr, TILE: tl.constexpr):
    """The weight (without MASS: the number) of the logits in [bound, below), and their number."""
    mass, number = _mass_inside(first, bound, below, top, MASS)
    for start in range(TILE, source.count, TILE):
        _, x = clean_tile(source, start, TILE)
        more_mass, more = _mass_inside(x, bound, below, top, MASS)
        mass += more_mass
        number += more
    if MASS:
        whole, how_many = tl.split(tl.sum(tl.join(mass, number), 0))
    else:
        how_many = tl.sum(number, 0)
        whole = how_many
    return whole, how_many


@triton.jit
def find_cut(source, low, high, base, target, below, top, MASS: tl.constexpr, TILE: tl.constexpr):
    """A key of [low, high] from which on there is `target` and above which there is less; how much.

    `base` is the number or weight from `below` on, which are no candidates; from `low` on there is
    enough. The search ends early where one candidate is left or the target is met exactly: then all
    ties at the key are needed, and what is said to be above it may be too little, never too much.
    """
    _, first = clean_tile(source, 0, TILE)
    above = base
    number_low = source.count + low * 0
    number_above = low * 0
    while low < high:
        middle = (low + high + 1) >> 1
        total, number = _mass_from(source, first, value_of(middle), below, top, MASS, TILE)
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
def weigh_above(source, cut, below, top, TILE: tl.constexpr):
    """The weight of the candidates above a cut, and the number of those at it."""
    mass = tl.zeros([TILE], tl.int64)
    ties = tl.zeros([TILE], tl.int64)
    for start in range(0, source.count, TILE):
        _, x = clean_tile(source, start, TILE)
        mass += tl.where((x > cut) & (x < below), weight_of(x, top), 0)
        ties += (x == cut).to(tl.int64)
    return tl.sum(mass, 0), tl.sum(ties, 0)


@triton.jit
def _part_of(source, start, cut, last_tie, top, DRAW: tl.constexpr, TILE: tl.constexpr):
    """Vocabulary indices of a tile, and what each counts: its weight if kept, or 1 for a tie."""
    offsets, x = clean_tile(source, start, TILE)
    index = index_of(source, offsets)
    if DRAW:
        part = tl.where(is_kept(x, index, cut, last_tie), weight_of(x, top), 0)
    else:
        part = (x == cut).to(tl.int64)
    return index, part


@triton.jit
def find_index(
    source, vocabulary, cut, last_tie, top, target, DRAW: tl.constexpr, TILE: tl.constexpr
):
    """The lowest index up to which there are `target` ties, or, with DRAW, that weight is kept."""
    first_index, first_part = _part_of(source, 0, cut, last_tie, top, DRAW, TILE)
    low = 0
    high = vocabulary - 1
    while low < high:
        middle = (low + high) >> 1
        total = tl.where(first_index <= middle, first_part, 0)
        for start in range(TILE, source.count, TILE):
            index, part = _part_of(source, start, cut, last_tie, top, DRAW, TILE)
            total += tl.where(index <= middle, part, 0)
        if tl.sum(total, 0) >= target:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def last_tie_of(source, vocabulary, cut, needed, ties, top, TILE: tl.constexpr):
    """The index up to which ties are kept."""
    last = vocabulary
    if needed < ties:
        last = find_index(source, vocabulary, cut, 0, top, needed, False, TILE)
    return last


@triton.jit
def ties_needed(target, above, cut, top):
    """How many ties at the cut it takes to reach a weight."""
    each = tl.maximum(weight_of(cut, top), 1)
    return (target - above + each - 1) // each
