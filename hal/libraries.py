"""Shared libraries that are looked for, by name and in the packages that bring them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable
from pathlib import Path


def loads(library: str) -> bool:
    """Whether the loader finds a library, which it then keeps; nothing of it is initialised."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def bundled(packages: Iterable[str], name: str) -> list[Path]:
    """Files `name*.so*` in the `lib` folders of these packages, which are not loaded: the packages
    do that, and there must be one alone.
    """
    specs = (importlib.util.find_spec(package) for package in packages)
    folders = (Path(spec.origin).with_name("lib") for spec in specs if spec and spec.origin)
    return [path for folder in folders for path in folder.glob(f"{name}*.so*")]
