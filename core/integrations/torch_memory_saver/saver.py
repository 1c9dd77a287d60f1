"""`TorchMemorySaver`: regions, pauses and resumes as torch_memory_saver 0.0.10 has them."""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch

import hal
from hal.core.integrations.torch_memory_saver.keeping import (
    CpuBackupBackend,
    Settings,
    check_arguments,
    settings_of,
)
from hal.core.integrations.torch_memory_saver.managers import Managers
from hal.core.integrations.torch_memory_saver.regions import Regions
from hal.core.report import SleepReport, WakeReport
from hal.core.residual import give_torch_cache_back
from hal.errors import InvalidArgument, StateError, Unsupported
from hal.platform import Platform

HookMode = Literal["preload", "torch"]
_TAG = "default"


class MarginUnsupported(Unsupported, NotImplementedError):
    """Free device memory is not known here, so that no margin of it can be kept."""


class TorchMemorySaver:
    """Releases the memory of tensors made in regions, and takes it again at the same addresses.

    It works by torch's pools in either hook mode; nothing has to be preloaded. Errors are those of
    `hal.errors`, and a call that fails leaves what it found. `platform` is for tests; without it
    the first use detects one.
    """

    def __init__(self, *, platform: Platform | None = None) -> None:
        self._platform = platform
        self._hook_mode: HookMode = "preload"
        self._regions = Regions()
        self._lock = threading.RLock()
        self._managers: Managers | None = None
        self._for_good = ExitStack()
        self._graph_groups: dict[object, object] = {}
        self._numbers = itertools.count()

    # -- regions

    @contextmanager
    def region(
        self,
        tag: str = _TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """What this thread allocates inside can be paused under `tag`; the innermost region counts.

        A pause gives the contents up, or with `enable_cpu_backup` keeps them in host memory
        ("pinned", or "mmap": pageable), or with `enable_disk_backup` in a nameless file. Raises
        `InvalidArgument` (a `ValueError`) for options that do not go together, and `AsleepError`
        while the tag is paused.
        """
        check_arguments(cpu=enable_cpu_backup, disk=enable_disk_backup, backend=cpu_backup_backend)
        managers = self._started()
        if self._regions.open and not (flatten := managers.capabilities.flatten):
            raise Unsupported("a region inside another", managers.platform.name, flatten.reason)
        managed = managers.of(
            cpu=enable_cpu_backup, disk=enable_disk_backup, backend=cpu_backup_backend
        )
        with self._regions.entered(lambda: managed.sleeper.pool(tag, managed.policy)):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Capture a device graph whose memory can be paused under `tag`, as the device module's
        `graph` captures one.

        Graphs that are given one `pool` share memory, those without do not; it is memory of this
        library in any case. Raises `Unsupported` where a graph's pool cannot sleep.
        """
        check_arguments(cpu=enable_cpu_backup, disk=False, backend=cpu_backup_backend)
        managers = self._started()
        managed = managers.of(cpu=enable_cpu_backup, disk=False, backend=cpu_backup_backend)
        group = self._graph_group(pool)
        with (
            self._regions.entered(nullcontext),
            managed.sleeper.graph_pool(tag, managed.policy, group=group) as pool_id,
        ):
            self._graph_groups[pool_id] = group
            module = torch.get_device_module(managers.platform.device_type)
            with module.graph(
                cuda_graph, pool=pool_id, stream=stream, capture_error_mode=capture_error_mode
            ):
                yield

    def _graph_group(self, pool: Any) -> object:
        """Whose memory a graph shares; `pool` may be that of an earlier graph."""
        with self._lock:
            if pool is None:
                return next(self._numbers)
            handle = getattr(pool, "id", pool)
            return self._graph_groups.setdefault(handle, next(self._numbers))

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Allocate outside the regions that are open; what torch caches there goes at the end."""
        platform = self._started().platform
        try:
            with self._regions.entered(nullcontext):
                yield
        finally:
            give_torch_cache_back(platform)

    # -- transitions

    def pause(self, tag: str | None = None) -> tuple[SleepReport, ...]:
        """Release the memory of a tag, or of all; what is paused already is passed over.

        Raises `HostMemoryError`, `StateError` while another thread is in a region, and the driver's
        typed errors; then nothing is paused that was not before.
        """
        managers = self._started()
        with self._regions.left():
            return managers.pause(tag or None)

    def resume(self, tag: str | None = None) -> tuple[WakeReport, ...]:
        """Take the memory of a tag, or of all, at its addresses; what is awake is passed over.

        Raises `OutOfDeviceMemory`, `BackupCorrupted` and the driver's typed errors; then everything
        is paused as before, and the same call may be made again.
        """
        managers = self._started()
        with self._regions.left():
            return managers.resume(tag or None)

    def get_cpu_backup(
        self,
        x: torch.Tensor,
        zero_copy: bool = False,  # noqa: ARG002 - a view would outlive the backup
    ) -> torch.Tensor | None:
        """A paused tensor's contents, as a host tensor of its own; None for one that is not paused.

        A backup that `retain_cpu_backup` has kept is given for an awake tensor too. `zero_copy`
        changes nothing. Raises `StateError` where the region keeps no backup, `InvalidArgument` for
        a tensor of another device or with gaps.
        """
        managers = self._started()
        _check_tensor(x, managers.platform.device_type)
        if (found := managers.holding(x)) is None:
            return None
        sleeper, tag = found
        is_paused = tag in sleeper.sleeping_tags
        with self._regions.left():
            copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        try:
            sleeper.read_backup(x, copy)
        except StateError as error:
            if not is_paused:
                return None
            raise StateError(
                f"the tensor is paused and its region {tag!r} keeps no backup; open such a region "
                "with enable_cpu_backup=True"
            ) from error
        return copy

    # -- settings

    @property
    def enabled(self) -> bool:
        """Always True."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """ "preload" or "torch", which are the same here; can be set before the first use."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, value: HookMode) -> None:
        if value not in get_args(HookMode):
            raise InvalidArgument(f"hook_mode={value!r}: use 'preload' or 'torch'")
        if self._managers is not None:
            raise StateError("the saver is in use already; set hook_mode before its first use")
        self._hook_mode = value

    @property
    def memory_margin_bytes(self) -> int:
        """Free device memory that allocations in regions leave alone; they fail before.

        Setting it raises `MarginUnsupported` where free memory is not known.
        """
        return self._started().margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        managers = self._started()
        if value < 0:
            raise InvalidArgument(f"a margin is not negative, {value} bytes were given")
        known = managers.capabilities.free_is_truthful
        if value and not known:
            raise MarginUnsupported("memory_margin_bytes", managers.platform.name, known.reason)
        managers.margin = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether a resume keeps the backup, so that the next pause need not take host memory."""
        return self._started().retain

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._started().retain = value

    def set_disk_backup_dir(self, path: str) -> None:
        """Where regions that are opened from now on keep disk backups; made if it is not there."""
        managers = self._started()
        Path(path).mkdir(parents=True, exist_ok=True)
        managers.disk_directory = str(path)

    # -- the first use

    def _started(self) -> Managers:
        """The managers; the first use detects the platform and reads the variables."""
        with self._lock:
            if self._managers is None:
                settings = settings_of()
                self._managers = Managers(self._platform or hal.detect(), settings)
                if settings.init_enable:
                    self._open_for_good(settings)
            return self._managers

    def _open_for_good(self, settings: Settings) -> None:
        """Open the region of `TMS_INIT_ENABLE` on this thread; it is left at the process's end."""
        thread = threading.get_ident()
        self._for_good.enter_context(self.region(_TAG, settings.init_cpu, settings.init_disk))

        @atexit.register
        def close() -> None:  # torch aborts when a pool goes that is still open
            if threading.get_ident() == thread:
                self._for_good.close()


def _check_tensor(x: torch.Tensor, device_type: str) -> None:
    if x.device.type != device_type:
        raise InvalidArgument(f"a tensor on {x.device} has no backup; give one on {device_type}")
    if not x.is_contiguous():
        raise InvalidArgument(
            f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous; ask "
            "for the tensor that it is a view of"
        )
