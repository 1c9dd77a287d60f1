"""Emulated vendors as platforms of another package, with names of their own: what `ci/emulated.sh`
registers, so that the whole command runs over them.
"""

from __future__ import annotations

import shutil
from typing import ClassVar

from emulator import emuze
from emulator.platforms import EmulatedCudaPlatform, EmulatedRocmPlatform, EmulatedXpuPlatform

CAPACITY = 192 << 20
"""Small: cells that fill the device have to fill it."""
PARKING_CAPACITY = 384 << 20
"""Where processes are parked: what the way back has to find free fits in beside the pools."""


def _why_no_compiler() -> str | None:
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        return None
    return "the emulator has to be compiled: install g++"


class RegisteredCuda(EmulatedCudaPlatform):
    """The CUDA driver over the emulated libcuda."""

    name: ClassVar[str] = "cuda-emulated"

    def __init__(self) -> None:
        super().__init__(capacity=PARKING_CAPACITY)

    @classmethod
    def why_not(cls) -> str | None:
        return _why_no_compiler()


class RegisteredRocm(EmulatedRocmPlatform):
    """The ROCm driver over the emulated HIP runtime, as its releases without quirks are."""

    name: ClassVar[str] = "rocm-emulated"

    def __init__(self) -> None:
        super().__init__(capacity=CAPACITY)

    @classmethod
    def why_not(cls) -> str | None:
        return _why_no_compiler()


class RegisteredXpu(EmulatedXpuPlatform):
    """The Level Zero driver behind the real loader, over an emulated Intel GPU."""

    name: ClassVar[str] = "xpu-emulated"

    def __init__(self) -> None:
        super().__init__(capacity=CAPACITY)

    @classmethod
    def why_not(cls) -> str | None:
        return emuze.why_not()
