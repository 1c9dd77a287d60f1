"""Seeded top-k/top-p sampling: a draw depends on a request's seed and step, on no neighbour."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hal.core.kernels.topk_topp import draw_bits, sample_top_k_top_p
from hal.core.workspace import WorkspaceManager


@dataclass(frozen=True)
class SamplerRows:
    """Parameters of N rows: seeds, steps, top_k int64 [N]; temperature, top_p float32 [N]."""

    seeds: Tensor
    steps: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


def sample(logits: Tensor, rows: SamplerRows, kernels: WorkspaceManager) -> Tensor:
    """One token a row, int64 [N], from logits [N, vocabulary]; scratch is that of `kernels`."""
    scores = logits / rows.temperature.unsqueeze(1)
    draws = draw_bits(rows.seeds, rows.steps)
    return sample_top_k_top_p(scores, rows.top_k, rows.top_p, draws, workspace=kernels)


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits)[token] for logits [N, vocabulary] and tokens int64 [N]."""
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return chosen - logits.logsumexp(-1)
