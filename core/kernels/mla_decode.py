"""Multi-head latent attention (MLA) of one new token a request, over a paged latent cache.

Every head reads the same cache: a token is 512 latent numbers, which are key and value at once, and
64 numbers of rotary position, which are key alone. Attention over a shard of the context leaves a
log-sum-exp with which `hal.core.kernels.lse` merges the shards; its base is what the caller asks
for. A request without a token gives 0 and -inf.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from hal.core.kernels.flashinfer_backends import workspace_bytes
from hal.core.kernels.launching import runs_triton
from hal.core.kernels.lse import LogBase
from hal.core.kernels.scratch import KernelScratch
from hal.core.workspace import TensorSpec, WorkspaceManager, total_bytes
from hal.core.workspace.checked import plain
from hal.errors import InvalidArgument, Unsupported

LATENT = 512
"""Numbers of a token that are key and value at once."""
ROPE = 64
"""Numbers of a token that are key alone."""
TRITON_DTYPES = (torch.bfloat16, torch.float16)
_scratch = KernelScratch("mla_decode")


@dataclass(frozen=True)
class Call:
    """The checked tensors of one call; `lse` is None where it is not wanted."""

    query: Tensor
    cache: Tensor
    table: Tensor
    lengths: Tensor
    scale: float
    out: Tensor
    lse: Tensor | None
    base: LogBase
    workspace: WorkspaceManager | None

    @property
    def lse_unit(self) -> float:
        """What a bit of log-sum-exp is in the base that is asked for."""
        return 1.0 if self.base is LogBase.TWO else math.log(2)

    def scratch(self, *specs: TensorSpec) -> list[Tensor]:
        inputs = (self.query, self.table, self.lengths)
        return _scratch.take(self.query.device, *specs, workspace=self.workspace, inputs=inputs)


@overload
def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    workspace: WorkspaceManager | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    lse_base: LogBase | str = LogBase.E,
    backend: str = "auto",
) -> Tensor: ...


@overload
def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    workspace: WorkspaceManager | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
    lse_base: LogBase | str = LogBase.E,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    workspace: WorkspaceManager | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    lse_base: LogBase | str = LogBase.E,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one query a request over its pages, [B, H, 512]; with `return_lse` also its
    log-sum-exp, float32 [B, H] in `lse_base`.

    query: [B, H, 576]; kv_cache: [pages, page, 576] of the same dtype; block_table: int32
    [B, max_pages], of which a row's first ceil(length / page) entries are read; seq_lens: int32
    [B]. Only what lies within a request's length is read of the cache. `scale` multiplies the
    scores. `backend`: "auto" (Triton where it runs, else plain torch), "triton", "torch", or a
    back end of FlashInfer ("flashinfer": its fastest on this device), which plans at each call and
    so waits for the device: `hal.core.kernels.mla_decode_flashinfer.PlannedMla` plans once a step.
    Scratch is what `reserve_mla_decode` reserved on the device, or `workspace`'s; without either, a
    buffer of the kernel's own. Raises `InvalidArgument`, and `Unsupported` with the reason for a
    back end that does not run here.
    """
    base = _base(lse_base)
    _check(query, kv_cache, block_table, seq_lens, out)
    if out is None:
        out = query.new_empty(*query.shape[:2], LATENT)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    call = Call(query, kv_cache, block_table, seq_lens, scale, out, lse, base, workspace)
    if out.numel():
        _run(call, backend)
    return out if lse is None else (out, lse)


