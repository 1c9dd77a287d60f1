"""The sizes and kinds of the reference engine's models."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from hal.core.kernels.mla_decode import LATENT, ROPE


class Architecture(enum.Enum):
    """What a model is made of, beside the parts that all have."""

    GQA = "gqa"
    """Grouped-query attention."""
    MLA = "mla"
    """Multi-head latent attention: one latent of 512 and 64 rotary elements a token."""
    HYBRID = "hybrid"
    """Recurrent layers, whose state is KV-cache memory, between attention layers."""
    MOE = "moe"
    """Experts behind a router and a map from logical to physical experts."""
    LORA = "lora"
    """Low-rank adapters chosen by the request."""


class KVType(enum.Enum):
    """How attention's cache is stored."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"
    FLOAT8 = "fp8"
    """E4M3 with a scale a layer that no checkpoint has."""

    @property
    def storage(self) -> torch.dtype:
        """The element type of pages: operators on indices know no 8-bit floats, but bytes."""
        return _STORAGE[self]


_STORAGE = {
    KVType.FLOAT32: torch.float32,
    KVType.BFLOAT16: torch.bfloat16,
    KVType.FLOAT8: torch.uint8,
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `positions` bounds prompt and output together."""

    vocabulary: int = 1024
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    mlp: int = 256
    positions: int = 1024
    rotary_base: float = 10_000.0
    epsilon: float = 1e-6
    architecture: Architecture = Architecture.GQA
    kv_type: KVType = KVType.FLOAT32
    latent: int = LATENT
    """Elements of a token's latent (MLA)."""
    latent_rotary: int = ROPE
    """Elements that follow it and carry the position (MLA)."""
    experts: int = 4
    experts_per_token: int = 2
    adapters: int = 3
    adapter_rank: int = 4

    @property
    def queries_per_head(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def latent_size(self) -> int:
        """Elements that MLA caches of a token."""
        return self.latent + self.latent_rotary

    @property
    def rotary_size(self) -> int:
        """Elements that rotary positions turn."""
        is_latent = self.architecture is Architecture.MLA
        return self.latent_rotary if is_latent else self.head_size

    @property
    def has_mla_decode(self) -> bool:
        """Whether decode steps attend by `mla_decode`.

        It reads latents as they are stored, in the query's type: 8-bit ones, which have a scale,
        are read by plain torch.
        """
        return self.architecture is Architecture.MLA and self.kv_type is not KVType.FLOAT8

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state a request instead of a cache a token."""
        return self.architecture is Architecture.HYBRID and layer % 2 == 0
