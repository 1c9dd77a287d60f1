"""The MLPs of the reference engine's models: one for all tokens, or experts behind a router."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hal.core.verify.config import ModelConfig
from hal.core.verify.layers import Linear, parameter, tensor


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden, 2 * config.mlp)
        self.down = Linear(config.mlp, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return tensor(self.down(nn.functional.silu(gate) * up))


class Experts(nn.Module):
    """A mixture of SwiGLU experts: each token goes to the most likely few.

    `placement` maps logical to physical experts, int64 [experts]: a plain attribute that no module
    registers and no checkpoint has, as in engines that balance experts. Every expert computes every
    token, so that nothing is accumulated by index and shapes never depend on values.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(config.hidden, config.experts)
        self.gate_up = parameter(config.experts, config.hidden, 2 * config.mlp)
        self.down = parameter(config.experts, config.mlp, config.hidden)
        self.placement = torch.arange(config.experts).roll(1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gate, up = (tokens @ self.gate_up).chunk(2, dim=-1)
        outputs = (nn.functional.silu(gate) * up) @ self.down
        weights = self._weights(tokens).t().unsqueeze(-1)
        return (outputs * weights).sum(0).view_as(x)

    def _weights(self, tokens: Tensor) -> Tensor:
        """How much each physical expert counts for each token: [tokens, experts]."""
        chances, logical = self.router(tokens).softmax(-1).topk(self.config.experts_per_token)
        chances = chances / chances.sum(-1, keepdim=True)
        nothing = torch.zeros(len(tokens), self.config.experts, device=tokens.device)
        return nothing.scatter(1, self.placement[logical], chances)
