"""What `import torch_memory_saver` finds after `install()`: accel-hal's implementation of it."""

from hal.core.integrations.torch_memory_saver import (
    TorchMemorySaver,
    configure_subprocess,
    torch_memory_saver,
)

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
