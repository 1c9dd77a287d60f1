"""What the reference engine's models are made of: linear maps, norms and rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """One forward pass of R rows with Q query tokens each over at most C tokens of context.

    tokens, positions, write_slots: int64 [R, Q], the slots distinct; context_slots: int64 [R, C];
    mask: bool [R, Q, C], True where a query may look. `states` says where recurrent layers read and
    write, `adapters`: int64 [R] which adapter serves a row. `paged` is there in decode steps alone.
    """

    tokens: Tensor
    positions: Tensor
    write_slots: Tensor
    context_slots: Tensor
    mask: Tensor
    states: StateSlots
    adapters: Tensor
    paged: PagedQueries | None = None


@dataclass(frozen=True)
class PagedQueries:
    """A decode step for kernels that take one query a request: each of N = R * Q queries is one.

    tables: int32 [N, blocks]; lengths: int32 [N], the tokens that a query sees, 0 for padding.
    """

    tables: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class StateSlots:
    """Recurrent states of R rows: int64 [R] slots to read and (distinct) to write.

    fresh: bool [R], rows that begin with an empty state whatever the slot holds; counted: bool
    [R, Q], the tokens of a row that enter its state, which come first.
    """

    read: Tensor
    write: Tensor
    fresh: Tensor
    counted: Tensor


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter: a load follows."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def tensor(value: Any) -> Tensor:
    """The result of a module, which torch leaves untyped."""
    return cast("Tensor", value)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        return x * scale * self.weight


class Linear(nn.Module):
    """x @ weight.T, without a bias and without an initialisation that a load would overwrite."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class AdaptedLinear(Linear):
    """A linear map, to which each row's low-rank adapter is added.

    The stacked adapters are plain attributes, as engines hold them: no module's parameters or
    buffers, and in no checkpoint of the model.
    """

    def __init__(self, inputs: int, outputs: int, adapters: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.down = torch.empty(adapters, rank, inputs)
        self.up = torch.empty(adapters, outputs, rank)

    def adapted(self, x: Tensor, adapters: Tensor) -> Tensor:
        """[R, Q, inputs] to [R, Q, outputs], by int64 [R] adapters."""
        low = x @ self.down[adapters].transpose(1, 2)
        return tensor(self(x)) + low @ self.up[adapters].transpose(1, 2)


class Rotary(nn.Module):
    """Rotary position tables; buffers that are in no checkpoint, as engines build them."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, size: int, positions: int, base: float) -> None:
        super().__init__()
        half = size // 2
        inverse = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse)
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of int64 [R, Q] positions: [R, Q, 1, size / 2]."""
        return self.cosine[positions].unsqueeze(2), self.sine[positions].unsqueeze(2)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the halves of [R, Q, heads, size] against each other."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
