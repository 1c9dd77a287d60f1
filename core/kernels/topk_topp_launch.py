"""How the Triton kernel of `topk_topp` is launched: sizes by batch, scratch by program."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.compiler.compiler import make_backend

from hal.core.kernels.launching import interpreted, multiprocessors, on_device
from hal.core.kernels.topk_topp_triton import COUNTER_WORDS, top_k_top_p_kernel

_WORDS_BEFORE_LISTS = int(COUNTER_WORDS.value)
_REGISTERS = 1 << 16
"""Of a multiprocessor, where the compiler takes a limit."""


@dataclass(frozen=True)
class Shape:
    """Programs of one launch: how many, how many share a multiprocessor, of how many warps, and
    tiles in logits.
    """

    programs: int
    sharing: int
    warps: int
    tile: int
    list_tile: int = 1024
    sample: int = 4096

    @property
    def options(self) -> dict[str, int]:
        """Compiler options; registers are limited where they can be, so that programs fit."""
        if interpreted() or not _limits_registers():
            return {"num_warps": self.warps}
        registers = _REGISTERS // (self.sharing * self.warps * 32) // 8 * 8
        return {"num_warps": self.warps, "maxnreg": min(255, registers)}


@functools.cache
def _limits_registers() -> bool:
    """Whether the compiler for this device knows a limit of registers."""
    backend = make_backend(triton.runtime.driver.active.get_current_target())
    return hasattr(backend.parse_options({}), "maxnreg")


def shape_of(rows: int, vocabulary: int, device: torch.device) -> Shape:
    """A few rows get a multiprocessor each, with all of its warps; of many, two share one, so that
    one program's searches run beside the other's passes.
    """
    slots = multiprocessors(device)
    widest = max(1024, triton.next_power_of_2(vocabulary))
    if rows <= slots:
        return Shape(rows, sharing=1, warps=16, tile=min(8192, widest))
    return Shape(min(rows, 2 * slots), sharing=2, warps=8, tile=min(4096, widest))


def launch(
    logits: Tensor,
    k: Tensor | None,
    p: Tensor | None,
    draws: Tensor | None,
    tokens: Tensor | None,
    scratch: Tensor,
    shape: Shape | None = None,
) -> None:
    """Mask logits in place, or with `draws` write a token a row; `shape` overrides the choice."""
    rows, vocabulary = logits.shape
    shape = shape or shape_of(rows, vocabulary, logits.device)
    words = scratch.view(torch.int32).view(-1)
    step = words.numel() // shape.programs
    with on_device(logits.device):
        top_k_top_p_kernel[(shape.programs,)](
            logits,
            logits.stride(0),
            logits.stride(1),
            k if k is not None else words,
            p if p is not None else words,
            draws if draws is not None else words,
            tokens if tokens is not None else words,
            words,
            step,
            rows,
            vocabulary,
            max(0, (step - _WORDS_BEFORE_LISTS) // 3),
            HAS_K=k is not None,
            HAS_P=p is not None,
            DRAW=draws is not None,
            SAMPLE=shape.sample,
            TILE=shape.tile,
            LIST_TILE=shape.list_tile,
            **shape.options,
        )
