"""Memory queries of AMD GPUs: amdsmi, then the kernel driver's files, then the runtime, then torch.

None creates a device context. The runtime's own query is what decisions rest on once a device is
open; the others are asked by PCI address or UUID, never by index.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from hal.memory import MemoryInfo
from hal.rocm import kfd
from hal.rocm.kfd import Gpu
from hal.rocm.smi import NoAnswerError, Smi, plausible_use
from hal.rocm.visibility import VisibleDevices, identify, visible_devices

_smi = Smi()
os.register_at_fork(after_in_child=_smi.renew)


@dataclass(frozen=True)
class Target:
    """The device that is asked about.

    `device_id` is the PCI address or UUID that the opened device gave and `driver` its query of
    (free, total), both None while it is not open; `tracked` is what this library has mapped on it.
    All sizes in bytes.
    """

    index: int
    device_id: str | None = None
    driver: Callable[[], tuple[int, int]] | None = None
    tracked: int | None = None

    def gpu(self) -> Gpu:
        """The GPU by the names that management libraries know; raises `LookupError`."""
        device_id = self.device_id or _torch_uuid(self.index)
        return identify(kfd.gpus(), os.environ, self.index, device_id)


def memory_info(target: Target) -> MemoryInfo:
    """Memory of a device from the first source that answers; raises nothing."""
    reasons: list[str] = []
    for name, ask in _SOURCES.items():
        try:
            info = ask(target)
        except Exception as error:  # noqa: BLE001 - asked while handling errors, which it must not replace
            reasons.append(f"{name}: {str(error) or type(error).__name__}")
        else:
            return replace(info, reason="; ".join(filter(None, [*reasons, info.reason])))
    return MemoryInfo(None, None, None, "none", False, "; ".join(reasons), tracked=target.tracked)


def _ask_smi(target: Target) -> MemoryInfo:
    return _smi.memory(target.gpu(), target.tracked)


def _ask_kernel(target: Target) -> MemoryInfo:
    gpu = target.gpu()
    vram = kfd.vram(gpu)
    used, reason = plausible_use(kfd.process_vram(gpu, os.getpid()), target.tracked)
    return MemoryInfo(
        vram.total,
        vram.total - vram.used,
        used,
        "sysfs",
        exact=used is not None,
        reason=reason,
        tracked=target.tracked,
    )


def _ask_driver(target: Target) -> MemoryInfo:
    if target.driver is None:
        raise NoAnswerError("the device is not open")
    return _of_device("driver", target, *target.driver())


def _ask_torch(target: Target) -> MemoryInfo:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise NoAnswerError("torch has not started the GPU")
    has_context = torch._C._cuda_hasPrimaryContext  # noqa: SLF001 - torch has no public way to ask
    if not has_context(target.index):  # and its query would make one
        raise NoAnswerError(f"torch has no context on device {target.index}")
    return _of_device("torch", target, *torch.cuda.mem_get_info(target.index))


def _of_device(source: str, target: Target, free: int, total: int) -> MemoryInfo:
    reason = f"{source}: it does not tell what one process uses"
    return MemoryInfo(int(total), int(free), None, source, False, reason, tracked=target.tracked)


_SOURCES: dict[str, Callable[[Target], MemoryInfo]] = {
    "amdsmi": _ask_smi,
    "sysfs": _ask_kernel,
    "driver": _ask_driver,
    "torch": _ask_torch,
}


def _torch_uuid(index: int) -> str | None:
    """What torch says of a device once it has started the GPUs and the visible lists are frozen.

    HIP writes a UUID as 16 digits, where torch expects 16 bytes.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    digits = bytes(torch.cuda.get_device_properties(index).uuid.bytes)
    return f"GPU-{digits.decode('ascii', 'replace')}"


def visible() -> VisibleDevices:
    """What HIP would show this process if it started now; starts nothing."""
    return visible_devices(kfd.gpus(), os.environ)
