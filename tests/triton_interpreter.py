"""Triton's interpreter, which runs kernels on the host: for the tests of kernels."""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def interpreter_problem() -> str:
    """Why Triton's interpreter cannot run here; empty when it can."""
    if torch.accelerator.is_available():
        return "the kernel itself runs here, and a process has it either way"
    try:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
        from hal.core.kernels import mla_decode_triton  # noqa: F401 - defines them
        from hal.core.kernels.topk_topp_launch import launch

        logits = torch.randn(1, 8)
        launch(logits, torch.tensor([2]), None, None, None, torch.empty(1, 1024))
    except Exception as problem:  # noqa: BLE001 - whatever it is, it is told
        return f"Triton's interpreter does not run: {problem}"
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
    return ""
