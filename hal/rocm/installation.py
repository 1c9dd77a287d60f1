"""What of ROCm is installed here and what is missing, looked for without starting any of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hal.libraries import bundled, loads
from hal.rocm import kfd, smi, telemetry
from hal.rocm.visibility import HIP_LISTS, RUNTIME_LIST
from hal.torch_build import torch_build

VARIABLE = "HAL_LIBAMDHIP64"
"""Names the runtime library to open, whatever else there is."""
RUNTIMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_WHEELS = ("torch", "_rocm_sdk_core")
"""Packages that bring a runtime of their own in their `lib` folder."""
_TORCH = "install torch's build for ROCm, see https://pytorch.org/get-started/locally"


def missing() -> tuple[str, ...]:
    """One line for each piece that is not here: what was looked for, and what to install."""
    return tuple(filter(None, (_why_no_gpu(), _why_no_runtime(), _why_no_torch(), _why_no_smi())))


def why_not() -> str | None:
    """The pieces without which this process cannot use an AMD GPU; None when it can."""
    needed = (_why_no_gpu(), _why_no_runtime(), _why_no_torch())
    return "; ".join(filter(None, needed)) or None


def _why_no_gpu() -> str:
    if not kfd.DEVICE_FILE.exists():
        return (
            f"no AMD GPU was found, looked for {kfd.DEVICE_FILE}: load the amdgpu kernel driver, "
            "and start a container with --device=/dev/kfd --device=/dev/dri"
        )
    if not os.access(kfd.DEVICE_FILE, os.R_OK | os.W_OK):
        return (
            f"this user may not open {kfd.DEVICE_FILE}: add it to the groups render and video, and "
            "a container with --group-add"
        )
    found = kfd.gpus()
    if not found:
        return (
            f"no AMD GPU was found, looked into {kfd.TOPOLOGY}: the kernel driver lists none that "
            "this process may open; give the container --device=/dev/dri"
        )
    return _why_none_visible(len(found))


def _why_none_visible(count: int) -> str:
    shown = telemetry.visible()
    if shown.gpus:
        return ""
    names = " and ".join((RUNTIME_LIST, *HIP_LISTS))
    return f"none of the {count} AMD GPUs is visible: {shown.reason}; look at {names}"


def _why_no_runtime() -> str:
    named = os.environ.get(VARIABLE)
    if named:
        return "" if loads(named) else f"{VARIABLE}={named!r} names no library that loads"
    if _bundled_runtimes() or any(loads(name) for name in RUNTIMES):
        return ""
    return (
        f"no HIP runtime was found, looked for {', '.join(RUNTIMES)} and in the packages "
        f"{', '.join(_WHEELS)}: install ROCm's package hip-runtime-amd, or name the library in "
        f"{VARIABLE}"
    )


def _bundled_runtimes() -> list[Path]:
    """Runtimes that torch brings."""
    return bundled(_WHEELS, "libamdhip64")


def _why_no_torch() -> str:
    build = torch_build()
    if build is None:
        return f"torch is not installed; {_TORCH}"
    return "" if "hip" in build.toolkits else f"{build} cannot use ROCm; {_TORCH}"


def _why_no_smi() -> str:
    """Without it there are still the kernel driver's files."""
    if smi.versions():
        return ""
    folders = ", ".join(str(folder) for folder in smi.installations())
    return (
        f"amdsmi, for memory queries, was not found in {folders} nor in this environment; "
        f"{smi.INSTALL}"
    )


def notices() -> Iterator[str]:
    """What works here but is probably not meant; nothing on a machine without AMD GPUs."""
    if not kfd.gpus():
        return
    warning = telemetry.visible().warning
    if warning:
        yield warning
    versions = smi.versions()
    if len(versions) > 1:
        found = [f"{where} has version {version}" for where, version in versions.items()]
        yield f"amdsmi is installed more than once, the first is used: {'; '.join(found)}"
