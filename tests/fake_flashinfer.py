"""FlashInfer's MLA wrapper and hidden buffers on the host, with the contracts that matter to a
sleep: the plan lies in an int workspace that the wrapper takes from whatever pool is open, and a
run whose plan is lost writes nothing and says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.core.kernels import flashinfer_backends

INT_BYTES = 8 << 20
HOPPER = (9, 0)
UNITS = 132
_MAGIC = 0x5EED


class MLAPlanMetadata(SimpleNamespace):
    @classmethod
    def csr(cls, *tensors: Tensor) -> MLAPlanMetadata:
        assert all(tensor.dtype == torch.int32 for tensor in tensors)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        return cls(**dict(zip(names, tensors, strict=True)))


class BatchMLAPagedAttentionWrapper:
    """Computes row by row from the metadata buffers, as long as its plan is there."""

    plans = 0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        backend: str = "auto",
        **metadata: Tensor,
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._graph, self._backend, self._metadata = use_cuda_graph, backend, metadata
        self._planned_backend: Any = None

    def plan(self, *, metadata: MLAPlanMetadata, num_heads: int, **options: Any) -> None:
        type(self).plans += 1
        cluster = 2 if num_heads > 64 else 1
        need = 2 * (UNITS // cluster * cluster) * 64 * (2 * options["head_dim_ckv"] + 4)
        if self._float_workspace_buffer.numel() < need:
            raise ValueError(f"MLA needs {need} float workspace bytes")
        kept = self._planned_backend is not None and self._graph
        memory = (
            self._planned_backend._int_workspace_buffer
            if kept
            else torch.empty(INT_BYTES, dtype=torch.uint8)
        )
        memory.view(torch.int32)[:2] = torch.tensor([_MAGIC, len(metadata.kv_len_arr)])
        if self._graph:
            for name, source in vars(metadata).items():
                self._metadata[name][: len(source)] = source
        else:
            self._metadata = {name: source.clone() for name, source in vars(metadata).items()}
        self._planned_backend = SimpleNamespace(
            _int_workspace_buffer=memory, _float_workspace_buffer=self._float_workspace_buffer
        )
        self._options = options

    def run(
        self,
        *,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
        return_lse_base_on_e: bool = False,
    ) -> None:
        mode = ("basee" if return_lse_base_on_e else "base2") if return_lse else "none"
        assert mode == self._options["lse_mode"], "the plan says which log-sum-exp a run returns"
        scratch = self._planned_backend._float_workspace_buffer
        scratch.fill_(0xFF)
        magic, batch = self._planned_backend._int_workspace_buffer.view(torch.int32)[:2].tolist()
        if magic != _MAGIC:
            return
        starts = self._metadata["kv_indptr"].tolist()
        for row in range(batch):
            length = int(self._metadata["kv_len_arr"][row])
            pages = self._metadata["kv_indices"][starts[row] : starts[row + 1]]
            context = kv_cache[pages.long()].flatten(0, 1)[:length].double()
            scores = query[row].double() @ context.T * self._options["sm_scale"]
            if length:
                out[row] = scores.softmax(1) @ context[:, :512]
            if lse is not None:
                unit = 1.0 if return_lse_base_on_e else 2.0
                lse[row] = scores.logsumexp(1) / (torch.tensor(unit).log() if unit > 1 else 1.0)


def _trtllm_with_counters(query: Tensor, multi_ctas_kv_counter_buffer: Tensor) -> None: ...


def _trtllm_without(query: Tensor) -> None: ...


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    return module


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """FlashInfer on a host that looks like a Hopper GPU to it; returns its `utils`."""
    utils = _module(
        "flashinfer.utils",
        _cache_buf={},
        _stream_cache_buf={},
        _cache_buf_retired=[],
        get_alibi_slopes=lambda heads, device: torch.arange(heads, 0.0, -1.0, device=device),
    )
    mla = _module(
        "flashinfer.mla",
        BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
        MLAPlanMetadata=MLAPlanMetadata,
        trtllm_batch_decode_with_kv_cache_mla=_trtllm_with_counters,
    )
    modules = {"flashinfer": _module("flashinfer"), mla.__name__: mla, utils.__name__: utils}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_backends, "capability_of", lambda device: HOPPER)
    monkeypatch.setattr(flashinfer_backends, "multiprocessors", lambda device: UNITS)
    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "plans", 0)
    flashinfer_backends._arguments_of_trtllm_gen.cache_clear()
    yield utils
    flashinfer_backends._arguments_of_trtllm_gen.cache_clear()
