"""What every launch of a Triton kernel asks: the interpreter, the device, its multiprocessors."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

INTERPRETED_MULTIPROCESSORS = 4
"""Programs run one after the other there; a few show how work is shared out."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device; else plain torch serves."""
    return _has_triton() and (device.type != "cpu" or interpreted())


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def multiprocessors(device: torch.device) -> int:
    """How many programs the device works on at once, one on each multiprocessor."""
    return INTERPRETED_MULTIPROCESSORS if interpreted() else _multiprocessors(device.index or 0)


@functools.cache
def _multiprocessors(index: int) -> int:
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["multiprocessor_count"])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device: make it this one."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return nullcontext()
    return torch.accelerator.device_index(device.index)
