"""FlashInfer's back ends for MLA decode: where each runs, how much workspace it takes, and what
that has to hold when a launch begins. Nothing here imports FlashInfer before it is asked about.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from hal.caching import round_up
from hal.core.kernels.launching import multiprocessors
from hal.errors import InvalidArgument, Unsupported, WorkspaceTooSmall

SIZE_SETTING = "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"
"""Environment: bytes of FlashInfer's workspace, instead of what the model and the device need."""
COUNTER_ARGUMENT = "multi_ctas_kv_counter_buffer"
"""With it an entry takes its counters apart from its scratch; releases without it count in the
scratch.
"""
_LATENT = 512
_MIB = 1 << 20
Capability = tuple[int, int]
"""Of a device, as FlashInfer asks for it: (9, 0) is Hopper."""


class ScratchKind(enum.Enum):
    """What a workspace has to hold when a launch begins."""

    UNZEROED = "any bytes"
    COUNTERS_APART = "any bytes; counters in a buffer of their own, at zero"
    ZEROED = "zero, since its counters lie in it"


@dataclass(frozen=True)
class Backend:
    """One of FlashInfer's kernels; `runs_on` says whether a device's capability serves."""

    needs: str
    runs_on: Callable[[Capability], bool]
    driven: bool = False
    """Whether this library runs it; of the others it knows the reason and the scratch."""


def _in(*capabilities: Capability) -> Callable[[Capability], bool]:
    return lambda capability: capability in capabilities


_BLACKWELL = "compute capability 10.0, 10.3 or 10.7 (Blackwell)"
_on_blackwell = _in((10, 0), (10, 3), (10, 7))
BACKENDS = {
    "fa3": Backend("compute capability 9.0 (Hopper)", _in((9, 0)), driven=True),
    "fa2": Backend("compute capability 8.0 or later", lambda c: c >= (8, 0), driven=True),
    "trtllm-gen": Backend(_BLACKWELL, _on_blackwell),
    "cutlass": Backend(
        "compute capability 10 or 11 (Blackwell)", lambda capability: capability[0] in {10, 11}
    ),
    "cute-dsl": Backend(_BLACKWELL, _on_blackwell),
    "cutile": Backend(
        "compute capability 10.0, 10.3, 10.7, 12.0 or 12.1 (Blackwell)",
        _in((10, 0), (10, 3), (10, 7), (12, 0), (12, 1)),
    ),
    "xqa": Backend("compute capability 12 (Blackwell)", lambda capability: capability[0] == 12),
}
"""By name, the fastest first; read from FlashInfer 0.7.4."""


def choose(backend: str, device: torch.device) -> str:
    """The back end to run: `backend`, or for "flashinfer" the fastest that runs on the device.

    Raises `Unsupported` with the reason, `InvalidArgument` for a name that is none.
    """
    names = [name for name, entry in BACKENDS.items() if entry.driven]
    if backend != "flashinfer":
        if backend not in BACKENDS:
            known = ", ".join(map(repr, ("auto", "triton", "torch", "flashinfer", *BACKENDS)))
            raise InvalidArgument(f"backend={backend!r}; use one of {known}")
        names = [backend]
    reasons = {name: why_not(name, device) for name in names}
    for name, reason in reasons.items():
        if not reason:
            return name
    raise Unsupported(f"backend={backend!r}", str(device), "; ".join(set(reasons.values())))


def why_not(backend: str, device: torch.device) -> str:
    """Why a back end cannot be used on a device; empty when it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed; install flashinfer-python, or use backend='auto'"
    capability = capability_of(device)
    if capability is None:
        return "FlashInfer has no kernels for this kind of device; use backend='auto'"
    entry = BACKENDS[backend]
    if not entry.runs_on(capability):
        found = ".".join(map(str, capability))
        return f"{backend} needs {entry.needs}, and this device has {found}"
    if not entry.driven:
        return f"{backend} is not driven by this library yet; use 'fa2', which runs here as well"
    return ""


def capability_of(device: torch.device) -> Capability | None:
    """What FlashInfer chooses kernels by; None for devices that have no such number."""
    if device.type == "cpu":
        return None
    found = torch.get_device_module(device).get_device_capability(device)
    return found if isinstance(found, tuple) else None


# -- sizes


def workspace_need(
    backend: str, *, heads: int, rows: int, units: int, query_length: int = 1
) -> int:
    """Bytes that a back end needs on a device with `units` multiprocessors, for `rows` requests.

    fa2 and fa3: two parts of 64 rows a unit, bfloat16, with their float32 log-sum-exps (MLAPlan of
    FlashInfer's scheduler.cuh). trtllm-gen, when it returns log-sum-exps: two floats for each head,
    request, and query rounded up to 256, and a guard of 1 MiB (its trtllm_fmha_kernel_launcher.cu).
    """
    if backend in {"fa2", "fa3"}:
        cluster = 2 if heads * query_length > 64 else 1
        return 2 * (units // cluster * cluster) * 64 * (2 * _LATENT + 4)
    if backend == "trtllm-gen":
        return 8 * heads * rows * round_up(query_length, 256) + _MIB
    raise InvalidArgument(f"the workspace of FlashInfer's {backend!r} is not known; give its bytes")


def workspace_bytes(backend: str, *, heads: int, rows: int, device: torch.device) -> int:
    """Bytes to take for a back end: what it needs, or what the environment says.

    Raises `WorkspaceTooSmall`, before anything is launched, where the environment says too little.
    """
    need = workspace_need(backend, heads=heads, rows=rows, units=multiprocessors(device))
    have = configured_bytes()
    if have is None:
        return need
    if have < need:
        raise WorkspaceTooSmall(f"FlashInfer {backend}", need, have, SIZE_SETTING)
    return have


def configured_bytes() -> int | None:
    """What the environment says; None when it says nothing."""
    text = os.environ.get(SIZE_SETTING, "")
    if not text:
        return None
    if not text.isdecimal():
        raise InvalidArgument(f"{SIZE_SETTING}={text!r}; give bytes as a whole number, or unset it")
    return int(text)


# -- what a workspace has to hold


def scratch_kind(backend: str) -> ScratchKind:
    """What a back end's workspace has to hold, decided by the installed release.

    fa2, fa3 and cutlass write before they read. A release whose entry takes counters apart needs
    them at zero there; an entry without that argument counts in its workspace. Of what is not known
    the strictest is assumed.
    """
    if backend in {"fa2", "fa3", "cutlass"}:
        return ScratchKind.UNZEROED
    if backend == "trtllm-gen" and COUNTER_ARGUMENT in _arguments_of_trtllm_gen():
        return ScratchKind.COUNTERS_APART
    return ScratchKind.ZEROED


@functools.cache
def _arguments_of_trtllm_gen() -> frozenset[str]:
    mla: Any = _import("flashinfer.mla")
    entry = getattr(mla, "trtllm_batch_decode_with_kv_cache_mla", None)
    return frozenset(inspect.signature(entry).parameters) if entry is not None else frozenset()


def _import(name: str) -> Any:
    import importlib

    return importlib.import_module(name)
