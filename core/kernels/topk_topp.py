"""Top-k and top-p of logits, exact, and seeded sampling from what they leave.

Top-k comes first; top-p works on what remains. The order of a row is by logit, the largest first,
and by index among equals, the lowest first: exactly k stay, then the shortest prefix of these whose
probability reaches p, and never less than one. k outside 1 to V - 1 and p from 1 on remove nothing,
and leave a row as it is. A NaN counts as -inf.

Probabilities are fixed-point integers: 2^40 * exp(x - max), rounded down. Sums of integers do not
depend on their order, so a row's result depends on no other row, on no batch size, and on no tiling
of a kernel.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType

import torch
from torch import Tensor

from hal.core.kernels.launching import multiprocessors, runs_triton
from hal.core.kernels.scratch import KernelScratch
from hal.core.workspace import TensorSpec, WorkspaceManager
from hal.core.workspace.checked import plain
from hal.errors import InvalidArgument

ONE = 1 << 40
"""The weight of a row's largest logit."""
UNIT = 1 << 31
"""Probabilities and draws are multiples of 1 / 2^31."""
HOST_ROWS = 16
"""Rows that the plain-torch reference sorts at a time."""
_WHOLE_VECTORS = 32
"""Places that the host weighs together: what remains beyond them has other last bits there."""
_scratch = KernelScratch("topk_topp")

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014),
# its constants as signed 64-bit numbers.
_GAMMA, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def apply_top_k_top_p(
    logits: Tensor,
    k: Tensor | None,
    p: Tensor | None,
    *,
    workspace: WorkspaceManager | None = None,
) -> Tensor:
    """Mask what top-k and top-p remove with -inf, in place, and return the logits.

    logits: float32 [B, V] of any strides; k: int32 or int64 [B]; p: float32 [B]; None: no limit.
    Scratch is what `reserve_topk_topp` reserved on the device, or `workspace`'s; without either, or
    for a larger batch, a buffer of the kernel's own.
    """
    _check(logits, k, p)
    if logits.shape[1] > 1 and len(logits) and (k is not None or p is not None):  # one is kept
        scratch = _take(logits, workspace)
        if (kernel := _kernel(logits.device)) is not None:
            kernel.launch(logits, k, p, None, None, scratch)
        else:
            for part in _parts(logits):
                _mask_reference(logits[part], _of(k, part), _of(p, part), scratch)
    return logits


def sample_top_k_top_p(
    logits: Tensor,
    k: Tensor | None,
    p: Tensor | None,
    draws: Tensor,
    *,
    workspace: WorkspaceManager | None = None,
) -> Tensor:
    """A token a row, int64 [B], drawn from what top-k and top-p leave; the logits stay as they are.

    draws: int64 [B] in [0, 2^31), as `draw_bits` makes them: the token is the first by index up to
    which the kept probability exceeds draw / 2^31 of all that is kept. Arguments and scratch as for
    `apply_top_k_top_p`. A row of nothing but -inf gives 0.
    """
    _check(logits, k, p)
    if draws.shape != logits.shape[:1] or draws.dtype != torch.int64:
        raise InvalidArgument(
            f"draws are {draws.dtype} {list(draws.shape)}; give int64 [{len(logits)}], one a row"
        )
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if logits.shape[1] > 1 and len(logits):
        scratch = _take(logits, workspace)
        if (kernel := _kernel(logits.device)) is not None:
            kernel.launch(logits, k, p, draws, tokens, scratch)
        else:
            draw = _draw_on_host if logits.device.type == "cpu" else _draw_reference
            for part in _parts(logits):
                tokens[part] = draw(logits[part], _of(k, part), _of(p, part), draws[part], scratch)
    return tokens


def draw_bits(seeds: Tensor, steps: Tensor) -> Tensor:
    """int64 in [0, 2^31) from int64 seeds and steps: splitmix64's output, its 31 highest bits."""
    state = seeds + (steps + 1) * _GAMMA
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return _shift(state ^ _shift(state, 31), 33)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's own extends the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def topk_topp_specs(rows: int, vocabulary: int, device: torch.device) -> tuple[TensorSpec, ...]:
    """The scratch of a call: min(multiprocessors, rows) * V float32."""
    kernel = _kernel(device)
    most = multiprocessors(device) if kernel is not None else HOST_ROWS
    return (TensorSpec((min(most, rows), vocabulary), torch.float32),)


def reserve_topk_topp(
    workspace: WorkspaceManager,
    *,
    vocabulary: int,
    max_num_seqs: int,
    num_speculative_tokens: int = 0,
) -> int:
    """Reserve the scratch of the largest batch, before capture and `lock()`; returns its bytes.

    From then on calls on the workspace's device use it.
    """
    rows = max_num_seqs * (num_speculative_tokens + 1)
    return _scratch.reserve(workspace, *topk_topp_specs(rows, vocabulary, workspace.device))


def cached_scratch_bytes(device: torch.device) -> int:
    """Bytes of the kernel's own buffer on a device: what no reservation covered."""
    return _scratch.cached_bytes(device)


