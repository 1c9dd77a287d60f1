"""A decoder-only transformer on plain torch.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. It reads and writes a paged KV cache
that the engine owns, and runs on any device torch knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `positions` bounds prompt and output together."""

    vocabulary: int = 2048
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    mlp: int = 256
    positions: int = 1024
    rotary_base: float = 10_000.0
    epsilon: float = 1e-6

    @property
    def queries_per_head(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Batch:
    """One forward pass of R rows with Q query tokens each over at most C tokens of context.

    tokens, positions, write_slots: int64 [R, Q], the slots distinct; context_slots: int64 [R, C];
    mask: bool [R, Q, C], True where a query may look.
    """

    tokens: Tensor
    positions: Tensor
    write_slots: Tensor
    context_slots: Tensor
    mask: Tensor


@dataclass(frozen=True)
class LayerCache:
    """One layer's paged KV cache and the scratch its context is gathered into.

    keys, values: [slots, kv_heads, head_size]; key_scratch, value_scratch: [max R * C, kv_heads,
    head_size].
    """

    keys: Tensor
    values: Tensor
    key_scratch: Tensor
    value_scratch: Tensor


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def _tensor(value: Any) -> Tensor:
    """The result of a module, which torch leaves untyped."""
    return cast("Tensor", value)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        return x * scale * self.weight


class Linear(nn.Module):
    """x @ weight.T, without a bias and without an initialisation that a load would overwrite."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = _parameter(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Rotary(nn.Module):
    """Rotary position tables; buffers that are in no checkpoint, as engines build them."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.head_size // 2
        inverse = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(config.positions, dtype=torch.float64), inverse)
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of int64 [R, Q] positions: [R, Q, 1, head_size / 2]."""
        return self.cosine[positions].unsqueeze(2), self.sine[positions].unsqueeze(2)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the halves of [R, Q, heads, head_size] against each other."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention over a paged KV cache."""

    score_scale: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.queries = Linear(config.hidden, config.heads * config.head_size)
        self.keys_values = Linear(config.hidden, 2 * config.kv_heads * config.head_size)
        self.output = Linear(config.heads * config.head_size, config.hidden)
        self.register_buffer("score_scale", torch.tensor(config.head_size**-0.5), persistent=False)

    def forward(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: LayerCache
    ) -> Tensor:
        c = self.config
        rows, width = batch.tokens.shape
        queries = rotate(self.queries(x).view(rows, width, c.heads, c.head_size), *tables)
        self._write(x, batch, tables, cache)
        keys = _gather(cache.keys, batch.context_slots, cache.key_scratch)
        values = _gather(cache.values, batch.context_slots, cache.value_scratch)
        mixed = self._attend(queries * self.score_scale, keys, values, batch.mask)
        return _tensor(self.output(mixed))

    def _write(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: LayerCache
    ) -> None:
        c = self.config
        rows, width = batch.tokens.shape
        pair = self.keys_values(x).view(rows, width, 2 * c.kv_heads, c.head_size)
        keys, values = pair.split(c.kv_heads, dim=2)
        slots = batch.write_slots.flatten()
        cache.keys.index_copy_(0, slots, rotate(keys, *tables).flatten(0, 1))
        cache.values.index_copy_(0, slots, values.flatten(0, 1))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[R, Q, heads, d] against [R, C, kv_heads, d]; queries of one KV head share a product."""
        c = self.config
        rows, width = queries.shape[:2]
        grouped = queries.view(rows, width, c.kv_heads, c.queries_per_head, c.head_size)
        grouped = grouped.permute(0, 2, 1, 3, 4).reshape(rows, c.kv_heads, -1, c.head_size)
        scores = grouped @ keys.permute(0, 2, 3, 1)
        seen = mask.repeat_interleave(c.queries_per_head, dim=1).unsqueeze(1)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = (weights @ values.transpose(1, 2)).view(
            rows, c.kv_heads, width, c.queries_per_head, c.head_size
        )
        return mixed.permute(0, 2, 1, 3, 4).reshape(rows, width, -1)


def _gather(cache: Tensor, slots: Tensor, scratch: Tensor) -> Tensor:
    out = scratch[: slots.numel()]
    torch.index_select(cache, 0, slots.flatten(), out=out)
    return out.view(*slots.shape, *cache.shape[1:])


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden, 2 * config.mlp)
        self.down = Linear(config.mlp, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return _tensor(self.down(nn.functional.silu(gate) * up))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.epsilon)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.epsilon)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: LayerCache
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch, tables, cache)
        return _tensor(x + self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """The whole model; parameters are uninitialised until `load`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden, config.epsilon)
        self.embedding = _parameter(config.vocabulary, config.hidden)
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Linear(config.hidden, config.vocabulary)

    def forward(self, batch: Batch, caches: tuple[LayerCache, ...]) -> Tensor:
        """Hidden states [R, Q, hidden] after the last norm; fills the cache with the batch."""
        x = self.embedding[batch.tokens]
        tables = self.rotary.tables(batch.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, batch, tables, cache)
        return _tensor(self.norm(x))

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, hidden], in the first rows of `out`."""
        return torch.matmul(hidden, self.head.weight.t(), out=out[: hidden.shape[0]])

    def load(self, seed: int) -> None:
        """Fill the parameters, and nothing else, in place from the checkpoint of `seed`."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self._checkpoint(seed), strict=True):
                parameter.copy_(value)

    def _checkpoint(self, seed: int) -> Iterator[Tensor]:
        """The parameters' values in order, drawn on the host: every device loads the same bits."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for parameter in self.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            yield 1 + noise / 8 if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5
