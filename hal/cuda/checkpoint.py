"""CUDA's process checkpoint, as seen by the process that is parked: its helper, what is known to
stand against it, and device memory by way of another process: in a parked one even NVML waits.

What a driver cannot checkpoint is told by its calls at the latest; listed here is what can be known
before anything is touched. NVIDIA documents that memory shared between processes (IPC) and managed
memory are not supported.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.cuda import checkpoint_helper, memory_reader
from hal.helper_process import HelperLost, HelperProcess
from hal.memory import MemoryInfo
from hal.process_checkpoint import ProcessCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hal.native import Device

NOT_READY = 600
ANSWERS_WITHIN = 20.0
"""Seconds for a reader that has to start first."""
_MAPS = Path("/proc/self/maps")
_MANAGED = "/dev/nvidia-uvm"


class CudaCheckpoint(ProcessCheckpoint):
    """The checkpoint of this process on the CUDA devices that it has open."""

    busy_code = NOT_READY

    def __init__(self, devices: Mapping[int, Device]) -> None:
        self._ids = {index: device.facts.device_uuid or None for index, device in devices.items()}

    def command(self) -> Sequence[str]:
        return _command(checkpoint_helper.__file__)

    def why_not_now(self) -> str | None:
        return _shared_tensors() or _communicators() or _managed_memory()

    def memory(self) -> Mapping[int, MemoryInfo]:
        try:
            return _reader.read(self._ids)
        except (OSError, ValueError, HelperLost) as error:
            unknown = MemoryInfo(None, None, None, "none", False, f"the reader: {error}")
            return dict.fromkeys(self._ids, unknown)


class _Reader:
    """The process that reads device memory for this one, which may be parked; started when first
    asked.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, as in a forked child, whose parent's helper it is not."""
        self._lock = threading.Lock()
        self._helper: HelperProcess | None = None

    def read(self, ids: Mapping[int, str | None]) -> Mapping[int, MemoryInfo]:
        with self._lock:
            if self._helper is None or not self._helper.is_alive:
                self._helper = HelperProcess(_command(memory_reader.__file__))
            answer = self._helper.ask({"path": sys.path, "devices": ids}, ANSWERS_WITHIN)
        return {int(index): MemoryInfo(**fields) for index, fields in answer.items()}


def _command(file: str) -> Sequence[str]:
    """What runs a helper, isolated: it starts in a few hundredths of a second whatever is
    installed.
    """
    return sys.executable, "-I", "-S", file


_reader = _Reader()
os.register_at_fork(after_in_child=_reader.renew)


def _shared_tensors() -> str | None:
    """Memory of other processes that torch has mapped here."""
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None or not len(reductions.shared_cache):
        return None
    reductions.shared_cache.free_dead_references()
    count = sum(1 for _ in reductions.shared_cache)
    if not count:
        return None
    return f"{count} storages of other processes are mapped here (CUDA IPC); drop them first"


def _communicators() -> str | None:
    """Process groups of several ranks whose collectives run on the device: they share memory."""
    names = [name for name, size in _process_groups() if "nccl" in name and size > 1]
    if not names:
        return None
    return (
        f"{len(names)} NCCL process groups of several ranks exist, whose communicators may share "
        "memory between processes; destroy them before, and make them again after the wake"
    )


def _process_groups() -> Iterator[tuple[str, int]]:
    """(backend, ranks) of torch's process groups."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return
    for group in distributed._world.pg_map:  # noqa: SLF001 - torch has no public list of them
        yield str(distributed.get_backend_config(group)), group.size()


def _managed_memory() -> str | None:
    """Managed (unified) memory shows as further mappings of the driver's device file for it: a
    process without any has at most one (seen on drivers 580 and 595).
    """
    try:
        mapped = sum(_MANAGED in line for line in _MAPS.read_text().splitlines())
    except OSError:
        return None
    if mapped <= 1:
        return None
    return f"managed memory is in use ({mapped} mappings of {_MANAGED}); free it first"
