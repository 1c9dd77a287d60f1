"""Where nvCOMP is: the library whose codec encodes backups on the device."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from hal.errors import Unsupported
from hal.native import Codec

CODEC = "ans"
VARIABLE = "HAL_NVCOMP"
_PACKAGES = ("nvidia.libnvcomp", "nvidia.nvcomp")
_VERSIONS = (6, 5)


def codec(name: str, kind: str) -> Codec:
    """nvCOMP's codec of that name; `Unsupported` with what to install where it is not there."""
    feature = f"compress={name!r}"
    if name != CODEC:
        raise Unsupported(feature, "cuda", f"its codec is {CODEC!r}")
    library = next(_libraries(), None)
    if library is None:
        raise Unsupported(
            feature,
            "cuda",
            f"nvCOMP was not found in the packages {', '.join(_PACKAGES)} or by the dynamic "
            "loader; install accel-hal[compress-cu13] (or compress-cu12), or name libnvcomp.so "
            f"in {VARIABLE}",
        )
    return Codec(name, library, kind)


def _libraries() -> Iterator[str]:
    if named := os.environ.get(VARIABLE):
        yield named
    for folder in _package_folders():
        for version in _VERSIONS:
            yield from map(str, sorted(folder.glob(f"lib*/libnvcomp.so.{version}")))
    if found := ctypes.util.find_library("nvcomp"):
        yield found


def _package_folders() -> Iterator[Path]:
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # there is no package `nvidia` at all
            continue
        yield from map(Path, (spec.submodule_search_locations or ()) if spec else ())
