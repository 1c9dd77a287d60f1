"""Attention over a paged KV cache that the engine owns: grouped queries, and latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hal.core.kernels.mla_decode import mla_decode
from hal.core.verify.config import Architecture, KVType, ModelConfig
from hal.core.verify.layers import (
    AdaptedLinear,
    Batch,
    Linear,
    PagedQueries,
    RMSNorm,
    rotate,
    tensor,
)
from hal.core.workspace import WorkspaceManager

KEY_SCALE, VALUE_SCALE, LATENT_SCALE = 0.03125, 0.0625, 0.03125
"""Of 8-bit caches: powers of two, so that only the rounding to 8 bits is lost."""


@dataclass(frozen=True)
class PagedCache:
    """One layer's pages, as [slots, ...] views, and the scratch that their context is gathered
    into.

    The views are keys and values of shape [slots, kv_heads, head_size], or one of latents
    [slots, latent + rotary]; a scratch is [max R * C, ...]. `kernels` is where those take theirs.
    """

    views: tuple[Tensor, ...]
    scratch: tuple[Tensor, ...]
    block_size: int
    kernels: WorkspaceManager

    def write(self, index: int, slots: Tensor, values: Tensor) -> None:
        """Store one row a slot, the slots being distinct."""
        self.views[index].index_copy_(0, slots, values)

    def gather(self, index: int, slots: Tensor) -> Tensor:
        """The rows of int64 [R, C] slots: [R, C, ...]."""
        view = self.views[index]
        out = self.scratch[index][: slots.numel()]
        torch.index_select(view, 0, slots.flatten(), out=out)
        return out.view(*slots.shape, *view.shape[1:])

    def pages(self, index: int) -> Tensor:
        """A view by blocks: [blocks, block_size, ...]."""
        view = self.views[index]
        return view.view(-1, self.block_size, *view.shape[1:])


class Attention(Protocol):
    """What a decoder layer asks of its attention."""

    def __call__(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: PagedCache
    ) -> Tensor: ...


class Codec(nn.Module):
    """Turns float32 values into what pages store and back, by a scale that no checkpoint has."""

    scale: Tensor

    def __init__(self, kind: KVType, scale: float) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def stored(self, values: Tensor) -> Tensor:
        match self.kind:
            case KVType.FLOAT32:
                return values
            case KVType.BFLOAT16:
                return values.to(torch.bfloat16)
            case KVType.FLOAT8:
                return (values / self.scale).to(torch.float8_e4m3fn).view(torch.uint8)

    def loaded(self, stored: Tensor) -> Tensor:
        if self.kind is KVType.FLOAT8:
            return stored.view(torch.float8_e4m3fn).to(torch.float32) * self.scale
        return stored.to(torch.float32)


class GroupedAttention(nn.Module):
    """Queries of several heads share one head of keys and values."""

    score_scale: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.queries = _linear(config, config.hidden, config.heads * config.head_size)
        self.keys_values = Linear(config.hidden, 2 * config.kv_heads * config.head_size)
        self.output = _linear(config, config.heads * config.head_size, config.hidden)
        self.register_buffer("score_scale", torch.tensor(config.head_size**-0.5), persistent=False)
        self.key_codec = Codec(config.kv_type, KEY_SCALE)
        self.value_codec = Codec(config.kv_type, VALUE_SCALE)

    def forward(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: PagedCache
    ) -> Tensor:
        c = self.config
        rows, width = batch.tokens.shape
        queries = _apply(self.queries, x, batch).view(rows, width, c.heads, c.head_size)
        self._write(x, batch, tables, cache)
        keys = self.key_codec.loaded(cache.gather(0, batch.context_slots))
        values = self.value_codec.loaded(cache.gather(1, batch.context_slots))
        mixed = self._attend(rotate(queries, *tables) * self.score_scale, keys, values, batch.mask)
        return _apply(self.output, mixed, batch)

    def _write(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: PagedCache
    ) -> None:
        c = self.config
        rows, width = batch.tokens.shape
        pair = self.keys_values(x).view(rows, width, 2 * c.kv_heads, c.head_size)
        keys, values = pair.split(c.kv_heads, dim=2)
        slots = batch.write_slots.flatten()
        cache.write(0, slots, self.key_codec.stored(rotate(keys, *tables).flatten(0, 1)))
        cache.write(1, slots, self.value_codec.stored(values.flatten(0, 1)))

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


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1), with its projections absorbed.

    A token's cache is one latent that all heads share, followed by the rotary part of its key;
    queries are mapped into the latent's space, and the mixed latent back out of it.
    """

    score_scale: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        size = config.head_size + config.latent_rotary
        self.queries = Linear(config.hidden, config.heads * size)
        self.down = Linear(config.hidden, config.latent_size)
        self.norm = RMSNorm(config.latent, config.epsilon)
        # A head's key and value maps, side by side: their inputs are the latent's elements.
        self.up = Linear(config.latent, 2 * config.heads * config.head_size)
        self.output = Linear(config.heads * config.head_size, config.hidden)
        self.register_buffer("score_scale", torch.tensor(size**-0.5), persistent=False)
        self.codec = Codec(config.kv_type, LATENT_SCALE)

    def forward(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: PagedCache
    ) -> Tensor:
        c = self.config
        key_map, value_map = self.up.weight.view(2, c.heads, c.head_size, c.latent)
        queries = self._queries(x, batch, tables, key_map) * self.score_scale
        self._write(x, batch, tables, cache)
        if batch.paged is not None and c.has_mla_decode:
            mixed = self._decode(queries, batch.paged, cache)
        else:
            context = self.codec.loaded(cache.gather(0, batch.context_slots))
            mixed = self._attend(queries, context, batch.mask)
        heads = torch.einsum("rqhl,hdl->rqhd", mixed, value_map)
        return tensor(self.output(heads.flatten(2)))

    def _queries(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], key_map: Tensor
    ) -> Tensor:
        """[R, Q, heads, latent + rotary]."""
        c = self.config
        rows, width = batch.tokens.shape
        plain, turned = (
            self.queries(x)
            .view(rows, width, c.heads, -1)
            .split((c.head_size, c.latent_rotary), dim=-1)
        )
        latent = torch.einsum("rqhd,hdl->rqhl", plain, key_map)
        return torch.cat((latent, rotate(turned, *tables)), dim=-1)

    def _write(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: PagedCache
    ) -> None:
        c = self.config
        latent, turned = self.down(x).split((c.latent, c.latent_rotary), dim=-1)
        turned = rotate(turned.unsqueeze(2), *tables).squeeze(2)
        entry = torch.cat((self.norm(latent), turned), dim=-1).flatten(0, 1)
        cache.write(0, batch.write_slots.flatten(), self.codec.stored(entry))

    def _decode(self, queries: Tensor, paged: PagedQueries, cache: PagedCache) -> Tensor:
        """[R, Q, heads, latent + rotary] against their pages, to latents, in the pages' type.

        The scale is in the queries already: the host cannot read the buffer that it is in.
        """
        pages = cache.pages(0)
        mixed = mla_decode(
            queries.flatten(0, 1).to(pages.dtype),
            pages,
            paged.tables,
            paged.lengths,
            scale=1.0,
            workspace=cache.kernels,
        )
        return mixed.view(*queries.shape[:3], -1).to(queries.dtype)

    def _attend(self, queries: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """[R, Q, heads, latent + rotary] against [R, C, latent + rotary], to latents."""
        rows, width, heads, size = queries.shape
        scores = queries.view(rows, width * heads, size) @ context.transpose(1, 2)
        seen = mask.repeat_interleave(heads, dim=1)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = weights @ context[..., : self.config.latent]
        return mixed.view(rows, width, heads, -1)


def _linear(config: ModelConfig, inputs: int, outputs: int) -> Linear:
    if config.architecture is Architecture.LORA:
        return AdaptedLinear(inputs, outputs, config.adapters, config.adapter_rank)
    return Linear(inputs, outputs)


def _apply(linear: Linear, x: Tensor, batch: Batch) -> Tensor:
    if isinstance(linear, AdaptedLinear):
        return linear.adapted(x, batch.adapters)
    return tensor(linear(x))
