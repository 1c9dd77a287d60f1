"""AMD's management library through its Python package, opened when first asked.

Its memory calls answer in bytes, but for the older one of them, which answers in MiB. Its figures
lag behind what the driver has done.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hal.memory import MemoryInfo
from hal.rocm import kfd
from hal.rocm.kfd import Gpu, Vram, same_address
from hal.torch_build import read_version_file

PACKAGE = "amdsmi"
INSTALL = "install ROCm's package amd-smi-lib, or accel-hal[rocm]"
LAG = "amdsmi: its figures lag behind the driver's"
_MIB = 1 << 20


class NoAnswerError(Exception):
    """Internal to this room: a source of figures cannot answer, and why."""


class Smi:
    """The library, safe for threads; it is never shut down, since torch may use it too.

    `memory` raises `NoAnswerError`, `LookupError` or what the package raises.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, as in a forked child, where no thread is left to give the lock back."""
        self._lock = threading.Lock()
        self._library: Any = None

    def memory(self, gpu: Gpu, tracked: int | None) -> MemoryInfo:
        """Memory of a GPU, found by its PCI address or UUID and never by an index."""
        library = self._opened()
        handle = _handle(library, gpu)
        vram = _vram(library, handle)
        used, reason = _process_used(library, handle, gpu, tracked)
        return MemoryInfo(
            vram.total,
            vram.total - vram.used,
            used,
            "amdsmi",
            exact=False,
            reason="; ".join(filter(None, [LAG, reason])),
            tracked=tracked,
        )

    def _opened(self) -> Any:
        with self._lock:
            if self._library is None:
                library = import_package()
                library.amdsmi_init(library.AmdSmiInitFlags.INIT_AMD_GPUS)
                self._library = library
            return self._library


def _handle(library: Any, gpu: Gpu) -> Any:
    handles = library.amdsmi_get_processor_handles()
    for handle in handles:
        if gpu.address and same_address(library.amdsmi_get_gpu_device_bdf(handle), gpu.address):
            return handle
    for handle in handles:
        if gpu.uuid and _uuid(library, handle) == gpu.uuid.lower():
            return handle
    raise LookupError(f"amdsmi lists {len(handles)} GPUs, none is {gpu.address or gpu.uuid}")


def _uuid(library: Any, handle: Any) -> str:
    """As the ROCm runtime forms it: the serial number of the chip. The library's own differ."""
    serial = str(library.amdsmi_get_gpu_asic_info(handle)["asic_serial"]).lower()
    return f"gpu-{serial.removeprefix('0x').rjust(16, '0')}"


def _vram(library: Any, handle: Any) -> Vram:
    kind = library.AmdSmiMemoryType.VRAM
    try:
        return Vram(
            int(library.amdsmi_get_gpu_memory_total(handle, kind)),
            int(library.amdsmi_get_gpu_memory_usage(handle, kind)),
        )
    except library.AmdSmiException:
        in_mib = library.amdsmi_get_gpu_vram_usage(handle)
        return Vram(int(in_mib["vram_total"]) * _MIB, int(in_mib["vram_used"]) * _MIB)


def _process_used(
    library: Any, handle: Any, gpu: Gpu, tracked: int | None
) -> tuple[int | None, str]:
    """What this process uses, or None and why; a list that has no figure for it is not a 0."""
    try:
        listed = _listed_use(library.amdsmi_get_gpu_process_list(handle))
    except library.AmdSmiException:
        listed = None
    return plausible_use(listed or kfd.process_vram(gpu, os.getpid()), tracked)


def _listed_use(processes: list[Any]) -> int | None:
    """The bytes of this process's entries; None where it has none or one without a figure."""
    own = [entry for entry in processes if _field(entry, "pid") == os.getpid()]
    used = [_field(_field(entry, "memory_usage"), "vram_mem") for entry in own]
    return sum(used) if used and all(isinstance(bytes_, int) for bytes_ in used) else None


def _field(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else None


def plausible_use(used: int | None, tracked: int | None) -> tuple[int | None, str]:
    """The figure, or None and why: less than this library holds cannot be this process's."""
    if used is None:
        return None, (
            f"pid not visible: nobody tells what pid {os.getpid()} uses; in a container it has "
            "another number outside"
        )
    if used < (tracked or 1):
        return None, (
            f"{used} bytes are listed for pid {os.getpid()}, less than this process holds: the pid "
            "is of another process, or the figure is missing"
        )
    return used, ""


# -- the package


def import_package() -> ModuleType:
    """The package: the one that is imported already, else the ROCm installation's own, which
    matches its library, else the one of this environment. Raises `NoAnswerError`.
    """
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    reasons = []
    for where, spec in _found().items():
        try:
            return _load(spec)
        except Exception as error:  # noqa: BLE001 - it raises a KeyError where its library is missing
            reasons.append(f"{where} fails with {type(error).__name__}: {error}")
    raise NoAnswerError("; ".join(reasons) or f"{PACKAGE} is not installed, {INSTALL}")


def _found() -> dict[str, ModuleSpec]:
    """The packages that there are, by where they come from, in the order of preference."""
    found: dict[str, ModuleSpec] = {}
    for folder in installations():
        spec = PathFinder.find_spec(PACKAGE, [str(folder / "share" / "amd_smi")])
        if spec is not None:
            found[f"{PACKAGE} of {folder}"] = spec
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin not in {other.origin for other in found.values()}:
        found[f"{PACKAGE} of this environment"] = spec
    return found


def installations() -> tuple[Path, ...]:
    """Where ROCm may be installed, each once."""
    named = (os.environ.get(name) for name in ("ROCM_HOME", "ROCM_PATH"))
    return tuple(dict.fromkeys(Path(name) for name in (*named, "/opt/rocm") if name))


def _load(spec: ModuleSpec) -> ModuleType:
    if spec.loader is None:
        raise NoAnswerError("it is a folder without a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it raises
            spec.loader.exec_module(module)
    except BaseException:
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        raise
    return module


def versions() -> dict[str, str]:
    """The version of every package that there is; imports none of them."""
    return {where: _version(spec) for where, spec in _found().items()}


def _version(spec: ModuleSpec) -> str:
    return read_version_file(Path(spec.origin or "").with_name("_version.py")).version
