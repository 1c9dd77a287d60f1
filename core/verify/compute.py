"""What the reference engine computes on its device: batches, forward passes, sampling, decode.

Nothing here reads device memory from the host or brings host memory to the device, and what
outlives a call is written in place, so that every function can be captured into a graph. No
operator adds up in an order that may change from run to run: index writes never meet, and nothing
is accumulated by index. Equal inputs in equal batches give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hal.core.verify.layers import Batch, PagedQueries
from hal.core.verify.model import Draft, LayerCache, Transformer
from hal.core.verify.sampler import SamplerRows, logprobs, sample
from hal.core.verify.state import CacheMemory, EngineConfig, RuntimeState, Workspace


@dataclass(frozen=True)
class Models:
    """The model, and the draft that guesses for it, if there is one."""

    target: Transformer
    draft: Draft | None = None

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """Every parameter, buffer and plain tensor attribute by name."""
        found: dict[str, Tensor] = {}
        for prefix, module in (("", self.target), ("draft.", self.draft)):
            if module is not None:
                named = [*module.named_parameters(), *module.named_buffers()]
                named += module.unregistered().items()
                found |= {prefix + name: tensor for name, tensor in named}
        return found

    def in_no_checkpoint(self) -> dict[str, Tensor]:
        """Buffers, adapters and maps: what a load leaves alone."""
        loaded = {id(each) for each in self.target.parameters()}
        loaded |= {id(each) for each in self.draft.parameters()} if self.draft else set()
        return {name: tensor for name, tensor in self.named.items() if id(tensor) not in loaded}

    def load(self, seed: int) -> None:
        """Fill the parameters from the checkpoint of `seed`."""
        self.target.load(seed)
        if self.draft:
            self.draft.load()

    def load_adapters(self, seed: int) -> None:
        """Fill the adapters, which is done once: they are in no checkpoint."""
        self.target.load_adapters(seed)
        if self.draft:
            self.draft.load_adapters()


@dataclass(frozen=True)
class Compute:
    """Models with the memory that they work in."""

    config: EngineConfig
    models: Models
    caches: tuple[LayerCache, ...]
    draft_cache: LayerCache | None
    state: RuntimeState
    workspace: Workspace

    @classmethod
    def over(
        cls,
        config: EngineConfig,
        models: Models,
        memory: CacheMemory,
        state: RuntimeState,
        workspace: Workspace,
    ) -> Compute:
        """Compute with these models in this memory."""
        caches = tuple(workspace.cache_over(config, layer) for layer in memory.layers)
        draft = workspace.cache_over(config, memory.draft) if memory.draft is not None else None
        return cls(config, models, caches, draft, state, workspace)

    # -- decode

    def decode(self, count: int) -> Tensor:
        """One more token for each active row of the first `count` rows, the others being padding.

        Returns what `sampled` does; advances lengths, last tokens and steps of the active rows.
        With a draft, several tokens: see `_speculate`.
        """
        if self.models.draft is not None:
            return self._speculate(count)
        state, rows = self.state, self.state.padding_slots[:count]
        active, lengths = state.active[:count], state.lengths[:count]
        last = state.last_tokens[:count]
        logits = self.forward(self._step(last.unsqueeze(1), 0, active.unsqueeze(1)))
        sampled = self.sampled(logits, rows)
        lengths.add_(active)
        last.copy_(torch.where(active, sampled[0], last))
        state.steps[:count].add_(active)
        return sampled

    def _step(self, tokens: Tensor, ahead: int, counted: Tensor) -> Batch:
        """A decode batch: int64 [R, Q] tokens that follow `ahead` tokens after the first R rows'
        cache. `counted`: bool [R, Q], what enters recurrent states.
        """
        count, width = tokens.shape
        state, rows = self.state, self.state.padding_slots[:count]
        active = state.active[:count].unsqueeze(1)
        ahead_of = state.lengths[:count].unsqueeze(1) + ahead + state.context_offsets[:width]
        positions = ahead_of * active
        slots = self.slots(state.block_tables[:count], positions)
        padding = state.padding_slots[: count * width].view(count, width)
        written = torch.where(active, slots, padding)
        seen = (ahead_of + 1) * active
        batch = self.batch(
            tokens, positions, written, rows, seen[:, -1], ~state.active[:count], counted
        )
        return replace(batch, paged=self._paged(seen))

    def _paged(self, seen: Tensor) -> PagedQueries:
        """The queries of the first R rows, which see int64 [R, Q] tokens each."""
        tables = self.state.block_tables[: len(seen)].int()
        return PagedQueries(tables.repeat_interleave(seen.shape[1], 0), seen.int().flatten())

    def _speculate(self, count: int) -> Tensor:
        """Guess with the draft, check all guesses in one step of the model, and keep what it would
        have said itself.

        A draw depends on a request's seed and step alone, so a guess is right when it is what the
        model draws there, and outputs do not depend on the draft. Returns int64 [1 + 2 * T, count]
        for T tokens a step: how many count, the tokens, the bits of their log-probabilities.
        """
        state, most = self.state, self.config.step_tokens
        active = state.active[:count]
        guesses = self._guess(count)
        none_counts = torch.zeros_like(guesses, dtype=torch.bool)
        logits = self.forward(self._step(guesses, 0, none_counts))
        rows = state.padding_slots[:count].repeat_interleave(most)
        ahead = state.context_offsets[:most].repeat(count)
        sampled = self.sampled(logits, rows, ahead).view(2, count, most)
        right = (guesses[:, 1:] == sampled[0, :, :-1]).long().cumprod(1)
        kept = (right.sum(1) + 1) * active
        if self._has_states:  # again, now that it is known which tokens enter them
            counted = state.context_offsets[:most] < kept.unsqueeze(1)
            self.forward(self._step(guesses, 0, counted))
        last = sampled[0].gather(1, (kept - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        state.last_tokens[:count].copy_(torch.where(active, last, state.last_tokens[:count]))
        state.lengths[:count].add_(kept)
        state.steps[:count].add_(kept)
        return torch.cat((kept.unsqueeze(0), sampled[0].t(), sampled[1].t()))

    @property
    def _has_states(self) -> bool:
        model = self.config.model
        return any(map(model.is_recurrent, range(model.layers)))

    def _guess(self, count: int) -> Tensor:
        """The last tokens and the draft's guesses after them: int64 [count, T].

        One step more than there are guesses, so that the draft has cached each of them.
        """
        tokens = [self.state.last_tokens[:count]]
        nothing = self.state.active[:count].unsqueeze(1)
        for ahead in range(self.config.step_tokens):
            logits = self.guess(self._step(tokens[-1].unsqueeze(1), ahead, nothing))
            tokens.append(logits.argmax(-1))
        return torch.stack(tokens[: self.config.step_tokens], dim=1)

    # -- batches

    def batch(
        self,
        tokens: Tensor,
        positions: Tensor,
        written: Tensor,
        rows: Tensor,
        known: Tensor,
        fresh: Tensor,
        counted: Tensor,
    ) -> Batch:
        """A batch of int64 [R] rows, of which the cache holds `known` tokens once it is written.

        Beyond them a row reads its first slot, which always is. `fresh`: bool [R], rows whose
        recurrent states begin; `counted`: bool [R, Q], tokens that enter them.
        """
        state = self.state
        offsets = state.context_offsets.expand(len(rows), -1)
        slots = self.slots(state.block_tables[rows], offsets)
        context = torch.where(offsets < known.unsqueeze(1), slots, slots[:, :1])
        mask = state.context_offsets <= positions.unsqueeze(2)
        states = state.state_slots(rows, fresh, counted)
        return Batch(tokens, positions, written, context, mask, states, state.adapters[rows])

    def slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Cache slots of int64 [R, n] positions through block tables [R, blocks]."""
        size = self.config.block_size
        return tables.gather(1, positions // size) * size + positions % size

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R * Q, vocabulary], in the workspace: the next call overwrites them."""
        hidden = self.models.target(batch, self.caches).flatten(0, 1)
        return self.models.target.logits(hidden, out=self.workspace.logits)

    def guess(self, batch: Batch) -> Tensor:
        """The draft's logits, in the same place."""
        draft, cache = self.models.draft, self.draft_cache
        if draft is None or cache is None:
            return self.workspace.logits[:0]
        hidden = draft(batch, cache).flatten(0, 1)
        return self.models.target.logits(hidden, out=self.workspace.logits)

    # -- sampling

    def sampled(self, logits: Tensor, rows: Tensor, ahead: Tensor | None = None) -> Tensor:
        """int64 [2, n]: a token for each of n rows, `ahead` steps on, and the bits of its
        log-probability.
        """
        drawn = self.state.sampler_rows(rows)
        if ahead is not None:
            columns = drawn.seeds, drawn.steps + ahead
            drawn = SamplerRows(*columns, drawn.temperature, drawn.top_k, drawn.top_p)
        tokens = sample(logits, drawn, self.workspace.kernels)
        return torch.stack((tokens, logprob_bits(logits, tokens)))


def logprob_bits(logits: Tensor, tokens: Tensor) -> Tensor:
    """The bits of each float32 log-probability as int64, so that the host reads them exactly."""
    return logprobs(logits, tokens).view(torch.int32).long()


def emitted(sampled: Sequence[Sequence[int]], index: int) -> list[tuple[int, int]]:
    """The (token, log-probability bits) of one row in what a decode step returned."""
    if len(sampled) == 2:
        return [(sampled[0][index], sampled[1][index])]
    most, count = len(sampled) // 2, sampled[0][index]
    tokens, bits = sampled[1 : 1 + most], sampled[1 + most :]
    return [(tokens[step][index], bits[step][index]) for step in range(count)]