def _check(logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise InvalidArgument(
            f"logits are {logits.dtype} {list(logits.shape)}; give float32 [rows, vocabulary]"
        )
    for name, values, kinds in (
        ("k", k, (torch.int32, torch.int64)),
        ("p", p, (torch.float32,)),
    ):
        if values is not None and (values.shape != logits.shape[:1] or values.dtype not in kinds):
            raise InvalidArgument(
                f"{name} is {values.dtype} {list(values.shape)}; give {kinds[0]} [{len(logits)}], "
                "one a row"
            )


def _take(logits: Tensor, workspace: WorkspaceManager | None) -> Tensor:
    rows, vocabulary = logits.shape
    specs = topk_topp_specs(rows, vocabulary, logits.device)
    [scratch] = _scratch.take(logits.device, *specs, workspace=workspace, inputs=(logits,))
    return plain(scratch)


def _kernel(device: torch.device) -> ModuleType | None:
    """The Triton kernel for a device; None where plain torch serves."""
    return _triton_module() if runs_triton(device) else None


@functools.cache
def _triton_module() -> ModuleType:
    from hal.core.kernels import topk_topp_launch

    return topk_topp_launch


# -- the reference


def _parts(logits: Tensor) -> list[slice]:
    return [slice(start, start + HOST_ROWS) for start in range(0, len(logits), HOST_ROWS)]


def _of(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _mask_reference(logits: Tensor, k: Tensor | None, p: Tensor | None, scratch: Tensor) -> None:
    order, _, kept = _kept(logits, k, p, scratch, logits.shape[1])
    removed = torch.empty_like(kept).scatter_(1, order, ~kept)
    limited = removed.any(1, keepdim=True)
    logits.masked_fill_(removed | (limited & logits.isnan()), -torch.inf)


@torch.library.custom_op(
    "hal::draw_top_k_top_p",
    mutates_args=("scratch",),
    device_types="cpu",
    schema="(Tensor logits, Tensor? k, Tensor? p, Tensor draws, Tensor(a!) scratch) -> Tensor",
)
def _draw_on_host(
    logits: Tensor, k: Tensor | None, p: Tensor | None, draws: Tensor, scratch: Tensor
) -> Tensor:
    """One operator, since it looks at k: what replays it looks again."""
    return _draw_reference(logits, k, p, draws, scratch, _places(k, logits.shape[1]))


def _draw_reference(
    logits: Tensor,
    k: Tensor | None,
    p: Tensor | None,
    draws: Tensor,
    scratch: Tensor,
    places: int | None = None,
) -> Tensor:
    order, weights, kept = _kept(logits, k, p, scratch, places or logits.shape[1])
    by_index = torch.zeros_like(logits, dtype=torch.int64)
    running = by_index.scatter_(1, order, weights.where(kept, 0)).cumsum(1)
    drawn = _share(running[:, -1], draws).unsqueeze(1)
    return (running <= drawn).sum(1).where(running[:, -1] > 0, 0)


def _kept(
    logits: Tensor, k: Tensor | None, p: Tensor | None, scratch: Tensor, places: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The first places of each row's order, which hold all that may stay: their indices, their
    fixed-point weights, and which of them pass, a prefix.
    """
    order, weights = _sorted_weights(logits, places, scratch)
    place = torch.arange(places, device=weights.device)
    kept = torch.ones_like(weights, dtype=torch.bool)
    if k is not None:
        kept &= place < _limits(k, logits.shape[1]).unsqueeze(1)
    if p is not None:
        running = weights.where(kept, 0).cumsum(1)
        parts = (p.clamp(0, 1) * UNIT).to(torch.int64)
        target = _share(running[:, -1], parts).clamp_min_(1).unsqueeze(1)
        before = running - weights.where(kept, 0)
        kept &= (before < target) | (parts >= UNIT).unsqueeze(1)
    return order, weights, kept


def _limits(k: Tensor, vocabulary: int) -> Tensor:
    return k.where((k > 0) & (k < vocabulary), vocabulary)


def _places(k: Tensor | None, vocabulary: int) -> int:
    """How many places of the order may stay, in whole vectors."""
    most = vocabulary if k is None else int(_limits(k, vocabulary).max())
    return min(vocabulary, -(-most // _WHOLE_VECTORS) * _WHOLE_VECTORS)


def _sorted_weights(logits: Tensor, places: int, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of each row in its order, and the fixed-point weights in that order."""
    x = scratch[: len(logits)].copy_(logits)
    limits = torch.finfo(torch.float32)
    x.nan_to_num_(nan=-torch.inf, posinf=limits.max, neginf=-torch.inf)
    if places < x.shape[1]:
        order = _keys(x).topk(places).indices
        values = x.gather(1, order)
    else:
        values, order = x.sort(dim=1, descending=True, stable=True)
    top = values[:, :1].clamp_min(limits.min)
    return order, torch.exp2((values - top) * (1 / math.log(2))).mul_(ONE).to(torch.int64)


def _keys(x: Tensor) -> Tensor:
    """int64, of which no two in a row are equal: by value, then the lowest index first."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it is equal to
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats rise as their bits fall
    return (rising.long() << 32) | torch.arange(x.shape[1] - 1, -1, -1, device=x.device)


def _share(total: Tensor, parts: Tensor) -> Tensor:
    """total * parts / 2^31, rounded down, for total < 2^62 and parts <= 2^31."""
    return (total >> 31) * parts + (((total & (UNIT - 1)) * parts) >> 31)
