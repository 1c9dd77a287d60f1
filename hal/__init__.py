"""The platform layer: which accelerator this is, what it can do, and memory on it that can sleep.

Importing this package imports no torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hal.detect import detect
from hal.errors import (
    AddressLostError,
    AsleepError,
    BackupCorrupted,
    BusyError,
    DirtyError,
    DriverError,
    HalError,
    HostMemoryError,
    NoPlatformError,
    OutOfDeviceMemory,
    ProcessLost,
    StateError,
    UnknownPlatformError,
    UnknownTagError,
    Unsupported,
    WorkspaceLocked,
    WorkspaceTooSmall,
)
from hal.memory import MemoryInfo
from hal.platform import Capabilities, Flag, Platform, PoolNesting

if TYPE_CHECKING:
    from hal.pools import Pool

    __version__: str

__all__ = [
    "AddressLostError",
    "AsleepError",
    "BackupCorrupted",
    "BusyError",
    "Capabilities",
    "DirtyError",
    "DriverError",
    "Flag",
    "HalError",
    "HostMemoryError",
    "MemoryInfo",
    "NoPlatformError",
    "OutOfDeviceMemory",
    "Platform",
    "Pool",
    "PoolNesting",
    "ProcessLost",
    "StateError",
    "UnknownPlatformError",
    "UnknownTagError",
    "Unsupported",
    "WorkspaceLocked",
    "WorkspaceTooSmall",
    "__version__",
    "detect",
]

_LAZY = {"Pool": "hal.pools"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("accel-hal")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
