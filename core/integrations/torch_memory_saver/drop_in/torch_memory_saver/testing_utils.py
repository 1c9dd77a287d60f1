"""The helpers that torch_memory_saver's own scenarios use."""

import hal
from hal.core.residual import give_torch_cache_back

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device"]


def get_device() -> str:
    """torch's name of the device type."""
    return hal.detect().device_type


def empty_cache() -> None:
    """Give what torch caches back to the device."""
    give_torch_cache_back(hal.detect())


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Bytes of a device that are in use, by all processes; also printed."""
    memory = hal.detect().get_memory_info(gpu_id)
    if memory.total is None or memory.free is None:
        raise hal.Unsupported("free memory", hal.detect().name, memory.reason)
    used = memory.total - memory.free
    print(f"GPU {gpu_id} memory: {used / 1024**3:.2f} GB ({message})")  # noqa: T201 - as its name says
    return used
