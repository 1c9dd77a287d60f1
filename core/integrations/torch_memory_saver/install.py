"""Letting `import torch_memory_saver` find this library, here and in processes that start here.

The directory `drop_in` holds a package of that name; it comes first on the module search path.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hal.errors import StateError

NAME = "torch_memory_saver"
DROP_IN = Path(__file__).resolve().parent / "drop_in"


def install() -> None:
    """Let `import torch_memory_saver` find this library from now on; a second call does nothing.

    Processes that `multiprocessing` starts inherit it; any others need `configure_subprocess()`.
    Raises `StateError` when the original has been imported already: its users hold on to it.
    """
    loaded = sys.modules.get(NAME)
    if loaded is not None and DROP_IN not in Path(loaded.__file__ or "").resolve().parents:
        raise StateError(
            f"{NAME} was imported from {loaded.__file__} already; call install() before anything "
            "imports it"
        )
    sys.path[:] = _first(str(DROP_IN), sys.path)
    importlib.invalidate_caches()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Let processes that are started inside find this library as `torch_memory_saver`.

    It sets `PYTHONPATH` and puts it back at the end; what stood there stays, behind. Nothing is
    preloaded.
    """
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    with changed_environment("PYTHONPATH", os.pathsep.join(_first(str(DROP_IN), inherited))):
        yield


@contextmanager
def changed_environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, and put it back at the end."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _first(entry: str, entries: list[str]) -> list[str]:
    return [entry, *(other for other in entries if other != entry)]
