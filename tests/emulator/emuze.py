"""The emulated Intel driver behind the real Level Zero loader, and a fake libsycl."""

from __future__ import annotations

import ctypes as c
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "level_zero"
# The books of device memory, the streams and the fault points are those of the emulated libcuda.
SHARED = [HERE / name for name in ("codes.cpp", "memory.cpp", "settings.cpp", "streams.cpp")]
CACHE = HERE.parents[1] / "build" / "emulator"
NAME = "libemuze.so"
LOADER = "libze_loader.so.1"
HEADER = Path("/usr/include/level_zero/ze_api.h")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-D_GNU_SOURCE", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]

NOT_READY = 0x1
DEVICE_LOST = 0x70000001
OUT_OF_DEVICE_MEMORY = 0x70000003
NOT_PERMITTED = 0x70010000
UNINITIALIZED = 0x78000001
UNSUPPORTED_FEATURE = 0x78000003
INVALID_ARGUMENT = 0x78000004
FOR_EVER = -1
CARDS = 4
FREE_TRUE, FREE_FROZEN, FREE_ZERO, FREE_TOTAL = range(4)
OPENCL, LEVEL_ZERO = 1, 2


def why_not() -> str | None:
    """What the emulation needs and this machine lacks; None when it can run."""
    try:
        c.CDLL(os.environ.get("HAL_LIBZE") or LOADER)
    except OSError:
        return f"the Level Zero loader ({LOADER}) is not installed: apt-get install libze1"
    if not HEADER.is_file():
        return f"Level Zero's headers ({HEADER}) are not installed: apt-get install libze-dev"
    return None if _compiler("c++", "g++", "clang++") else "no C++ compiler was found"


def build() -> Path:
    """The emulated driver's path; compiled once for these sources."""
    sources = [*sorted(SOURCES.glob("*.cpp")), *SHARED]
    headers = [*SOURCES.glob("*.h"), *HERE.glob("*.h")]
    compiler = _compiler("c++", "g++", "clang++") or "c++"
    # One command: half the time goes into headers, and the result is kept.
    command = [compiler, *FLAGS, *WARNINGS, "-shared", *map(str, sources)]
    return _cached(NAME, command, [*sources, *headers])


def build_sycl(major: int) -> Path:
    """A libsycl of that major version, which answers for queues that `EmulatedXpu.queue` makes."""
    source = SOURCES / "fake_sycl.c"
    name = f"libsycl.so.{major}"
    command = [_compiler("cc", "gcc", "clang") or "cc", "-std=c11", "-O1", "-shared", "-fPIC"]
    return _cached(name, [*command, f"-Wl,-soname,{name}", str(source)], [source])


