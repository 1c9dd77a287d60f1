"""LoRA adapters live through a sleep that discards the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.tags import WEIGHTS


def preserve_adapters(allocator: HalMemAllocator, model_runner: Any) -> None:
    """Keep adapter state that vLLM put into the weights pool, where no runtime pool could be open
    inside it.
    """
    if getattr(model_runner, "lora_config", None) is None or not allocator.is_open:
        return
    manager = allocator.manager
    stray = [t for t in adapter_tensors(model_runner.model) if manager.tag_of(t) == WEIGHTS]
    if stray:
        manager.preserve(stray)


def adapter_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The slots and the mapping metadata of every layer that adapters are applied to.

    vLLM keeps them as plain attributes, so that they are no parameters of the model.
    """
    for module in model.modules():
        if hasattr(module, "lora_a_stacked") or hasattr(module, "punica_wrapper"):
            yield from _tensors_of(module)
            yield from _tensors_of(getattr(module, "punica_wrapper", None))


def _tensors_of(holder: Any) -> Iterator[torch.Tensor]:
    for value in vars(holder).values() if holder is not None else ():
        items = value if isinstance(value, list | tuple) else (value,)
        yield from (item for item in items if isinstance(item, torch.Tensor))
