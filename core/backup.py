"""Where backups live: the options, and the arena they stand for on a platform."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hal.errors import HostMemoryError, InvalidArgument, Unsupported
from hal.native import Arena, Backing
from hal.platform import Capabilities, Platform


@dataclass(frozen=True)
class BackupOptions:
    """How backups of offloaded tags are kept.

    `budget` bounds them in bytes (None: what the cgroup leaves). `retain` keeps those of all tags,
    or of the tags named, over a wake: the next sleep copies what has changed only. They go when
    host memory is short, and with `trim_host()`.
    `backing` is "anonymous", "pinned", "file:DIR", or None for the platform's default: pinned
    memory where it can be pinned, a file on a real disk where device and host memory are the same.
    `verify` checks a checksum of every piece on the way back (files always do). `require_pinned`
    makes a failed registration an error instead of a fallback. `compress` names a codec of the
    platform, by which fewer bytes cross the link and lie in host memory: "ans" on CUDA, for weights
    of 16 bits ("ans:float8", "ans:bytes" for other contents), "zstd" where device memory is the
    host's.
    """

    budget: int | None = None
    retain: bool | Collection[str] = False
    compress: str | None = None
    backing: str | None = None
    verify: bool = False
    require_pinned: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget <= 0:
            raise InvalidArgument(f"a backup budget must be positive, not {self.budget} bytes")
        if self.compress is not None:
            parse_codec(self.compress)
        if self.backing is not None:
            parse_backing(self.backing)

    def retains(self, tag: str) -> bool:
        """Whether backups of a tag outlive a wake."""
        if isinstance(self.retain, bool):
            return self.retain
        return tag == self.retain if isinstance(self.retain, str) else tag in self.retain


def parse_backing(text: str) -> tuple[Backing, Path | None]:
    """The backing and directory of an option's text; `InvalidArgument` for anything else."""
    kind, _, directory = text.partition(":")
    match kind, directory:
        case "anonymous", "":
            return Backing.ANONYMOUS, None
        case "pinned", "":
            return Backing.PINNED, None
        case "file", directory if directory:
            return Backing.FILE, Path(directory)
    raise InvalidArgument(f"backing {text!r}: use 'anonymous', 'pinned' or 'file:DIR'")


_CODEC_KINDS = {"ans": ("float16", "float8", "bytes"), "zstd": ("",)}
"""The kinds of contents that a codec is told, its default first."""


def parse_codec(text: str) -> tuple[str, str]:
    """The codec and the kind of contents of an option's text; `InvalidArgument` for others."""
    name, _, kind = text.partition(":")
    kinds = _CODEC_KINDS.get(name, ())
    if not kinds or (kind and kind not in kinds):
        known = ", ".join(f"{n}:{k}" if k else n for n, all_ in _CODEC_KINDS.items() for k in all_)
        raise InvalidArgument(f"compress {text!r}: use 'ans' or 'zstd', or one of {known}")
    return name, kind or kinds[0]


def backing_of(options: BackupOptions, capabilities: Capabilities) -> tuple[Backing, Path | None]:
    """The backing and directory that the options stand for; by default, the backing that frees
    memory on this platform.
    """
    if options.backing is not None:
        return parse_backing(options.backing)
    if capabilities.unified_memory:
        return Backing.FILE, default_directory()
    return (Backing.PINNED if capabilities.pinned_host else Backing.ANONYMOUS), None


def default_directory() -> Path:
    """The first directory on a real disk of `HAL_BACKUP_DIR`, the temporary one, /var/tmp and the
    current one.
    """
    if named := os.environ.get("HAL_BACKUP_DIR"):
        return Path(named)
    candidates = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd())  # noqa: S108 - files there are unlinked when opened
    for directory in candidates:
        if os.access(directory, os.W_OK) and not on_memory(directory):
            return directory
    names = ", ".join(map(str, candidates))
    raise HostMemoryError(
        None,
        0,
        None,
        f"none of {names} is writable and on a disk; name a directory that is in HAL_BACKUP_DIR",
    )


def on_memory(directory: Path) -> bool:
    """Whether a directory's file system keeps its files in memory, by the mount table."""
    best, kind = "", ""
    target = os.path.realpath(directory)
    with Path("/proc/self/mounts").open(encoding="utf-8") as mounts:
        for line in mounts:
            point, fstype = line.split()[1:3]
            inside = target == point or target.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, fstype
    return kind in ("tmpfs", "ramfs")


def open_arena(platform: Platform, index: int, options: BackupOptions) -> Arena:
    """The arena that the options stand for on this device."""
    capabilities = platform.capabilities_of(index)
    backing, directory = backing_of(options, capabilities)
    if backing is Backing.PINNED and options.require_pinned and not capabilities.pinned_host:
        raise Unsupported("pinned host memory", capabilities.name, capabilities.pinned_host.reason)
    return Arena(
        platform.device(index),
        backing,
        directory=directory,
        budget=options.budget or 0,
        verify=options.verify,
        require_pinned=options.require_pinned,
        codec=platform.codec(*parse_codec(options.compress)) if options.compress else None,
    )
