"""The reference engine's sizes and tensors: cache pages, runtime state and workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hal.core.kernels.mla_decode import reserve_mla_decode
from hal.core.kernels.topk_topp import reserve_topk_topp
from hal.core.sleep import SleepManager
from hal.core.tags import WORKSPACE
from hal.core.verify.attention import PagedCache
from hal.core.verify.config import Architecture, ModelConfig
from hal.core.verify.layers import StateSlots
from hal.core.verify.model import LayerCache
from hal.core.verify.requests import Shape
from hal.core.verify.sampler import SamplerRows
from hal.core.workspace import WorkspaceManager
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
    draft_tokens: int = 0
    """Tokens that a draft model guesses before each step of the model; 0: there is no draft."""
    prefill_chunk: int | None = None
    """Prompt tokens of one prefill step, between which running requests decode; None: all."""
    connector_blocks: int = 0
    """Blocks that a KV connector stages in a pool of its own; 0: there is no connector."""
    state_inside: bool = True
    """Whether the state that goes with the cache is made inside KV initialisation or before it."""

    def __post_init__(self) -> None:
        needed = self.rows * self.request_blocks
        if self.blocks < needed or not 1 <= self.prefill_rows <= self.rows:
            raise StateError(
                f"{self.rows} rows need {needed} KV blocks and 1 to {self.rows} prefill rows; "
                f"there are {self.blocks} and {self.prefill_rows}"
            )
        if self.prompt_tokens % self.chunk:
            raise StateError(
                f"chunks of {self.chunk} prompt tokens do not fill {self.prompt_tokens}"
            )

    @property
    def request_blocks(self) -> int:
        """Blocks that the longest request takes."""
        return -(-self.tokens_of(self.prompt_tokens, self.output_tokens) // self.block_size)

    def tokens_of(self, prompt: int, output: int) -> int:
        """Cache slots of a request: a step of a draft may run past its end."""
        return prompt + output + (self.draft_tokens + 1 if self.draft_tokens else 0)

    @property
    def chunk(self) -> int:
        """Prompt tokens of one prefill step."""
        return self.prefill_chunk or self.prompt_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens that one decode step computes of a row."""
        return self.draft_tokens + 1

    @property
    def context(self) -> int:
        """Tokens that one request's blocks can hold."""
        return self.request_blocks * self.block_size

    @property
    def widest_batch(self) -> int:
        """Tokens of the larger of the two kinds of batch, padding included."""
        return max(self.rows * self.step_tokens, self.prefill_rows * self.chunk)

    @property
    def sampled_rows(self) -> int:
        """Tokens that are sampled at once, at most."""
        return max(self.rows * self.step_tokens, self.prefill_rows)

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


