"""The emulated libamdhip64 for tests: compiled here, and its controls (`hip/emuhip.h`)."""

from __future__ import annotations

import ctypes as c
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from emulator import emucuda

HERE = Path(__file__).resolve().parent / "hip"
NAME = "libemuhip.so"
DEFAULT_VERSION = 70226015
"""HIP 7.2.26015, of ROCm 7.2.0."""


def build(hidden: Sequence[str] = (), name: str = NAME) -> Path:
    """The library's path; compiled once for these sources, and without the symbols in `hidden`."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler was found: install g++ or clang++ to run these tests")
    sources = sorted(HERE.glob("*.cpp"))
    folder = emucuda.CACHE / emucuda._digest([*sources, *HERE.glob("*.h")], compiler)
    folder.mkdir(parents=True, exist_ok=True)
    objects = [emucuda._compile(compiler, source, folder) for source in sources]
    return _link(compiler, objects, folder / emucuda._variant(hidden) / name, hidden)


def _link(compiler: str, objects: Sequence[Path], target: Path, hidden: Sequence[str]) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    script = target.with_suffix(".map")
    local = "".join(f" {name};" for name in hidden)
    script.write_text(f"{{ global: hip[A-Z]*; emuhip_*; local:{local} *; }};\n")
    link = ["-shared", "-pthread", f"-Wl,-soname,{target.name}", f"-Wl,--version-script={script}"]
    emucuda._run_into(target, [compiler, *link, *map(str, objects), "-ldl"])
    return target


class EmulatedHip:
    """The controls of a loaded runtime; what the devices hold is asked of the libcuda beneath."""

    def __init__(self, library: Path, libcuda: Path) -> None:
        self.path, self.libcuda = library, libcuda
        os.environ["EMUHIP_LIBCUDA"] = str(libcuda)
        self.lib = c.CDLL(str(library))
        self.lib.emuhip_held_bytes.restype = c.c_uint64
        self.lib.hipInit(0)  # binds this libcuda for good

    def reset(self) -> None:
        """Quirks, version and thefts as the environment says; held memory is let go."""
        self.lib.emuhip_reset()

    def set_quirks(self, *names: str) -> None:
        self.lib.emuhip_set_quirks(",".join(names).encode())

    def set_version(self, version: int) -> None:
        """As hipRuntimeGetVersion has it: 10,000,000 * major + 100,000 * minor + patch."""
        self.lib.emuhip_set_version(version)

    @contextmanager
    def thief(self, count: int = 1) -> Iterator[None]:
        """Somebody else takes the next `count` ranges that are freed, until the context ends."""
        self.lib.emuhip_steal(count)
        try:
            yield
        finally:
            self.lib.emuhip_steal(0)
            self.lib.emuhip_return_stolen()

    @property
    def held_bytes(self) -> int:
        """What is released and still in use."""
        return int(self.lib.emuhip_held_bytes())

    def current_device(self) -> int:
        device = c.c_int()
        self.lib.hipGetDevice(c.byref(device))
        return device.value

    def set_device(self, device: int) -> int:
        return int(self.lib.hipSetDevice(device))
