"""The merge of partial attention results over shards of the context, by their log-sum-exp.

A kernel's log-sum-exp is in base 2 or in base e, and nothing in the numbers tells which: the base
is declared with each call. A shard without a token weighs exactly nothing, whatever its kernel left
in its output.
"""

from __future__ import annotations

import enum
import math

import torch
import torch.distributed as dist
from torch import Tensor

from hal.core.kernels.gather import all_gather
from hal.errors import InvalidArgument


class LogBase(enum.Enum):
    """The base of a kernel's log-sum-exp."""

    TWO = "2"
    E = "e"


def merge_attention(
    outputs: Tensor, lse: Tensor, *, base: LogBase, empty: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all of S shards, and its log-sum-exp in the same base.

    outputs: [S, ..., D], each normalised by itself; lse: float32 [S, ...]; empty: bool,
    broadcastable to [S, ...], True for shards that hold no token of a row, for kernels that do not
    write -inf there. Returns [..., D] in the outputs' dtype and float32 [...]; rows that no shard
    has a token of are 0 and -inf.
    """
    weights, total = _weights(lse, base, empty)
    return _weighted(outputs, weights).sum(0).to(outputs.dtype), total


def merge_attention_across(
    output: Tensor,
    lse: Tensor,
    group: dist.ProcessGroup,
    *,
    base: LogBase,
    empty: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge_attention` of one shard a rank: output [..., D], lse float32 [...], empty bool [...].

    Every rank gets the whole result.
    """
    own = _masked(lse, empty).contiguous()
    shards = own.new_empty(dist.get_world_size(group), *own.shape)
    all_gather(shards, own, group)
    weights, total = _weights(shards, base, None)
    part = _weighted(output, weights[dist.get_rank(group)]).contiguous()
    dist.all_reduce(part, group=group)
    return part.to(output.dtype), total


def _masked(lse: Tensor, empty: Tensor | None) -> Tensor:
    """float32 log-sum-exp with -inf for what is empty or not a number."""
    known = lse.float().masked_fill(lse.isnan(), -torch.inf)
    return known if empty is None else known.masked_fill(empty, -torch.inf)


def _weights(lse: Tensor, base: LogBase, empty: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each shard's share [S, ...], 0 for an empty one, and the total log-sum-exp [...]."""
    if not isinstance(base, LogBase):
        raise InvalidArgument(
            f"base={base!r}: say whether the kernel's log-sum-exp is LogBase.TWO or LogBase.E"
        )
    natural = _masked(lse, empty) * (math.log(2) if base is LogBase.TWO else 1.0)
    total = natural.logsumexp(0)
    shares = (natural - total).exp().masked_fill(natural == -torch.inf, 0.0)
    return shares, total / math.log(2) if base is LogBase.TWO else total


def _weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """float32 outputs times their weights; 0 where the weight is 0, even for NaN."""
    share = weights.unsqueeze(-1)
    return torch.where(share > 0, outputs.float() * share, 0.0)
