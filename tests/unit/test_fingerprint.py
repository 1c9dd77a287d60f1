"""The fingerprint of memory: its definition, and the accidents that it has to find."""

from __future__ import annotations

import random

import pytest
import torch

from hal.core.kernels.fingerprint import (
    BLOCK_BYTES,
    COLUMN_KEYS,
    COLUMNS,
    DIGEST_BYTES,
    KEYS,
    PRIME,
    blocks_of,
    fingerprint,
)
from hal.cpu.platform import CpuPlatform
from hal.errors import InvalidArgument

PLATFORM = CpuPlatform()


def digest_of(words: torch.Tensor) -> bytes:
    """Of 4-byte words, which have to begin at a multiple of 16."""
    return fingerprint(PLATFORM, 0, blocks_of([(words.data_ptr(), words.nbytes)]))


def random_words(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=generator)


def by_definition(words: list[int]) -> bytes:
    rows = -(-len(words) // COLUMNS)
    padded = words + [0] * (rows * COLUMNS - len(words))
    halves = []
    for k, s in zip(KEYS, COLUMN_KEYS, strict=True):
        total = len(words) * pow(k, rows, PRIME)
        for index, word in enumerate(padded):
            row, column = divmod(index, COLUMNS)
            total += pow(s, column, PRIME) * word * pow(k, rows - 1 - row, PRIME)
        halves.append((total % PRIME).to_bytes(8, "little"))
    return b"".join(halves)


@pytest.mark.parametrize("count", [1, 128, COLUMNS, COLUMNS + 1, 3 * COLUMNS + 256])
def test_it_is_what_its_definition_says(count: int) -> None:
    words = random_words(count)
    assert digest_of(words) == by_definition([word % 2**32 for word in words.tolist()])


def test_the_largest_words_do_not_overflow() -> None:
    words = torch.full((8 * COLUMNS,), -1, dtype=torch.int32)
    assert digest_of(words) == by_definition([2**32 - 1] * (8 * COLUMNS))


def test_every_bit_of_a_block_counts() -> None:
    words = random_words(300)
    seen = {digest_of(words)}
    for index in range(len(words)):
        for bit in range(32):
            flip = -(2**31) if bit == 31 else 1 << bit
            words[index] ^= flip
            seen.add(digest_of(words))
            words[index] ^= flip
    assert len(seen) == 1 + 32 * len(words)


def test_swaps_shifts_and_permutations_are_found() -> None:
    words = random_words(16 * COLUMNS)
    changed = [
        words.roll(1),
        words.roll(COLUMNS),
        words.flip(0),
        words.view(16, COLUMNS).flip(0).reshape(-1),
        words.view(16, COLUMNS).t().reshape(-1).contiguous(),
        words[torch.randperm(len(words), generator=torch.Generator().manual_seed(3))],
    ]
    pairs = random.Random(4)
    for _ in range(64):
        one, other = pairs.sample(range(len(words)), 2)
        swapped = words.clone()
        swapped[[one, other]] = words[[other, one]]
        changed.append(swapped)
    digests = {digest_of(tensor) for tensor in (words, *changed)}
    assert len(digests) == 1 + len(changed)


def test_zeros_of_different_lengths_differ() -> None:
    zeros = torch.zeros(4 * COLUMNS, dtype=torch.int32)
    assert len({digest_of(zeros[:count]) for count in range(1, 4 * COLUMNS, 97)}) == 43


def test_blocks_have_fingerprints_of_their_own() -> None:
    words = random_words(3 * BLOCK_BYTES // 4)
    words[BLOCK_BYTES // 4 : BLOCK_BYTES // 2] = words[: BLOCK_BYTES // 4]
    before = digest_of(words)
    assert len(before) == 3 * DIGEST_BYTES
    first, second, third = (before[i : i + DIGEST_BYTES] for i in (0, 16, 32))
    assert first == second != third
    words[-1] += 1
    after = digest_of(words)
    assert after[:32] == before[:32]
    assert after[32:] != before[32:]


@pytest.mark.parametrize(("offset", "size"), [(4, 16), (0, 6), (0, 0), (0, BLOCK_BYTES + 4)])
def test_blocks_that_it_cannot_read_are_refused(offset: int, size: int) -> None:
    words = random_words(64)
    with pytest.raises(InvalidArgument, match="blocks have up to"):
        fingerprint(PLATFORM, 0, [(words.data_ptr() + offset, size)])


def test_no_blocks_have_no_fingerprints() -> None:
    assert fingerprint(PLATFORM, 0, []) == b""


@pytest.mark.cuda
def test_the_device_computes_the_same_and_finds_one_element_in_64_gib() -> None:
    import hal

    platform = hal.detect("cuda")
    host = random_words(5 * COLUMNS + 512)
    there = host.to("cuda")
    assert fingerprint(platform, 0, [(there.data_ptr(), there.nbytes)]) == digest_of(host)
    gib = min(64, torch.cuda.mem_get_info()[0] // (1 << 30) - 4)
    large = torch.empty(gib << 30, dtype=torch.uint8, device="cuda").random_(
        generator=torch.Generator("cuda").manual_seed(5)
    )
    blocks = blocks_of([(large.data_ptr(), large.nbytes)])
    before = fingerprint(platform, 0, blocks)
    assert fingerprint(platform, 0, blocks) == before
    place = (gib << 30) // 3
    large[place] ^= 1
    after = fingerprint(platform, 0, blocks)
    differing = [
        index
        for index in range(len(blocks))
        if before[16 * index :][:16] != after[16 * index :][:16]
    ]
    assert differing == [place // BLOCK_BYTES]
