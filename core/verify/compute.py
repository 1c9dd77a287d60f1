"""What the reference engine computes on its device: batches, forward passes, sampling, decode.

Nothing here reads device memory from the host or brings host memory to the device, and what
outlives a call is written in place, so that every function can be captured into a graph. No
operator adds up in an order that may change from run to run: index writes never meet, and nothing
is accumulated by index. Equal inputs in equal batches give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.core.verify.model import Batch, LayerCache, Transformer
from hal.core.verify.sampler import logprobs, sample
from hal.core.verify.state import EngineConfig, RuntimeState, Workspace


@dataclass(frozen=True)
class Compute:
    """A model with the memory that it works in."""

    config: EngineConfig
    model: Transformer
    caches: tuple[LayerCache, ...]
    state: RuntimeState
    workspace: Workspace

    @classmethod
    def over(
        cls,
        config: EngineConfig,
        model: Transformer,
        pages: tuple[Tensor, ...],
        state: RuntimeState,
        workspace: Workspace,
    ) -> Compute:
        """All layers gather their context into the same scratch."""
        scratch = workspace.context_keys, workspace.context_values
        caches = tuple(LayerCache(keys, values, *scratch) for keys, values in pages)
        return cls(config, model, caches, state, workspace)

    def decode(self, count: int) -> Tensor:
        """One more token for each active row of the first `count` rows, the others being padding.

        Returns what `sampled` does; advances lengths, last tokens and steps of the active rows.
        """
        state, rows = self.state, self.state.padding_slots[:count]
        active, lengths = state.active[:count], state.lengths[:count]
        positions = (lengths * active).unsqueeze(1)
        slots = self.slots(state.block_tables[:count], positions)
        written = torch.where(active.unsqueeze(1), slots, rows.unsqueeze(1))
        lengths.add_(active)
        last = state.last_tokens[:count]
        logits = self.forward(self.batch(last.unsqueeze(1), positions, written, rows))
        sampled = self.sampled(logits, rows)
        last.copy_(torch.where(active, sampled[0], last))
        state.steps[:count].add_(active)
        return sampled

    def batch(self, tokens: Tensor, positions: Tensor, written: Tensor, rows: Tensor) -> Batch:
        """A batch of `rows`; beyond its length a row reads its first slot, which is written."""
        state = self.state
        offsets = state.context_offsets.expand(len(rows), -1)
        slots = self.slots(state.block_tables[rows], offsets)
        inside = offsets < state.lengths[rows].unsqueeze(1)
        context = torch.where(inside, slots, slots[:, :1])
        mask = state.context_offsets <= positions.unsqueeze(2)
        return Batch(tokens, positions, written, context, mask)

    def slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Cache slots of int64 [R, n] positions through block tables [R, blocks]."""
        size = self.config.block_size
        return tables.gather(1, positions // size) * size + positions % size

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R * Q, vocabulary], in the workspace: the next call overwrites them."""
        hidden = self.model(batch, self.caches).flatten(0, 1)
        return self.model.logits(hidden, out=self.workspace.logits)

    def sampled(self, logits: Tensor, rows: Tensor) -> Tensor:
        """int64 [2, n]: a token for each of n rows, and the bits of its log-probability."""
        tokens = sample(logits, self.state.sampler_rows(rows), self.state.sampler_tables)
        return torch.stack((tokens, logprob_bits(logits, tokens)))


def logprob_bits(logits: Tensor, tokens: Tensor) -> Tensor:
    """The bits of each float32 log-probability as int64, so that the host reads them exactly."""
    return logprobs(logits, tokens).view(torch.int32).long()