def _compiler(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def _cached(name: str, command: Sequence[str], inputs: Sequence[Path]) -> Path:
    digest = hashlib.sha256(" ".join(command).encode())
    for file in sorted(inputs):
        digest.update(file.name.encode() + file.read_bytes())
    target = CACHE / digest.hexdigest()[:16] / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / name
            subprocess.run([*command, "-o", str(made)], check=True)
            made.replace(target)  # whole or not at all: processes share the cache
    return target


class Stats(c.Structure):
    """`emuze_stats`: what an emulated card holds; sizes in bytes."""

    _fields_ = [
        ("used_bytes", c.c_int64),
        ("handles", c.c_int64),
        ("orphans", c.c_int64),
        ("mappings", c.c_int64),
        ("reservations", c.c_int64),
        ("contexts", c.c_int64),
        ("lists", c.c_int64),
        ("queued", c.c_int64),
        ("double_releases", c.c_int64),
        ("shared_mappings", c.c_int64),
        ("concurrent_uses", c.c_int64),
        ("registrations", c.c_int64),
        ("registered_bytes", c.c_int64),
    ]


class _Queue(c.Structure):
    _fields_ = [("context", c.c_uint64), ("device", c.c_uint64), ("backend", c.c_byte)]


class EmulatedXpu:
    """The controls of the emulated driver, which the loader of this process uses from now on."""

    def __init__(self, library: Path) -> None:
        self.path = library
        os.environ.update(environment(library))
        self.lib = c.CDLL(str(library))
        self.lib.emuze_calls.restype = c.c_uint64
        self._queues: list[object] = []
        self._before: dict[int, Stats] = {}

    def reset(self) -> None:
        """Settings, faults and counts as after loading; allocations stay."""
        self.lib.emuze_reset()

    def set(self, card: int = 0, **properties: int) -> None:
        """Change properties of the machine or of one card; `emuze.h` lists them."""
        for name, value in properties.items():
            if not self.lib.emuze_set(name.encode(), card, c.c_int64(value)):
                raise ValueError(f"{name} is no property of card {card}")

    def stats(self, card: int = 0) -> Stats:
        """What the card holds, beyond what it held when `count_from_now` was called."""
        out, before = self._stats(card), self._before.get(card, Stats())
        for name, _ in Stats._fields_:
            setattr(out, name, getattr(out, name) - getattr(before, name))
        return out

    def _stats(self, card: int) -> Stats:
        out = Stats()
        self.lib.emuze_stats_of(card, c.byref(out))
        return out

    def used_bytes(self, card: int = 0) -> int:
        """Physical memory that all tests of this process hold on the card."""
        return int(self._stats(card).used_bytes)

    def count_from_now(self) -> None:
        """Let `stats` leave out what other tests of this process hold."""
        self._before = {card: self._stats(card) for card in range(CARDS)}

    def count_from_the_start(self) -> None:
        """Let `stats` count everything again."""
        self._before.clear()

    def fail(
        self, call: str, nth: int = 1, code: int = UNSUPPORTED_FEATURE, times: int = 1
    ) -> None:
        """Let the nth call from now of a function fail, `times` times."""
        self.lib.emuze_fail(call.encode(), c.c_uint64(nth), code, c.c_int64(times))

    def calls(self, call: str) -> int:
        """How often a function was called since the last reset."""
        return int(self.lib.emuze_calls(call.encode()))

    def engine_context(self, device: int = 0) -> tuple[int, int]:
        """(context, device) as torch's SYCL runtime would have them."""
        context, handle = c.c_void_p(), c.c_void_p()
        self.lib.emuze_engine_context(device, c.byref(context), c.byref(handle))
        return context.value or 0, handle.value or 0

    def queue(self, device: int = 0, backend: int = LEVEL_ZERO) -> int:
        """The address of a `sycl::queue` in torch's context."""
        inner = _Queue(*self.engine_context(device), backend)
        outer = c.c_void_p(c.addressof(inner))
        self._queues += [inner, outer]
        return c.addressof(outer)

    def kernel_write(self, address: int, value: int, size: int) -> int:
        """Run a kernel in torch's context; returns Level Zero's code."""
        context, _ = self.engine_context()
        arguments = (c.c_void_p(context), c.c_uint64(address), c.c_uint8(value), c.c_uint64(size))
        return int(self.lib.emuze_kernel_write(*arguments))


def environment(library: Path) -> dict[str, str]:
    """What a process needs in its environment to have the emulated devices and no others."""
    variables = {"ZE_ENABLE_ALT_DRIVERS": str(library)}
    if _loader_version() >= (1, 20):  # older layers refuse legal calls
        variables |= {"ZE_ENABLE_VALIDATION_LAYER": "1", "ZE_ENABLE_PARAMETER_VALIDATION": "1"}
    return variables


def _loader_version() -> tuple[int, ...]:
    """The version in the name of the loader's file."""
    c.CDLL(os.environ.get("HAL_LIBZE") or LOADER)
    maps = Path("/proc/self/maps").read_text().split()
    names = {Path(word).name for word in maps if "libze_loader.so." in word}
    numbers = names.pop().removeprefix("libze_loader.so.").split(".") if names else []
    return tuple(int(number) for number in numbers if number.isdigit())
