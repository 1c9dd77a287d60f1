"""torch_memory_saver's public API over this library: its users run unchanged after `install()`."""

from __future__ import annotations

from hal.core.integrations.torch_memory_saver.install import configure_subprocess, install
from hal.core.integrations.torch_memory_saver.saver import TorchMemorySaver

torch_memory_saver = TorchMemorySaver()
"""The one saver of this process, which all its users share."""

__all__ = ["TorchMemorySaver", "configure_subprocess", "install", "torch_memory_saver"]
