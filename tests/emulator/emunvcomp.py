"""The emulated nvCOMP for tests, compiled here: the real codec's calls over emulated device
memory.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from emulator.emucuda import CACHE, FLAGS, HERE, WARNINGS, _digest, _run_into

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = HERE / "nvcomp" / "libnvcomp.cpp"


def build() -> Path:
    """The library's path; compiled once for its source."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler was found: install g++ or clang++ to run these tests")
    target = CACHE / _digest([SOURCE], compiler) / "libemunvcomp.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _run_into(target, [compiler, *FLAGS, *WARNINGS, "-shared", str(SOURCE), "-ldl"])
    return target
