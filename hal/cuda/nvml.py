"""NVIDIA's management library: cards, MIG devices and memory figures, without a device context.

The figures have one basis: `total` is the whole memory, `reserved` what the driver keeps for
itself and `free` what a process could still get, so `total - reserved - free` is in use by
processes. Only the second form of the memory query (source "nvml v2") tells `reserved` apart; the
first ("nvml v1", old drivers) counts it as used.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from hal.cuda.visibility import LIST, ORDER, Card, identify
from hal.memory import MemoryInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INSTALL = "nvidia-ml-py is not installed, install accel-hal[cuda]"

_Answer = TypeVar("_Answer")


class NoAnswerError(Exception):
    """Internal to this room: a source of figures cannot answer, and why."""


class Nvml:
    """NVIDIA's management library through nvidia-ml-py, opened when first asked; safe for threads.

    It is never shut down: a forked child shares the parent's connection to the kernel driver, and
    closing it in one could close it for both. Methods raise `NoAnswerError`, `LookupError` or what
    NVML raises.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, as in a forked child, where no thread is left to give the lock back."""
        self._lock = threading.Lock()
        self._library: Any = None
        self._handles: dict[tuple[int, str | None, str | None, str | None], Any] = {}

    def cards(self) -> tuple[Card, ...]:
        """The cards that this process may use, in bus order."""
        return self._ask(_cards)

    def memory(
        self, index: int, device_id: str | None, tracked: int | None, process: int | None = None
    ) -> MemoryInfo:
        """Memory of the device that CUDA numbers `index`, or that called itself `device_id`, and
        what a process (None: this one) uses of it.
        """
        pid = process or os.getpid()
        return self._ask(
            lambda library: _read(library, self._handle(library, index, device_id), tracked, pid)
        )

    def _ask(self, question: Callable[[Any], _Answer]) -> _Answer:
        library = self._opened()
        try:
            return question(library)
        except library.NVMLError_Uninitialized:
            self._library = None  # another user of nvidia-ml-py in this process has shut it down
            return question(self._opened())
        except library.NVMLError:
            self._handles = {}  # devices go and change: MIG is reconfigured, a card is reset
            raise

    def _opened(self) -> Any:
        with self._lock:
            if self._library is None:
                library = _import_library()
                library.nvmlInit()
                self._handles, self._library = {}, library
            return self._library

    def _handle(self, library: Any, index: int, device_id: str | None) -> Any:
        key = index, device_id, os.environ.get(LIST), os.environ.get(ORDER)
        if key not in self._handles:
            uuid = identify(_cards(library), os.environ, index, device_id)
            self._handles[key] = library.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[key]


def _import_library() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NoAnswerError(INSTALL) from error
    return pynvml


def _cards(library: Any) -> tuple[Card, ...]:
    positions = range(library.nvmlDeviceGetCount())
    return tuple(card for at in positions if (card := _card(library, at)) is not None)


def _card(library: Any, position: int) -> Card | None:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(position)
    except (library.NVMLError_NoPermission, library.NVMLError_GpuIsLost):
        return None  # NVML counts every card of the machine, CUDA shows those it can use
    return Card(
        uuid=library.nvmlDeviceGetUUID(handle),
        bus_id=os.fsdecode(library.nvmlDeviceGetPciInfo(handle).busId),
        name=library.nvmlDeviceGetName(handle),
        slices=_slices(library, handle),
    )


def _slices(library: Any, card: Any) -> tuple[str, ...] | None:
    try:
        is_on = library.nvmlDeviceGetMigMode(card)[0] == library.NVML_DEVICE_MIG_ENABLE
    except (library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound):
        return None
    return tuple(_slice_uuids(library, card)) if is_on else None


def _slice_uuids(library: Any, card: Any) -> Iterator[str]:
    for position in range(library.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            handle = library.nvmlDeviceGetMigDeviceHandleByIndex(card, position)
        except (library.NVMLError_NotFound, library.NVMLError_NoPermission):
            continue  # positions go up to the largest possible count, most are empty
        yield library.nvmlDeviceGetUUID(handle)


def _read(library: Any, handle: Any, tracked: int | None, pid: int) -> MemoryInfo:
    memory, source = _memory(library, handle)
    used, reason = _process_used(library, handle, tracked, pid)
    return MemoryInfo(
        total=int(memory.total),
        free=int(memory.free),
        process_used=used,
        source=source,
        exact=used is not None,
        reason=reason,
        reserved=int(memory.reserved) if source == "nvml v2" else None,
        tracked=tracked,
    )


def _memory(library: Any, handle: Any) -> tuple[Any, str]:
    """NVML's figures and their form, which for one driver is always the same."""
    try:
        return library.nvmlDeviceGetMemoryInfo(handle, library.nvmlMemory_v2), "nvml v2"
    except (library.NVMLError_FunctionNotFound, library.NVMLError_ArgumentVersionMismatch):
        return library.nvmlDeviceGetMemoryInfo(handle), "nvml v1"


def _process_used(
    library: Any, handle: Any, tracked: int | None, pid: int
) -> tuple[int | None, str]:
    """What a process uses, or None and why.

    In a container NVML may list it by a PID of outside, list a stranger that has the same number
    outside, or list it as using nothing.
    """
    try:
        processes = _processes(library, handle, pid)
    except library.NVMLError as error:
        return None, f"NVML does not list processes: {error}"
    own = [process.usedGpuMemory for process in processes if process.pid == pid]
    if not own:
        return None, (
            f"pid not visible: NVML lists {len(processes)} processes, none is {pid}: it "
            "has no context yet, or NVML gives PIDs of outside this container"
        )
    if None in own:
        return None, "NVML does not tell how much a process uses on this system"
    used = sum(own)
    if used < (tracked or 1):
        return None, (
            f"NVML lists {used} bytes for pid {pid}, less than this process holds: "
            "the pid is of another process, or the figure is missing"
        )
    return used, ""


def _processes(library: Any, handle: Any, pid: int) -> list[Any]:
    """Processes with a context; clients of the multi-process service have a list of their own."""
    processes = list(library.nvmlDeviceGetComputeRunningProcesses(handle))
    if not any(process.pid == pid for process in processes):
        try:
            processes += library.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        except (library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound):
            return processes
    return processes
