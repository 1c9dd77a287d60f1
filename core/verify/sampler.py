"""Seeded top-k/top-p sampling: a draw depends on a request's seed and step, on no neighbour."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CANDIDATES = 64
"""The largest top-k: only so many of the most likely tokens are ever drawn from."""

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014),
# its constants as signed 64-bit numbers.
_GAMMA, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@dataclass(frozen=True)
class SamplerRows:
    """Parameters of N rows: seeds, steps, top_k int64 [N]; temperature, top_p float32 [N]."""

    seeds: Tensor
    steps: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


@dataclass(frozen=True)
class SamplerTables:
    """Constants for K candidates: ranks int64 [K]; triangle float32 [K, K].

    The product of probabilities and the triangle is their running sum, for which some devices have
    no deterministic kernel of its own.
    """

    ranks: Tensor
    triangle: Tensor

    @classmethod
    def build(cls, device: torch.device) -> SamplerTables:
        return cls(
            torch.arange(CANDIDATES, device=device),
            torch.ones(CANDIDATES, CANDIDATES, device=device).triu_(),
        )


def sample(logits: Tensor, rows: SamplerRows, tables: SamplerTables) -> Tensor:
    """One token a row, int64 [N], from logits [N, vocabulary]."""
    scores, tokens = logits.topk(CANDIDATES, dim=-1)
    scores = scores / rows.temperature.unsqueeze(1)
    outside_k = tables.ranks >= rows.top_k.unsqueeze(1)
    chances = scores.masked_fill(outside_k, float("-inf")).softmax(-1)
    before = chances @ tables.triangle - chances
    chances = chances.masked_fill(before >= rows.top_p.unsqueeze(1), 0.0)
    running = chances @ tables.triangle
    drawn = uniform(rows.seeds, rows.steps).unsqueeze(1) * running[:, -1:]
    rank = (running <= drawn).sum(-1, keepdim=True)
    last = (chances > 0).sum(-1, keepdim=True) - 1  # rounding may put the draw on the total itself
    return tokens.gather(1, torch.minimum(rank, last).clamp_min_(0)).squeeze(1)


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """float32 in [0, 1) from int64 seeds and steps: splitmix64's output, its 24 highest bits."""
    state = seeds + (steps + 1) * _GAMMA
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return _shift(state ^ _shift(state, 31), 40).float() / (1 << 24)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's own extends the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits)[token] for logits [N, vocabulary] and tokens int64 [N]."""
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return chosen - logits.logsumexp(-1)
