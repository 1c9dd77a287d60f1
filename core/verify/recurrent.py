"""A recurrent layer: retention, whose state a request carries from token to token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hal.core.verify.config import ModelConfig
from hal.core.verify.layers import Batch, Linear, StateSlots, tensor


class Retention(nn.Module):
    """out_n = q_n S_n with S_n = decay * S_(n-1) + k_n v_n, for all tokens of a batch at once.

    The parallel form of retention (Sun et al., Retentive Network, section 2.1). Decays are buffers
    that no checkpoint has. States: float32 [slots, heads, head_size, head_size].
    """

    log_decay: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mix = Linear(config.hidden, 3 * config.heads * config.head_size)
        self.output = Linear(config.heads * config.head_size, config.hidden)
        decay = 1 - 2.0 ** (-3.0 - torch.arange(config.heads, dtype=torch.float32))
        self.register_buffer("log_decay", decay.log(), persistent=False)

    def forward(self, x: Tensor, batch: Batch, states: Tensor) -> Tensor:
        c, slots = self.config, batch.states
        rows, width = batch.tokens.shape
        mixed = self.mix(x).view(rows, width, 3, c.heads, c.head_size).permute(2, 0, 3, 1, 4)
        queries, keys, values = mixed
        keys = keys * c.head_size**-0.5
        before = self._before(states, slots)
        out = self._within(queries, keys, values) + self._carried(queries, before)
        states.index_copy_(0, slots.write, self._after(before, keys, values, slots.counted))
        return tensor(self.output(out.transpose(1, 2).flatten(2)))

    def _before(self, states: Tensor, slots: StateSlots) -> Tensor:
        """States [R, heads, d, d]; a fresh row's is zero, and not what its slot happens to hold."""
        fresh = slots.fresh.view(-1, 1, 1, 1)
        return torch.where(fresh, 0.0, states.index_select(0, slots.read))

    def _within(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What earlier tokens of the same batch add: [R, heads, Q, d]."""
        offsets = self._offsets(queries.shape[2], queries.device)
        distance = offsets.unsqueeze(1) - offsets
        decay = (self.log_decay.view(-1, 1, 1) * distance).exp()
        decay = torch.where(distance >= 0, decay, 0.0)
        return ((queries @ keys.transpose(2, 3)) * decay) @ values

    def _carried(self, queries: Tensor, before: Tensor) -> Tensor:
        steps = self._offsets(queries.shape[2], queries.device) + 1
        decay = (self.log_decay.view(-1, 1) * steps).exp().unsqueeze(-1)
        return (queries @ before) * decay

    def _after(self, before: Tensor, keys: Tensor, values: Tensor, counted: Tensor) -> Tensor:
        """States after the counted tokens, which are the first of each row."""
        offsets = self._offsets(keys.shape[2], keys.device)
        total = counted.sum(1, keepdim=True)
        log_decay = self.log_decay.view(1, -1, 1)
        weights = (log_decay * (total - 1 - offsets).unsqueeze(1)).exp()
        weights = torch.where(counted.unsqueeze(1), weights, 0.0).unsqueeze(-1)
        kept = (log_decay * total.unsqueeze(1)).exp().unsqueeze(-1)
        return before * kept + (keys * weights).transpose(2, 3) @ values

    @staticmethod
    def _offsets(count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device, dtype=torch.float32)
