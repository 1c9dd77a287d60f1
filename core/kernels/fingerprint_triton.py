"""The Triton kernel of `fingerprint`: one program a block, straight from device addresses."""

from __future__ import annotations

# ruff: noqa: N803 - compile-time parameters are in capitals, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
import triton
import triton.language as tl

PRIME = tl.constexpr((1 << 61) - 1)


@triton.jit
def _fold(low, high):
    """A 128-bit product modulo the prime, up to a few multiples of it."""
    return (low & PRIME) + ((low >> 61) | (high << 3))


@triton.jit
def _step(total, key, words):
    """Horner's rule: keys below 2^58 keep totals below 2^62 with one fold."""
    return _fold(total * key, tl.umulhi(total, key)) + words


@triton.jit
def _canonical(value):
    """The residue in [0, prime) of a number below 2^64."""
    once = (value & PRIME) + (value >> 61)
    return tl.where(once >= PRIME, once - PRIME, once)


@triton.jit
def _weighted_sum(totals, weights):
    """The sum over the columns of total times weight, in [0, prime), as a scalar."""
    low_product = totals * weights
    product = _canonical(_fold(low_product, tl.umulhi(totals, weights)))
    low = tl.sum(product & 0x7FFFFFFF)
    high = tl.sum(product >> 31)  # times 2^31: its upper part wraps around at 2^61
    return _canonical((high >> 30) + ((high & 0x3FFFFFFF) << 31) + low)


@triton.jit
def fingerprint_kernel(
    blocks,  # int64 [n, 2]: address and words of 4 bytes
    weights,  # int64 [2, COLUMNS]
    digests,  # int64 [n, 2]
    COLUMNS: tl.constexpr,
    KEY_0: tl.constexpr,
    KEY_1: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    address = tl.multiple_of(tl.load(blocks + 2 * block), 16)
    words = tl.load(blocks + 2 * block + 1)
    start = address.to(tl.pointer_type(tl.uint32))
    column = tl.arange(0, COLUMNS)
    first = tl.where(column == 0, words, 0).to(tl.uint64)
    key_0 = tl.full([COLUMNS], KEY_0, tl.uint64)
    key_1 = tl.full([COLUMNS], KEY_1, tl.uint64)
    total_0, total_1 = first, first
    whole = words // COLUMNS * COLUMNS
    for offset in range(0, whole, COLUMNS):
        here = tl.load(start + offset + column).to(tl.uint64)
        total_0 = _step(total_0, key_0, here)
        total_1 = _step(total_1, key_1, here)
    if whole < words:
        inside = whole + column < words
        here = tl.load(start + whole + column, mask=inside, other=0).to(tl.uint64)
        total_0 = _step(total_0, key_0, here)
        total_1 = _step(total_1, key_1, here)
    weight_0 = tl.load(weights + column).to(tl.uint64, bitcast=True)
    weight_1 = tl.load(weights + COLUMNS + column).to(tl.uint64, bitcast=True)
    digest_0 = _weighted_sum(total_0, weight_0)
    digest_1 = _weighted_sum(total_1, weight_1)
    tl.store(digests + 2 * block, digest_0.to(tl.int64, bitcast=True))
    tl.store(digests + 2 * block + 1, digest_1.to(tl.int64, bitcast=True))