def mla_decode_specs(
    *,
    heads: int,
    rows: int,
    max_tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> tuple[TensorSpec, ...]:
    """The scratch of a call with `rows` requests of `max_tokens` (all pages of a table's row).

    The Triton kernel's depends on heads and multiprocessors alone, plain torch's is one context,
    FlashInfer's is what `flashinfer_backends.workspace_bytes` says of the back end.
    """
    kernel = _triton(device, dtype)
    match backend:
        case "auto" | "triton" if kernel is not None:
            parts: tuple[TensorSpec, ...] = kernel.part_specs(heads, LATENT, device)
            return parts
        case "auto" | "triton" | "torch":
            return (TensorSpec((max_tokens, LATENT + ROPE), _reference_dtype(dtype)),)
        case _:
            name = "fa3" if backend == "flashinfer" else backend  # fa2 takes as much
            size = workspace_bytes(name, heads=heads, rows=rows, device=device)
            return (TensorSpec((size,), torch.uint8),)


def mla_decode_workspace_bytes(
    *,
    heads: int,
    rows: int,
    max_tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> int:
    """Bytes of `mla_decode_specs`: from the model and the device instead of a constant."""
    return total_bytes(
        mla_decode_specs(
            heads=heads,
            rows=rows,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            backend=backend,
        )
    )


def reserve_mla_decode(
    workspace: WorkspaceManager,
    *,
    heads: int,
    rows: int,
    max_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> int:
    """Reserve the scratch of the largest call, before capture and `lock()`; returns its bytes.

    From then on calls on the workspace's device use it. A later, larger reservation raises it.
    """
    specs = mla_decode_specs(
        heads=heads,
        rows=rows,
        max_tokens=max_tokens,
        device=workspace.device,
        dtype=dtype,
        backend=backend,
    )
    return _scratch.reserve(workspace, *specs)


# -- the call


def _run(call: Call, backend: str) -> None:
    kernel = _triton(call.query.device, call.query.dtype)
    match backend:
        case "auto" if kernel is not None:
            _run_triton(call, kernel)
        case "auto" | "torch":
            _run_reference(call)
        case "triton":
            _run_triton(call, kernel or _require_triton(call.query))
        case _:
            _run_flashinfer(call, backend)


def _run_triton(call: Call, kernel: ModuleType) -> None:
    heads = call.query.shape[1]
    parts = call.scratch(*kernel.part_specs(heads, LATENT, call.query.device))
    kernel.launch(
        call.query,
        call.cache,
        call.table,
        call.lengths,
        call.scale,
        call.out,
        call.lse,
        call.lse_unit,
        *parts,
    )


def _triton(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The Triton kernel, where it runs; its tensor-core products take 16-bit numbers."""
    return _triton_module() if dtype in TRITON_DTYPES and runs_triton(device) else None


@functools.cache
def _triton_module() -> ModuleType:
    from hal.core.kernels import mla_decode_triton

    return mla_decode_triton


def _require_triton(query: Tensor) -> ModuleType:
    if query.dtype not in TRITON_DTYPES:
        why = f"its kernel takes bfloat16 or float16, and the query is {query.dtype}"
    else:
        why = "triton is not installed, or the tensors are on the host; use backend='torch'"
    raise Unsupported("backend='triton'", str(query.device), why)


def _run_flashinfer(call: Call, backend: str) -> None:
    from hal.core.kernels import mla_decode_flashinfer

    mla_decode_flashinfer.run_once(call, backend)


# -- checks


def _base(base: LogBase | str) -> LogBase:
    try:
        return LogBase(base)
    except ValueError:
        raise InvalidArgument(f"lse_base={base!r}; use 'e' or '2'") from None


def _check(
    query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, out: Tensor | None
) -> None:
    width = LATENT + ROPE
    _check_one("query", query, query.dtype, "batch", "heads", width)
    _check_one("kv_cache", cache, query.dtype, "pages", "page", width)
    batch, heads, _ = query.shape
    _check_one("block_table", table, torch.int32, batch, "max_pages")
    _check_one("seq_lens", lengths, torch.int32, batch)
    if out is not None:
        _check_one("out", out, query.dtype, batch, heads, LATENT)
    if not query.is_floating_point():
        raise InvalidArgument(f"query is {query.dtype}; give a floating-point dtype")


def _check_one(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int | str) -> None:
    """Compare with a shape of numbers, and names where any number does; rows are contiguous."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        wanted = ", ".join(map(str, shape))
        raise InvalidArgument(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; give {dtype} [{wanted}]"
        )
    if tensor.numel() and tensor.stride(-1) != 1:
        raise InvalidArgument(f"the last dimension of {name} is strided; give it contiguous")


# -- the reference


def _reference_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _run_reference(call: Call) -> None:
    """Row by row, in float32 (float64 for float64), without a read of lengths by the host."""
    page = call.cache.shape[1]
    tokens = call.table.shape[1] * page
    dtype = _reference_dtype(call.query.dtype)
    [context] = map(plain, call.scratch(TensorSpec((tokens, LATENT + ROPE), dtype)))
    token = torch.arange(tokens, device=call.query.device)
    outside = token >= call.lengths.unsqueeze(1)
    tables = torch.where(outside[:, ::page], 0, call.table)
    queries = call.query.to(dtype) * call.scale
    for row, query in enumerate(queries):
        _gather(call.cache, tables[row], outside[row], context)
        scores = (query @ context.T).masked_fill_(outside[row], -torch.inf)
        shares = scores.softmax(1).masked_fill_(outside[row], 0.0)  # NaN without a token
        call.out[row] = shares @ context[:, :LATENT]
        if call.lse is not None:
            call.lse[row] = scores.logsumexp(1) * (call.lse_unit / math.log(2))


def _gather(cache: Tensor, table: Tensor, outside: Tensor, context: Tensor) -> None:
    """A request's context; 0 beyond its length, where pages may hold anything."""
    context.copy_(cache.index_select(0, table).flatten(0, 1))
    context.masked_fill_(outside.unsqueeze(1), 0.0)
