"""The reference engine's sizes and tensors: cache pages, runtime state and workspace."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from hal.core.verify.model import ModelConfig
from hal.core.verify.requests import Shape
from hal.core.verify.sampler import SamplerRows, SamplerTables
from hal.errors import StateError

_SMALLEST_DECODE = 8


@dataclass(frozen=True)
class EngineConfig:
    """Sizes: rows that decode together, rows that prefill together, and the paged cache."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rows: int = 64
    prefill_rows: int = 16
    prompt_tokens: int = 24
    output_tokens: int = 8
    block_size: int = 8
    blocks: int = 2001
    seed: int = 0
    reject_while_asleep: bool = False
    """Refuse a request that arrives while asleep, instead of queueing it until the wake."""

    def __post_init__(self) -> None:
        needed = self.rows * self.request_blocks
        if self.blocks < needed or not 1 <= self.prefill_rows <= self.rows:
            raise StateError(
                f"{self.rows} rows need {needed} KV blocks and 1 to {self.rows} prefill rows; "
                f"there are {self.blocks} and {self.prefill_rows}"
            )

    @property
    def request_blocks(self) -> int:
        """Blocks that the longest request takes."""
        return -(-(self.prompt_tokens + self.output_tokens) // self.block_size)

    @property
    def context(self) -> int:
        """Tokens that one request's blocks can hold."""
        return self.request_blocks * self.block_size

    @property
    def widest_batch(self) -> int:
        """Tokens of the larger of the two kinds of batch, padding included."""
        return max(self.rows, self.prefill_rows * self.prompt_tokens)

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """The batch sizes of decode steps: doubling up to all rows."""
        doubled = (_SMALLEST_DECODE << step for step in range(self.rows.bit_length()))
        return (*(size for size in doubled if size < self.rows), self.rows)

    def decode_size(self, rows: int) -> int:
        """The smallest decode size that holds the first `rows` rows."""
        return next(size for size in self.decode_sizes if size >= rows)

    @property
    def padding_blocks(self) -> int:
        """The first blocks, where padding is written: a slot a token, so no two writes meet."""
        return -(-self.widest_batch // self.block_size)

    @property
    def usable_blocks(self) -> range:
        return range(self.padding_blocks, self.padding_blocks + self.blocks)

    @property
    def shape(self) -> Shape:
        """The workload that fits."""
        return Shape(self.model.vocabulary, (4, self.prompt_tokens), (4, self.output_tokens))


def make_pages(config: EngineConfig, device: torch.device) -> tuple[Tensor, ...]:
    """The KV cache, one allocation a layer: float32 [2 (K, V), slots, kv_heads, head_size]."""
    slots = config.usable_blocks.stop * config.block_size
    shape = (2, slots, config.model.kv_heads, config.model.head_size)
    return tuple(torch.zeros(shape, device=device) for _ in range(config.model.layers))


@dataclass(frozen=True)
class RuntimeState:
    """What KV-init makes beside the cache.

    For N rows, P prefill rows, Q prompt tokens and C context tokens.     block_tables: int64 [N, C
    / block_size]; lengths (tokens in the cache), last_tokens, seeds, steps, top_k: int64 [N];
    temperature, top_p: float32 [N]; active: bool [N]; prefill_tokens, prefill_slots: int64 [P, Q];
    the rest are constants.
    """

    block_tables: Tensor
    lengths: Tensor
    last_tokens: Tensor
    active: Tensor
    seeds: Tensor
    steps: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    prefill_tokens: Tensor
    prefill_slots: Tensor
    context_offsets: Tensor
    prompt_offsets: Tensor
    padding_slots: Tensor
    ranks: Tensor
    triangle: Tensor

    @classmethod
    def build(cls, config: EngineConfig, device: torch.device) -> RuntimeState:
        """Allocate on `device`, in whatever pool scope is open."""
        tables = SamplerTables.build(device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            block_tables=integers(config.rows, config.request_blocks),
            lengths=integers(config.rows),
            last_tokens=integers(config.rows),
            active=torch.zeros(config.rows, dtype=torch.bool, device=device),
            seeds=integers(config.rows),
            steps=integers(config.rows),
            temperature=torch.ones(config.rows, device=device),
            top_k=integers(config.rows),
            top_p=torch.ones(config.rows, device=device),
            prefill_tokens=integers(config.prefill_rows, config.prompt_tokens),
            prefill_slots=integers(config.prefill_rows, config.prompt_tokens),
            context_offsets=torch.arange(config.context, device=device),
            prompt_offsets=torch.arange(config.prompt_tokens, device=device),
            padding_slots=torch.arange(config.widest_batch, device=device),
            ranks=tables.ranks,
            triangle=tables.triangle,
        )

    @property
    def sampler_tables(self) -> SamplerTables:
        return SamplerTables(self.ranks, self.triangle)

    def sampler_rows(self, rows: Tensor) -> SamplerRows:
        """The sampling parameters of int64 [n] rows."""
        columns = (self.seeds, self.steps, self.temperature, self.top_k, self.top_p)
        return SamplerRows(*(column[rows] for column in columns))


@dataclass(frozen=True)
class Workspace:
    """Scratch, unzeroed by contract, float32.

    logits: [widest_batch, vocabulary]; context_keys, context_values: [N * C, kv_heads, head_size].
    """

    logits: Tensor
    context_keys: Tensor
    context_values: Tensor

    @classmethod
    def build(cls, config: EngineConfig, device: torch.device) -> Workspace:
        """Allocate on `device`, in whatever pool scope is open."""
        model = config.model
        context = (config.rows * config.context, model.kv_heads, model.head_size)
        return cls(
            torch.empty(config.widest_batch, model.vocabulary, device=device),
            torch.empty(context, device=device),
            torch.empty(context, device=device),
        )


def named_tensors(holder: RuntimeState | Workspace) -> dict[str, Tensor]:
    """The tensors of a state by field name."""
    return {entry.name: getattr(holder, entry.name) for entry in fields(holder)}
