"""vLLM's merge of every rank's top-k candidates, within scratch that is reserved once.

vLLM takes memory for all rows in each call, unseen by its memory profile. Rows do not depend on
each other, so a bounded number at a time gives the same result; the kernels stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.tags import WORKSPACE

CHUNK_ROWS = 1024
KERNELS = "vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl"
NEEDS = (
    f"{KERNELS}:pack_dcp_topk_candidates_cutedsl",
    f"{KERNELS}:stable_topk_from_gathered_candidates_cutedsl",
    "vllm.distributed.parallel_state:get_dcp_group",
)
_CANDIDATE = 2
"""float32 words of a candidate: its score, and the bits of its global index."""


class BoundedMerge:
    """Takes the place of vLLM's function, with its arguments.

    Scratch: (1 + 2 * dcp) * 1024 * k candidates of 8 bytes, made here: what this rank packs, what
    all ranks sent rank by rank, and the same row by row.
    """

    def __init__(
        self,
        allocator: HalMemAllocator,
        device: torch.device,
        *,
        dcp: int,
        k: int,
        kernels: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
        gather: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        self._dcp, self._k = dcp, k
        self._pack, self._select = kernels or _kernels()
        self._gather = gather or _gather
        unit = CHUNK_ROWS * k * _CANDIDATE
        with allocator.use_memory_pool(WORKSPACE):
            buffer = torch.empty((1 + 2 * dcp) * unit, dtype=torch.float32, device=device)
        self._packed, self._by_rank, self._by_row = buffer.split((unit, dcp * unit, dcp * unit))

    def __call__(
        self,
        logits: Tensor,
        topk_indices: Tensor,
        topk_tokens: int,
        dcp_rank: int,
        dcp_world_size: int,
        cp_interleave: int,
        row_starts: Tensor | None = None,
    ) -> None:
        """Overwrite `topk_indices` [T, k], this rank's, with the global ones."""
        if dcp_world_size <= 1:
            return
        step = max(1, CHUNK_ROWS * self._k // topk_indices.shape[1])
        for start in range(0, topk_indices.shape[0], step):
            rows = slice(start, start + step)
            indices = topk_indices[rows]
            shape = (*indices.shape, _CANDIDATE)
            packed = _view(self._packed, shape)
            starts = None if row_starts is None else row_starts[rows]
            self._pack(
                logits[rows], indices, packed, dcp_rank, dcp_world_size, cp_interleave, starts
            )
            by_rank = _view(self._by_rank, (self._dcp, *shape))
            self._gather(by_rank, packed)
            count, width, words = shape
            by_row = _view(self._by_row, (count, self._dcp, width, words))
            by_row.copy_(by_rank.transpose(0, 1))
            self._select(by_row.view(count, self._dcp * width, words), topk_tokens, out=indices)


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return buffer[:count].view(shape)


def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    import importlib

    module: Any = importlib.import_module(KERNELS)
    return (
        module.pack_dcp_topk_candidates_cutedsl,
        module.stable_topk_from_gathered_candidates_cutedsl,
    )


def _gather(out: Tensor, own: Tensor) -> None:
    from vllm.distributed.parallel_state import get_dcp_group

    torch.distributed.all_gather_into_tensor(out, own, group=get_dcp_group().device_group)
