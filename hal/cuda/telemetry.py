"""Memory queries of NVIDIA GPUs: NVML by UUID, then the driver, then torch; none creates a context.

CUDA's own query (sources "driver" and "torch") leaves what the driver keeps for itself out of
`total`, which NVML counts in: figures of two sources do not compare, and `MemoryInfo.source` tells
them apart.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from hal.cuda.nvml import NoAnswerError, Nvml
from hal.cuda.visibility import LIST, Card, kernel_driver_cards, visible_devices
from hal.memory import MemoryInfo
from hal.torch_build import torch_build

if TYPE_CHECKING:
    from collections.abc import Callable

DRIVER = "libcuda.so.1"
_TORCH_CUDA = "install a CUDA build of torch, see https://pytorch.org/get-started/locally"

_nvml = Nvml()
os.register_at_fork(after_in_child=_nvml.renew)


def memory_info(
    index: int,
    *,
    device_id: str | None = None,
    driver: Callable[[], tuple[int, int]] | None = None,
    tracked: int | None = None,
) -> MemoryInfo:
    """Memory of CUDA device `index` from the first source that answers; raises nothing.

    `device_id` is the UUID or PCI address that the opened device gave, `driver` its query of
    (free, total), both None while it is not open; `tracked` is what this library has mapped on it.
    All sizes in bytes.
    """
    sources: dict[str, Callable[[], MemoryInfo]] = {
        "NVML": lambda: _nvml.memory(index, device_id or _torch_uuid(index), tracked),
        "driver": lambda: _of_device("driver", tracked, *_ask_driver(driver)),
        "torch": lambda: _of_device("torch", tracked, *_ask_torch(index)),
    }
    reasons: list[str] = []
    for name, ask in sources.items():
        try:
            info = ask()
        except Exception as error:  # noqa: BLE001 - asked while handling errors, which it must not replace
            reasons.append(f"{name}: {str(error) or type(error).__name__}")
        else:
            return replace(info, reason="; ".join(filter(None, [*reasons, info.reason])))
    return MemoryInfo(None, None, None, "none", False, "; ".join(reasons), tracked=tracked)


def management_memory(index: int, device_id: str | None, process: int | None = None) -> MemoryInfo:
    """Memory of an opened device without a call of its driver, which may be locked, and what a
    process (None: this one) uses of it; raises nothing.

    `device_id` is the UUID or PCI address that the opened device gave.
    """
    try:
        return _nvml.memory(index, device_id, None, process)
    except Exception as error:  # noqa: BLE001 - whatever NVML raises, the figures are unknown
        return MemoryInfo(None, None, None, "none", False, f"NVML: {error}")


def _of_device(source: str, tracked: int | None, free: int, total: int) -> MemoryInfo:
    reason = "it does not tell what one process uses"
    return MemoryInfo(total, free, None, source, False, f"{source}: {reason}", tracked=tracked)


def _ask_driver(driver: Callable[[], tuple[int, int]] | None) -> tuple[int, int]:
    if driver is None:
        raise NoAnswerError("the device is not open")
    return driver()


def _ask_torch(index: int) -> tuple[int, int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise NoAnswerError("torch has not started CUDA")
    has_context = torch._C._cuda_hasPrimaryContext  # noqa: SLF001 - torch has no public way to ask
    if not has_context(index):  # and its query would make one
        raise NoAnswerError(f"torch has no context on device {index}")
    free, total = torch.cuda.mem_get_info(index)
    return int(free), int(total)


def _torch_uuid(index: int) -> str | None:
    """What torch says of a device once it has started CUDA and the visible list is frozen."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return str(torch.cuda.get_device_properties(index).uuid)


# -- for detection


def device_count() -> int:
    """How many devices CUDA would show this process if it started now; starts nothing."""
    cards, _ = _all_cards()
    return len(visible_devices(cards, os.environ).uuids)


def why_not() -> str | None:
    """Why this process cannot use an NVIDIA GPU and what to do; None when it can."""
    return _why_no_device() or _why_no_driver() or _why_no_torch()


def _all_cards() -> tuple[tuple[Card, ...], str]:
    """The cards as NVML or, without it, the kernel driver describes them, and why NVML does not."""
    try:
        return _nvml.cards(), ""
    except Exception as error:  # noqa: BLE001 - whatever NVML raises, its absence is no error here
        return kernel_driver_cards(), str(error)


def _why_no_device() -> str | None:
    cards, reason = _all_cards()
    if not cards:
        return f"no NVIDIA GPU was found ({reason or 'NVML lists none'}); install its driver"
    visible = visible_devices(cards, os.environ)
    if visible.uuids:
        return None
    why = visible.reason or f"{LIST}={os.environ.get(LIST)!r} hides every device"
    return f"none of the {len(cards)} NVIDIA GPUs is visible: {why}; change or unset {LIST}"


def _why_no_driver() -> str | None:
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        return (
            f"the CUDA driver cannot be loaded ({error}); install it, or give the container the "
            "driver capability 'compute'"
        )
    return None


def _why_no_torch() -> str | None:
    build = torch_build()
    if build is None:
        return f"torch is not installed; {_TORCH_CUDA}"
    return None if "cuda" in build.toolkits else f"{build} cannot use CUDA; {_TORCH_CUDA}"
