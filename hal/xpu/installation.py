"""What an installation needs for XPU, piece by piece, and what in it is probably not meant."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

from hal.torch_build import torch_build
from hal.xpu.sysman import LOADER, OVERRIDE
from hal.xpu.visibility import render_nodes

GPU_DRIVER = "libze_intel_gpu.so.1"
DRIVERS = "ZE_ENABLE_ALT_DRIVERS"
"""Level Zero's own override: drivers that the loader takes in place of the installed ones."""
EXTENSION = "intel-extension-for-pytorch"
CACHED_HANDLES = "CCL_ZE_CACHE_OPEN_IPC_HANDLES"
_DEVICE_NODES = Path("/dev/dri")
_WINDOWS = Path("/dev/dxg")


def missing() -> tuple[str, ...]:
    """One line for each piece that is not there: what was looked for, and what to install."""
    pieces = (_missing_gpu(), _missing_loader(), _missing_driver(), _missing_torch())
    return tuple(piece for piece in pieces if piece)


def _missing_gpu() -> str:
    if os.environ.get(DRIVERS) or _WINDOWS.exists():
        return ""
    nodes = render_nodes()
    give = "give the container /dev/dri"
    if not nodes:
        return (
            "no Intel GPU (looked for vendor 0x8086 in /sys/class/drm): install the kernel driver "
            f"i915 or xe, or {give}"
        )
    if not any(os.access(_DEVICE_NODES / node, os.R_OK | os.W_OK) for node in nodes):
        return (
            f"no access to the Intel GPU (looked at {_DEVICE_NODES / nodes[0]}): add this user to "
            f"the group render, or {give}"
        )
    return ""


def _missing_loader() -> str:
    named = os.environ.get(OVERRIDE)
    looked_for = f"{OVERRIDE}={named}" if named else LOADER
    why_not = _why_not_loadable(named or LOADER, looked_for)
    return why_not and f"no Level Zero loader ({why_not}): install libze1 or level-zero"


def _missing_driver() -> str:
    why_not = "" if os.environ.get(DRIVERS) else _why_not_loadable(GPU_DRIVER, GPU_DRIVER)
    install = "install libze-intel-gpu1 or intel-level-zero-gpu"
    return why_not and f"no Level Zero GPU driver ({why_not}): {install}"


def _why_not_loadable(library: str, name: str) -> str:
    """ "" for a library that loads, else that it was looked for and what was wrong with it."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        is_absent = "cannot open shared object file: No such file" in str(error)
        return f"looked for {name}" if is_absent else f"looked for {name}: {error}"
    return ""


def _missing_torch() -> str:
    build = torch_build()
    if build is not None and "xpu" in build.toolkits:
        return ""
    found = "no torch" if build is None else f"torch {build.version}, built for {build.kind}"
    return (
        f"no torch for XPU (found {found}): install it, see https://pytorch.org/get-started/locally"
    )


def notices(devices: int) -> Iterator[str]:
    """What works but is probably not meant, in lines; `devices` is how many this process sees."""
    yield from _extension_notice()
    if devices > 1 and os.environ.get(CACHED_HANDLES) != "0":
        yield (
            "oneCCL keeps opened handles of peers' buffers, which are stale after a wake: with "
            f"several devices set {CACHED_HANDLES}=0, or keep what it sends outside the pools"
        )


def _extension_notice() -> Iterator[str]:
    try:
        version = importlib.metadata.version(EXTENSION)
    except importlib.metadata.PackageNotFoundError:
        return
    build = torch_build()
    if build is None:
        return
    matches = version.split(".")[:2] == build.version.split(".")[:2]
    fits = "it matches" if matches else "it was made for another torch and does not match"
    yield (
        f"{EXTENSION} {version} is installed and not needed, torch drives XPU itself: {fits} torch "
        f"{build.version}" + ("" if matches else "; uninstall it")
    )
