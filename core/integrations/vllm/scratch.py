"""Scratch that vLLM keeps outside its pools, moved into the workspace tag.

Each move checks the names that it needs in the installed vLLM; where one is missing it says so in
one line and changes nothing.
"""

from __future__ import annotations

from typing import Any

from hal.core.integrations.vllm.allocator import HalMemAllocator


def take_over(allocator: HalMemAllocator, worker: Any) -> None:
    """Move what this engine uses; called after loading, before profiling and warm-up."""
