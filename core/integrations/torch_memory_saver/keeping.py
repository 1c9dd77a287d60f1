"""What a pause does with a region's contents, and the process's wishes in `TMS_*` variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hal.core.tags import Policy
from hal.errors import InvalidArgument
from hal.platform import Capabilities

CpuBackupBackend = Literal["mmap", "pinned"]
_BACKINGS: Mapping[str, str] = {"mmap": "anonymous", "pinned": "pinned"}
_YES, _NO = ("1", "true", "TRUE", "yes", "YES"), ("", "0", "false", "FALSE", "no", "NO")


@dataclass(frozen=True)
class Keeping:
    """The policy of a region's pool and, of an offloaded one, where its backup lies.

    `backing` is that of `BackupOptions`; None is the platform's default.
    """

    policy: Policy
    backing: str | None = None


GIVEN_UP = Keeping(Policy.DISCARD)


@dataclass(frozen=True)
class Settings:
    """What the variables ask for.

    `init_enable`: a region is open on the thread that uses the saver first, from then on, and
    `init_cpu` and `init_disk` say how its contents are kept. `backend` is the default of
    `cpu_backup_backend`. Without a `disk_directory` it is that of `hal.core.backup`.
    """

    init_enable: bool
    init_cpu: bool
    init_disk: bool
    backend: str | None
    retain: bool
    disk_directory: str | None


def settings_of(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the variables; `InvalidArgument` for values that they do not take, or not together."""
    settings = Settings(
        init_enable=_yes(environment, "TMS_INIT_ENABLE"),
        init_cpu=_yes(environment, "TMS_INIT_ENABLE_CPU_BACKUP"),
        init_disk=_yes(environment, "TMS_INIT_ENABLE_DISK_BACKUP"),
        backend=checked_backend(environment.get("TMS_INIT_CPU_BACKUP_BACKEND") or None),
        retain=_yes(environment, "TMS_RETAIN_CPU_BACKUP"),
        disk_directory=environment.get("TMS_DISK_BACKUP_DIR") or None,
    )
    check_arguments(cpu=settings.init_cpu, disk=settings.init_disk, backend=None)
    return settings


def _yes(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "")
    if value not in _YES + _NO:
        raise InvalidArgument(f"{name}={value!r}: use 1 or 0")
    return value in _YES


def checked_backend(backend: str | None) -> str | None:
    """The name of a backend as it was given; `InvalidArgument` when there is none of that name."""
    if backend is not None and backend not in _BACKINGS:
        known = " or ".join(map(repr, get_args(CpuBackupBackend)))
        raise InvalidArgument(f"cpu_backup_backend={backend!r}: use {known}")
    return backend


def check_arguments(*, cpu: bool, disk: bool, backend: str | None) -> None:
    """Refuse, with `InvalidArgument`, options of a region that exclude each other."""
    if backend is not None and not cpu:
        raise InvalidArgument("cpu_backup_backend requires enable_cpu_backup=True")
    if cpu and disk:
        raise InvalidArgument(
            "enable_cpu_backup and enable_disk_backup are mutually exclusive; choose one"
        )
    checked_backend(backend)


def keeping_of(
    capabilities: Capabilities, *, cpu: bool, disk_directory: str | None, backend: str | None
) -> Keeping:
    """How a region with these options keeps its contents.

    Raises `InvalidArgument` for pinned memory where host memory cannot be pinned.
    """
    if disk_directory is not None:
        return Keeping(Policy.OFFLOAD, f"file:{disk_directory}")
    if not cpu:
        return GIVEN_UP
    if backend == "pinned" and not capabilities.pinned_host:
        raise InvalidArgument(
            f"cpu_backup_backend='pinned' is not supported on {capabilities.name}: "
            f"{capabilities.pinned_host.reason}; leave it out, or use 'mmap'"
        )
    return Keeping(Policy.OFFLOAD, _BACKINGS[backend] if backend else None)
