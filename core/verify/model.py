"""Decoder-only transformers on plain torch, which run on any device that torch knows.

RMSNorm, rotary positions, SwiGLU; attention, recurrence, experts and adapters by architecture. They
read and write a paged KV cache that the engine owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hal.core.verify.attention import GroupedAttention, LatentAttention, PagedCache
from hal.core.verify.config import Architecture, ModelConfig
from hal.core.verify.experts import Experts, SwiGLU
from hal.core.verify.layers import AdaptedLinear, Batch, Linear, RMSNorm, Rotary, parameter, tensor
from hal.core.verify.recurrent import Retention

__all__ = ["Batch", "Draft", "Layer", "LayerCache", "ModelConfig", "Transformer"]

LayerCache = PagedCache | Tensor
"""Attention's pages, or the states of a recurrent layer."""


class Layer(nn.Module):
    """Attention (or recurrence) and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, index: int = 0) -> None:
        super().__init__()
        self.is_recurrent = config.is_recurrent(index)
        self.attention_norm = RMSNorm(config.hidden, config.epsilon)
        self.attention = _mixer(config, recurrent=self.is_recurrent)
        self.mlp_norm = RMSNorm(config.hidden, config.epsilon)
        self.mlp = Experts(config) if config.architecture is Architecture.MOE else SwiGLU(config)

    def forward(
        self, x: Tensor, batch: Batch, tables: tuple[Tensor, Tensor], cache: LayerCache
    ) -> Tensor:
        normed = self.attention_norm(x)
        if self.is_recurrent:
            x = x + self.attention(normed, batch, cache)
        else:
            x = x + self.attention(normed, batch, tables, cache)
        return tensor(x + self.mlp(self.mlp_norm(x)))


def _mixer(config: ModelConfig, *, recurrent: bool) -> nn.Module:
    if recurrent:
        return Retention(config)
    is_latent = config.architecture is Architecture.MLA
    return LatentAttention(config) if is_latent else GroupedAttention(config)


class Transformer(nn.Module):
    """The whole model; parameters are uninitialised until `load`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden, config.epsilon)
        self.embedding = parameter(config.vocabulary, config.hidden)
        self.rotary = Rotary(config.rotary_size, config.positions, config.rotary_base)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        self.head = Linear(config.hidden, config.vocabulary)

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states [R, Q, hidden] after the last norm; fills the cache with the batch."""
        x = self.embedding[batch.tokens]
        tables = self.rotary.tables(batch.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, batch, tables, cache)
        return tensor(self.norm(x))

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, hidden], in the first rows of `out`."""
        return torch.matmul(hidden, self.head.weight.t(), out=out[: hidden.shape[0]])

    def load(self, seed: int) -> None:
        """Fill the parameters, and nothing else, in place from the checkpoint of `seed`."""
        with torch.no_grad():
            for each, value in zip(self.parameters(), self._checkpoint(seed), strict=True):
                each.copy_(value)

    def load_adapters(self, seed: int) -> None:
        """Fill the adapters in place; the first changes nothing, as a request without one needs."""
        generator = torch.Generator("cpu").manual_seed(~seed & 0xFFFFFFFF)
        for name, stacked in self.unregistered().items():
            if not name.endswith("placement"):
                noise = torch.randn(stacked.shape, generator=generator, device="cpu")
                noise[0] = 0
                stacked.copy_(noise * stacked.shape[-1] ** -0.5)

    def unregistered(self) -> dict[str, Tensor]:
        """Tensors that are plain attributes of the modules: in no checkpoint, in no state dict."""
        return dict(_unregistered(self))

    def _checkpoint(self, seed: int) -> Iterator[Tensor]:
        """The parameters' values in order, drawn on the host: every device loads the same bits."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for each in self.parameters():
            noise = torch.randn(each.shape, generator=generator, device="cpu")
            # A stack of matrices maps its middle dimension, a matrix its last.
            inputs = each.shape[-2] if each.dim() == 3 else each.shape[-1]
            yield 1 + noise / 8 if each.dim() == 1 else noise * inputs**-0.5


class Draft(nn.Module):
    """A small model that guesses what a large one will say: one layer between its embedding and its
    head.
    """

    def __init__(self, target: Transformer) -> None:
        super().__init__()
        self.norm = RMSNorm(target.config.hidden, target.config.epsilon)
        self.layer = Layer(target.config, self.index(target.config))
        self._target = (target,)  # in a tuple: its parameters are not this module's

    @staticmethod
    def index(config: ModelConfig) -> int:
        """The target's first layer of attention, which the draft's is like."""
        return next(layer for layer in range(config.layers) if not config.is_recurrent(layer))

    def forward(self, batch: Batch, cache: LayerCache) -> Tensor:
        """Hidden states [R, Q, hidden] for the target's head."""
        [target] = self._target
        x = self.layer(
            target.embedding[batch.tokens], batch, target.rotary.tables(batch.positions), cache
        )
        return tensor(self.norm(x))

    def load(self) -> None:
        """Fill the parameters, in place, with those that the target has for the same parts."""
        [target] = self._target
        own = (self.norm, self.layer)
        theirs = (target.norm, target.layers[self.index(target.config)])
        with torch.no_grad():
            for mine, its in zip(own, theirs, strict=True):
                for parameter_, value in zip(mine.parameters(), its.parameters(), strict=True):
                    parameter_.copy_(value)

    def load_adapters(self) -> None:
        """As `load`, for what no checkpoint has."""
        [target] = self._target
        theirs = dict(_unregistered(target.layers[self.index(target.config)]))
        for name, mine in _unregistered(self.layer):
            mine.copy_(theirs[name])

    def unregistered(self) -> dict[str, Tensor]:
        """As in `Transformer`."""
        return dict(_unregistered(self))


def _unregistered(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, AdaptedLinear):
            yield f"{prefix}down", module.down
            yield f"{prefix}up", module.up
        elif isinstance(module, Experts):
            yield f"{prefix}placement", module.placement
