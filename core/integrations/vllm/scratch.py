"""Scratch that vLLM keeps outside its pools, moved into the workspace tag.

Each move checks the names that it needs in the installed vLLM; where one is missing it says so in
one line and changes nothing. The kernels stay vLLM's own and get the same buffers, elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hal.core.integrations.vllm import dcp_merge
from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.integrations.vllm.logging import logger
from hal.core.integrations.vllm.versions import has
from hal.core.tags import WORKSPACE

SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
SAMPLER_KERNEL = "vllm.v1.sample.ops.topk_topp_triton"
MLA = "vllm.v1.attention.backends.mla.flashinfer_mla"
MLA_SIZES = (
    "FLASHINFER_MLA_WORKSPACE_BUFFER_SIZE",
    "FLASHINFER_MLA_LSE_WORKSPACE_BUFFER_SIZE",
)
SPARSE_MLA = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"


@dataclass(frozen=True)
class Move:
    """One piece of scratch: when an engine uses it, what it needs of vLLM, and how it moves."""

    name: str
    used: Callable[[Any], bool]
    needs: tuple[str, ...]
    move: Callable[[HalMemAllocator, Any], object]


def take_over(allocator: HalMemAllocator, worker: Any) -> tuple[str, ...]:
    """Move what this engine uses, and return its names; called after loading, before profiling,
    warm-up and capture, so that vLLM's memory profile sees it.
    """
    done = []
    for entry in MOVES:
        if not entry.used(worker):
            continue
        if lacking := [name for name in entry.needs if not has(name)]:
            logger().info("%s stays where vLLM has it: no %s", entry.name, ", ".join(lacking))
            continue
        entry.move(allocator, worker)
        done.append(entry.name)
    return tuple(done)


def replace_everywhere(module: ModuleType, name: str, value: object) -> None:
    """Replace a module's function there, and in every module that has taken it by name."""
    original = getattr(module, name)
    for user in list(sys.modules.values()):
        if getattr(user, "__dict__", {}).get(name) is original:
            setattr(user, name, value)


# -- the sampler


def sampled_rows(vllm_config: Any) -> int:
    """The most rows of logits that one step samples from."""
    speculative = vllm_config.speculative_config
    tokens = speculative.num_speculative_tokens if speculative is not None else 0
    return int(vllm_config.scheduler_config.max_num_seqs * (tokens + 1))


def reserve_sampler_buffer(allocator: HalMemAllocator, worker: Any) -> torch.Tensor:
    """Put the top-k/top-p kernel's buffer, at its largest, where vLLM looks for it.

    float32 [programs, vocabulary], a program a row, at most one a compute unit. vLLM's small table
    of split rows stays where it is.
    """
    from vllm.platforms import current_platform
    from vllm.utils.math_utils import next_power_of_2

    device = worker.device
    units = current_platform.num_compute_units(device.index or 0)
    rows = min(next_power_of_2(sampled_rows(worker.vllm_config)), units)
    vocabulary = worker.model_config.get_vocab_size()
    with allocator.use_memory_pool(WORKSPACE):
        buffer = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)
    kernel: Any = sys.modules[SAMPLER_KERNEL]
    cache = kernel._TRITON_BUFFER_CACHE  # noqa: SLF001
    cache[buffer.device, buffer.dtype, vocabulary] = buffer
    return buffer


def sort_in_workspace(_allocator: HalMemAllocator, worker: Any) -> None:
    """Give the host's sampler the sorted logits and their order in scratch, reserved here."""
    from vllm.v1.worker.workspace import current_workspace_manager

    sampler: Any = sys.modules[SAMPLER]
    ask = current_workspace_manager().get_simultaneous
    shape = sampled_rows(worker.vllm_config), worker.model_config.get_vocab_size()
    ask((shape, torch.float32), (shape, torch.int64))
    apply = sampler.apply_top_k_top_p_pytorch
    apply = getattr(apply, "hal_original", apply)

    def apply_in_workspace(*args: Any, **options: Any) -> Any:
        with SortInto(ask):
            return apply(*args, **options)

    apply_in_workspace.hal_original = apply  # type: ignore[attr-defined]
    sampler.apply_top_k_top_p_pytorch = apply_in_workspace


