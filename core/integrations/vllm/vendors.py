"""What vLLM calls each vendor's parts: the one place of the plugin in which vendors have names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vendor:
    """One built-in platform of vLLM, and the allocator that its sleep mode asks for memory."""

    builtin: str
    """vLLM's name of the built-in platform plugin."""
    hal_platform: str
    """The platform of this library that drives the same devices."""
    platform_class: str
    """The name of our class over vLLM's own, in `hal.core.integrations.vllm.platforms`."""
    allocator: str = ""
    """Where vLLM's allocator singleton is, as "module:Class"; "" where vLLM has none."""
    available: str = ""
    """The flag of that module which says that the singleton may be asked for."""

    def allocator_class(self) -> Any:
        """vLLM's allocator class; ImportError where this vLLM has none."""
        module, _, name = self.allocator.partition(":")
        return getattr(importlib.import_module(module), name)


VENDORS = {
    "cuda": Vendor(
        "cuda",
        "cuda",
        "HalCudaPlatform",
        "vllm.device_allocator.cumem:CuMemAllocator",
        "cumem_available",
    ),
    "rocm": Vendor(
        "rocm",
        "rocm",
        "HalRocmPlatform",
        "vllm.device_allocator.cumem:CuMemAllocator",
        "cumem_available",
    ),
    "xpu": Vendor(
        "xpu",
        "xpu",
        "HalXpuPlatform",
        "vllm.device_allocator.xpumem:XpuMemAllocator",
        "xpumem_available",
    ),
    "cpu": Vendor("cpu", "cpu", "HalCpuPlatform"),
}