@dataclass(frozen=True)
class CacheMemory:
    """The KV cache, one allocation a layer, the draft's last.

    Grouped attention: [2 (K, V), slots, kv_heads, head_size]; latent: [blocks, block_size, latent +
    rotary]; a recurrent layer's states: float32 [2 * rows, heads, head_size, head_size], the second
    half for padding.
    """

    layers: tuple[Tensor, ...]
    draft: Tensor | None = None

    @classmethod
    def build(cls, config: EngineConfig, device: torch.device) -> CacheMemory:
        """Allocate on `device`, in whatever pool scope is open."""
        recurrent = [config.model.is_recurrent(layer) for layer in range(config.model.layers)]
        layers = tuple(
            _states(config, device) if is_recurrent else _pages(config, device)
            for is_recurrent in recurrent
        )
        return cls(layers, _pages(config, device) if config.draft_tokens else None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every allocation."""
        return self.layers if self.draft is None else (*self.layers, self.draft)


def _states(config: EngineConfig, device: torch.device) -> Tensor:
    model = config.model
    shape = (2 * config.rows, model.heads, model.head_size, model.head_size)
    return torch.zeros(shape, device=device)


def _pages(config: EngineConfig, device: torch.device) -> Tensor:
    model, blocks = config.model, config.usable_blocks.stop
    shape: tuple[int, ...] = (2, blocks * config.block_size, model.kv_heads, model.head_size)
    if model.architecture is Architecture.MLA:
        shape = (blocks, config.block_size, model.latent_size)
    return torch.zeros(shape, dtype=model.kv_type.storage, device=device)


def slot_views(config: EngineConfig, pages: Tensor) -> tuple[Tensor, ...]:
    """Pages as [slots, ...] views of keys and values, or of latents; none of recurrent states."""
    if config.model.architecture is Architecture.MLA:
        return (pages.flatten(0, 1),)
    return (pages[0], pages[1]) if pages.shape[0] == 2 else ()


@dataclass(frozen=True)
class RuntimeState:
    """What KV-init makes beside the cache.

    For N rows, P prefill rows, Q prompt tokens a step and C context tokens. block_tables: int64
    [N, C / block_size]; lengths (tokens in the cache), last_tokens, seeds, steps, top_k, adapters:
    int64 [N]; temperature, top_p: float32 [N]; active: bool [N]; prefill_tokens (with the token
    after each in prefill_targets), prefill_slots: int64 [P, Q]; the rest are constants.
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
    adapters: Tensor
    prefill_tokens: Tensor
    prefill_targets: Tensor
    prefill_slots: Tensor
    context_offsets: Tensor
    prompt_offsets: Tensor
    padding_slots: Tensor

    @classmethod
    def build(cls, config: EngineConfig, device: torch.device) -> RuntimeState:
        """Allocate on `device`, in whatever pool scope is open."""

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
            # Of rows that were never used: the least to order.
            top_k=torch.ones(config.rows, dtype=torch.int64, device=device),
            top_p=torch.ones(config.rows, device=device),
            adapters=integers(config.rows),
            prefill_tokens=integers(config.prefill_rows, config.chunk),
            prefill_targets=integers(config.prefill_rows, config.chunk),
            prefill_slots=integers(config.prefill_rows, config.chunk),
            context_offsets=torch.arange(config.context, device=device),
            prompt_offsets=torch.arange(config.chunk, device=device),
            padding_slots=torch.arange(config.widest_batch, device=device),
        )

    @property
    def named(self) -> dict[str, Tensor]:
        """Every tensor by field name."""
        return dict(vars(self))

    def sampler_rows(self, rows: Tensor) -> SamplerRows:
        """The sampling parameters of int64 [n] rows."""
        columns = (self.seeds, self.steps, self.temperature, self.top_k, self.top_p)
        return SamplerRows(*(column[rows] for column in columns))

    def state_slots(self, rows: Tensor, fresh: Tensor, counted: Tensor) -> StateSlots:
        """Where int64 [R] rows keep recurrent states; one without a counted token writes beside
        them, so that padding never meets a row.
        """
        beside = len(self.lengths) + self.padding_slots[: len(rows)]
        return StateSlots(rows, torch.where(counted.any(1), rows, beside), fresh, counted)


@dataclass(frozen=True)
class Workspace:
    """Scratch, unzeroed by contract.

    logits: float32 [widest_batch, vocabulary]; context_keys, context_values: [N * C, ...] of what
    the cache stores (for latents, context_values is empty); kernels take theirs from `kernels`.
    """

    logits: Tensor
    context_keys: Tensor
    context_values: Tensor
    kernels: WorkspaceManager

    @classmethod
    def build(cls, config: EngineConfig, sleeper: SleepManager) -> Workspace:
        """Allocate in the `workspace` pool all that any step takes."""
        kernels = _kernel_scratch(config, sleeper)
        model, slots = config.model, config.rows * config.context
        is_latent = model.architecture is Architecture.MLA
        grouped = slots, model.kv_heads, model.head_size
        logits = config.widest_batch, model.vocabulary

        def scratch(*shape: int, dtype: torch.dtype = model.kv_type.storage) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=kernels.device)

        with sleeper.pool(WORKSPACE):
            return cls(
                scratch(*logits, dtype=torch.float32),
                scratch(slots, model.latent_size) if is_latent else scratch(*grouped),
                scratch(0) if is_latent else scratch(*grouped),
                kernels,
            )

    @property
    def named(self) -> dict[str, Tensor]:
        """All scratch by name."""
        own = {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}
        return own | {f"kernels{slot}": each for slot, each in self.kernels.buffers.items()}

    def cache_over(self, config: EngineConfig, memory: Tensor) -> LayerCache:
        """A layer's cache; all layers gather their context into the same scratch."""
        views = slot_views(config, memory)
        scratch = self.context_keys, self.context_values
        if not views:
            return memory
        return PagedCache(views, scratch[: len(views)], config.block_size, self.kernels)


def _kernel_scratch(config: EngineConfig, sleeper: SleepManager) -> WorkspaceManager:
    """Room for the largest call of each kernel; it is there before any step, or it never is."""
    model, kernels = config.model, WorkspaceManager.of(sleeper)
    reserve_topk_topp(kernels, vocabulary=model.vocabulary, max_num_seqs=config.sampled_rows)
    if model.has_mla_decode:
        reserve_mla_decode(
            kernels,
            heads=model.heads,
            rows=config.rows * config.step_tokens,
            max_tokens=config.context,
            dtype=model.kv_type.storage,
        )
    kernels.lock()
    return kernels
