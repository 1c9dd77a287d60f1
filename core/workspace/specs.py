"""What scratch is asked for, and how views of one buffer serve several requests at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hal.caching import round_up
from hal.errors import InvalidArgument

ALIGNMENT = 256
"""Bytes: every view begins at a multiple of it."""


class TensorSpec(NamedTuple):
    """A contiguous tensor that is wanted; a plain (shape, dtype) pair does as well."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


SpecLike: TypeAlias = tuple[Sequence[int], torch.dtype]


def as_specs(specs: Iterable[SpecLike]) -> tuple[TensorSpec, ...]:
    """The specs of an argument; `InvalidArgument` for a negative size."""
    return tuple(_checked(TensorSpec(tuple(shape), dtype)) for shape, dtype in specs)


def _checked(spec: TensorSpec) -> TensorSpec:
    if any(size < 0 for size in spec.shape):
        raise InvalidArgument(f"scratch of shape {list(spec.shape)} is asked for: a negative size")
    return spec


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of one buffer that holds all of these tensors, each at its own aligned offset."""
    return sum(round_up(spec.bytes, ALIGNMENT) for spec in specs)


def carve(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Views of a uint8 buffer, one a spec, that do not overlap."""
    ends = list(accumulate(round_up(spec.bytes, ALIGNMENT) for spec in specs))
    starts = [0, *ends[:-1]]
    return [_view(buffer, start, spec) for start, spec in zip(starts, specs, strict=True)]


def _view(buffer: Tensor, start: int, spec: TensorSpec) -> Tensor:
    return buffer[start : start + spec.bytes].view(spec.dtype).view(spec.shape)


def aligned_buffer(size: int, device: torch.device) -> Tensor:
    """Uninitialised uint8 [size] at an aligned address, of exactly that size where the allocator
    aligns by itself.
    """
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    if buffer.data_ptr() % ALIGNMENT == 0:
        return buffer
    buffer = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -buffer.data_ptr() % ALIGNMENT
    return buffer[skip : skip + size]
