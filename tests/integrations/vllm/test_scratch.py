"""Scratch that vLLM keeps outside its pools: the same buffers to the same code, in the workspace
tag, and nothing at all where a name is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hal.core.integrations.vllm import scratch
from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.integrations.vllm.options import PluginOptions
from hal.cpu.platform import CpuPlatform

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm has its own environment")

MIB = 1 << 20


@pytest.fixture
def allocator() -> Iterator[HalMemAllocator]:
    platform = CpuPlatform()
    made = HalMemAllocator(lambda: platform, PluginOptions(backing="anonymous"))
    yield made
    made.release_pools()


@pytest.fixture
def worker() -> Any:
    """What the moves ask of a worker: four requests of one speculative token, 100 words."""
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=8)),
    )
    model = SimpleNamespace(get_vocab_size=lambda: 100)
    return SimpleNamespace(device=torch.device("cpu"), vllm_config=config, model_config=model)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> Any:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def only(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Leave the moves whose names have one of these words."""
    chosen = [m for m in scratch.MOVES if any(word in m.name for word in words)]
    monkeypatch.setattr(scratch, "MOVES", chosen)


def in_workspace(allocator: HalMemAllocator, tensor: torch.Tensor) -> bool:
    return allocator.manager.tag_of(tensor) == "workspace"


def test_the_sampler_kernel_finds_the_largest_buffer(
    allocator: HalMemAllocator, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_triton as kernel

    monkeypatch.setattr(kernel, "_TRITON_BUFFER_CACHE", {})
    monkeypatch.setattr(type(current_platform), "num_compute_units", lambda *_: 6)
    buffer = scratch.reserve_sampler_buffer(allocator, worker)
    assert buffer.shape == (6, 100)  # eight rows, and six units to work on them
    assert {(buffer.device, torch.float32, 100): buffer} == kernel._TRITON_BUFFER_CACHE
    assert in_workspace(allocator, buffer)


def test_dense_and_sparse_decoding_share_one_buffer(
    allocator: HalMemAllocator, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "decode")
    sizes = dict(zip(scratch.MLA_SIZES, (MIB, 4 * MIB), strict=True))
    dense = stand_in(monkeypatch, scratch.MLA, _get_workspace_buffer=None, **sizes)

    def original() -> None: ...

    sparse = stand_in(monkeypatch, scratch.SPARSE_MLA, _get_workspace_buffer=original)
    by_name = stand_in(monkeypatch, "somebody", _get_workspace_buffer=original)
    moved = scratch.take_over(allocator, worker)
    assert {"the dense decode scratch", "the sparse decode scratch"} <= set(moved)
    with_sums = dense._get_workspace_buffer(True)
    assert in_workspace(allocator, with_sums)
    assert with_sums.numel() >= 4 * MIB
    assert dense._get_workspace_buffer(False).data_ptr() == with_sums.data_ptr()
    assert sparse._get_workspace_buffer(worker.device, MIB).data_ptr() == with_sums.data_ptr()
    assert by_name._get_workspace_buffer is sparse._get_workspace_buffer


def test_a_missing_name_leaves_vllm_as_it_is(
    allocator: HalMemAllocator,
    worker: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    only(monkeypatch, "decode")
    dense = stand_in(monkeypatch, scratch.MLA, _get_workspace_buffer="vLLM's")
    monkeypatch.setattr(scratch.logger(), "propagate", True)
    with caplog.at_level("INFO", logger="vllm.hal"):
        moved = scratch.take_over(allocator, worker)
    assert "the dense decode scratch" not in moved
    assert dense._get_workspace_buffer == "vLLM's"
    [line] = [record for record in caplog.messages if "dense decode" in record]
    assert "FLASHINFER_MLA_WORKSPACE_BUFFER_SIZE" in line


def test_the_merge_is_bounded_wherever_it_is_called(
    allocator: HalMemAllocator, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hal.core.integrations.vllm import dcp_merge

    def original() -> None: ...

    only(monkeypatch, "merge")
    kernels = {"pack_dcp_topk_candidates_cutedsl": min}
    kernels |= {"stable_topk_from_gathered_candidates_cutedsl": max}
    stand_in(monkeypatch, dcp_merge.KERNELS, **kernels)
    indexer = stand_in(monkeypatch, scratch.INDEXER, _merge_dcp_topk_global=original)
    by_name = stand_in(monkeypatch, "somebody", _merge_dcp_topk_global=original)
    assert "the merge of top-k candidates" in scratch.take_over(allocator, worker)
    assert isinstance(indexer._merge_dcp_topk_global, dcp_merge.BoundedMerge)
    assert by_name._merge_dcp_topk_global is indexer._merge_dcp_topk_global
    assert allocator.bytes_by_tag()["workspace"][0] >= (1 + 2 * 2) * 8 * 1024 * 8