class SortInto(TorchFunctionMode):
    """Lets `tensor.sort()` write into buffers that `ask((shape, dtype), ...)` returns."""

    def __init__(self, ask: Callable[..., Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self._ask = ask

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.Tensor.sort:
            return func(*args, **(kwargs or {}))
        [logits] = args
        buffers = self._ask((tuple(logits.shape), logits.dtype), (tuple(logits.shape), torch.int64))
        return torch.sort(logits, **(kwargs or {}), out=tuple(buffers))


def _samples_with_kernel(worker: Any) -> bool:
    return worker.device.type != "cpu" and SAMPLER_KERNEL in sys.modules


def _samples_on_host(worker: Any) -> bool:
    return worker.device.type == "cpu" and SAMPLER in sys.modules


# -- latent attention


class DecodeScratch:
    """One unzeroed buffer for every latent-attention backend of a process.

    A step uses it for one layer at a time and keeps nothing in it. An outgrown buffer is kept: a
    captured graph may have its address.
    """

    def __init__(self, allocator: HalMemAllocator, device: torch.device) -> None:
        self._allocator, self._device = allocator, device
        self._buffers: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """At least `size` bytes, as int8."""
        if not self._buffers or self._buffers[-1].numel() < size:
            with self._allocator.use_memory_pool(WORKSPACE):
                buffer = torch.empty(size, dtype=torch.int8, device=self._device)
            self._buffers.append(buffer)
        return self._buffers[-1]


def share_dense_scratch(allocator: HalMemAllocator, worker: Any) -> None:
    """Let the dense decode backend take the shared buffer, at the size that this engine needs.

    Its counters, which the kernel needs at zero, are a buffer of their own and stay as they are.
    """
    module: Any = sys.modules[MLA]
    scratch = _decode_scratch(allocator, worker)

    def buffer_for(return_lse: bool) -> torch.Tensor:
        if return_lse:
            return scratch.take(module.FLASHINFER_MLA_LSE_WORKSPACE_BUFFER_SIZE)
        return scratch.take(module.FLASHINFER_MLA_WORKSPACE_BUFFER_SIZE)

    module._get_workspace_buffer = buffer_for  # noqa: SLF001
    buffer_for(worker.vllm_config.parallel_config.decode_context_parallel_size > 1)


def share_sparse_scratch(allocator: HalMemAllocator, worker: Any) -> None:
    """Let the sparse decode backends take the shared buffer."""
    from vllm import envs

    scratch = _decode_scratch(allocator, worker)

    def buffer_for(_device: torch.device, min_bytes: int | None = None) -> torch.Tensor:
        return scratch.take(min_bytes or envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE)

    replace_everywhere(sys.modules[SPARSE_MLA], "_get_workspace_buffer", buffer_for)


def _decode_scratch(allocator: HalMemAllocator, worker: Any) -> DecodeScratch:
    if not hasattr(worker, "hal_decode_scratch"):
        worker.hal_decode_scratch = DecodeScratch(allocator, worker.device)
    scratch: DecodeScratch = worker.hal_decode_scratch
    return scratch


# -- the merge of every rank's top-k


def bound_merge(allocator: HalMemAllocator, worker: Any) -> None:
    """Merge a bounded number of rows at a time, in a buffer that is reserved here."""
    config = worker.vllm_config
    merge = dcp_merge.BoundedMerge(
        allocator,
        worker.device,
        dcp=config.parallel_config.decode_context_parallel_size,
        k=config.model_config.hf_text_config.index_topk,
    )
    replace_everywhere(sys.modules[INDEXER], "_merge_dcp_topk_global", merge)


def _merges(worker: Any) -> bool:
    config = worker.vllm_config
    return (
        INDEXER in sys.modules
        and config.parallel_config.decode_context_parallel_size > 1
        and hasattr(config.model_config.hf_text_config, "index_topk")
    )


MOVES = (
    Move(
        "the top-k/top-p kernel's buffer",
        _samples_with_kernel,
        (
            f"{SAMPLER_KERNEL}:_TRITON_BUFFER_CACHE",
            "vllm.utils.math_utils:next_power_of_2",
        ),
        reserve_sampler_buffer,
    ),
    Move(
        "the host sampler's sorted logits",
        _samples_on_host,
        (
            f"{SAMPLER}:apply_top_k_top_p_pytorch",
            "vllm.v1.worker.workspace:current_workspace_manager",
        ),
        sort_in_workspace,
    ),
    Move(
        "the dense decode scratch",
        lambda worker: MLA in sys.modules,
        (f"{MLA}:_get_workspace_buffer", *(f"{MLA}:{name}" for name in MLA_SIZES)),
        share_dense_scratch,
    ),
    Move(
        "the sparse decode scratch",
        lambda worker: SPARSE_MLA in sys.modules,
        (
            f"{SPARSE_MLA}:_get_workspace_buffer",
            "vllm.envs:VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
        ),
        share_sparse_scratch,
    ),
    Move(
        "the merge of top-k candidates",
        _merges,
        (f"{INDEXER}:_merge_dcp_topk_global", *dcp_merge.NEEDS),
        bound_merge,
    ),
)
