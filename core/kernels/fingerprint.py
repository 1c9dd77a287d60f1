"""A 128-bit fingerprint of device memory, by which a sleep finds what has not changed.

A block of up to 4 MiB is a matrix of 4-byte words w[r][c] with 1024 columns, row by row, the last
row filled up with zeros. Modulo the prime p = 2^61 - 1, with the number n of words in front of
column 0, its fingerprint for a key (k, s) is

    sum over c of s^c * (n * [c = 0] * k^R + sum over r of w[r][c] * k^(R - 1 - r)),   R rows,

a polynomial in k and s whose coefficients are the words (a polynomial hash: Wegman and Carter, "New
hash functions and their use in authentication and set equality", JCSS 22, 1981). Two different
blocks of a size differ in a non-zero polynomial of degree below 2^12, which by the Schwartz-Zippel
lemma (Schwartz, JACM 27, 1980) vanishes for at most 2^12 / 2^58 of all keys, k being drawn from
[0, 2^58). Two independent keys make two halves of 61 bits: at most 2^-92 of all pairs of keys take
any two different blocks for equal.

The keys are fixed, the first digits of pi, so that fingerprints of different processes and
machines compare. So the bound holds for contents that were not made with the keys in mind: it finds
every accident, a flipped bit, a swap, a stale page, a changed element, and is no protection
against somebody who builds a collision on purpose.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from hal.errors import InvalidArgument
from hal.native import Fact, fingerprint_host_memory
from hal.platform import Platform
from hal.pools import torch_device

BLOCK_BYTES = 4 << 20
COLUMNS = 1024
DIGEST_BYTES = 16
PRIME = (1 << 61) - 1
_PI = 0x243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89
"""The first 256 bits of pi's fraction."""
KEYS = tuple((_PI >> shift) % (1 << 58) for shift in (192, 128))
COLUMN_KEYS = tuple((_PI >> shift) % PRIME for shift in (64, 0))

Range = tuple[int, int]
"""(address, size) in bytes."""


def blocks_of(ranges: Sequence[Range]) -> list[Range]:
    """The ranges, each cut into blocks from its beginning."""
    return [
        (address + offset, min(BLOCK_BYTES, size - offset))
        for address, size in ranges
        for offset in range(0, size, BLOCK_BYTES)
    ]


def why_not(platform: Platform, device: int) -> str:
    """Why memory of this device cannot be fingerprinted in place; "" when it can."""
    return "" if Fact.HOST_ACCESS in platform.device(device).facts.yes else _why_no_triton()


@functools.cache
def _why_no_triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "the fingerprint is a Triton kernel, and Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except RuntimeError as error:
        return f"the fingerprint is a Triton kernel, and Triton has no driver for it: {error}"
    return ""


def fingerprint(platform: Platform, device: int, blocks: Sequence[Range]) -> bytes:
    """The fingerprints of blocks of mapped memory, `DIGEST_BYTES` each.

    Addresses and sizes are in bytes, multiples of 4 and at most `BLOCK_BYTES` long. What was queued
    on the current stream before is in them; other streams the caller has waited for. Raises
    `InvalidArgument` for other sizes.
    """
    for address, size in blocks:
        if address % 16 or size % 4 or not 0 < size <= BLOCK_BYTES:
            raise InvalidArgument(
                f"a block of {size} bytes at {address:#x}: blocks have up to {BLOCK_BYTES} bytes, "
                "in steps of 4, and begin at a multiple of 16"
            )
    if not blocks:
        return b""
    table = torch.tensor(blocks, dtype=torch.int64)
    if Fact.HOST_ACCESS in platform.device(device).facts.yes:
        digests = _on_host(table)
    else:
        digests = _on_device(table, torch_device(platform, device))
    return ctypes.string_at(digests.data_ptr(), digests.nbytes)


def warm_up(platform: Platform, device: int) -> None:
    """Compile what has to be compiled, so that the first sleep need not wait for it."""
    if Fact.HOST_ACCESS not in platform.device(device).facts.yes:
        some = torch.zeros(COLUMNS, dtype=torch.int32, device=torch_device(platform, device))
        fingerprint(platform, device, [(some.data_ptr(), some.nbytes)])


def _on_host(table: Tensor) -> Tensor:
    digests = torch.empty_like(table)
    fingerprint_host_memory(
        ctypes.c_void_p(table.data_ptr()),
        len(table),
        (*KEYS, *COLUMN_KEYS),
        ctypes.c_void_p(digests.data_ptr()),
    )
    return digests


def _on_device(table: Tensor, where: torch.device) -> Tensor:
    from hal.core.kernels.fingerprint_triton import fingerprint_kernel

    words = table // torch.tensor([1, 4])
    digests = torch.empty(table.shape, dtype=torch.int64, device=where)
    with torch.accelerator.device_index(where.index or 0):
        fingerprint_kernel[(len(table),)](
            words.to(where),
            _weights(where),
            digests,
            COLUMNS=COLUMNS,
            KEY_0=KEYS[0],
            KEY_1=KEYS[1],
            num_warps=8,
        )
    return digests.cpu()


@functools.cache
def _weights(where: torch.device) -> Tensor:
    """The powers of the column keys, int64 [2, COLUMNS]."""
    powers = [[1] * COLUMNS for _ in COLUMN_KEYS]
    for row, key in zip(powers, COLUMN_KEYS, strict=True):
        for column in range(1, COLUMNS):
            row[column] = row[column - 1] * key % PRIME
    return torch.tensor(powers, dtype=torch.int64).to(where)
