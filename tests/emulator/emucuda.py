"""The emulated libcuda for tests: compiled here, and its controls (`emucuda.h`)."""

from __future__ import annotations

import ctypes as c
import hashlib
import shutil
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "emulator"
# Not libcuda's own name: the loader would hand this library to whatever asks for the real one in
# the same process.
NAME = "libemucuda.so"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-D_GNU_SOURCE", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
ILLEGAL_ADDRESS = 700
HOST_ALREADY_REGISTERED = 712
HOST_NOT_REGISTERED = 713
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = range(3)
STREAM_NON_BLOCKING = 1
FOR_EVER = -1


def build(hidden: Sequence[str] = (), name: str = NAME) -> Path:
    """The library's path; compiled once for these sources, and without the symbols in `hidden`."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler was found: install g++ or clang++ to run these tests")
    sources = sorted(HERE.glob("*.cpp"))
    folder = CACHE / _digest([*sources, *HERE.glob("*.h")], compiler)
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(lambda source: _compile(compiler, source, folder), sources))
    return _link(compiler, objects, folder / _variant(hidden) / name, hidden)


def _digest(files: Sequence[Path], compiler: str) -> str:
    digest = hashlib.sha256(" ".join([compiler, *FLAGS, *WARNINGS]).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, source: Path, folder: Path) -> Path:
    target = folder / f"{source.stem}.o"
    if not target.exists():
        _run_into(target, [compiler, *FLAGS, *WARNINGS, "-c", str(source)])
    return target


def _variant(hidden: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(sorted(hidden)).encode()).hexdigest()[:8] if hidden else "whole"


def _link(compiler: str, objects: Sequence[Path], target: Path, hidden: Sequence[str]) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    script = target.with_suffix(".map")
    local = "".join(f" {name};" for name in hidden)
    script.write_text(f"{{ global: cu[A-Z]*; emucuda_*; local:{local} *; }};\n")
    link = ["-shared", "-pthread", f"-Wl,-soname,{target.name}", f"-Wl,--version-script={script}"]
    _run_into(target, [compiler, *link, *map(str, objects)])
    return target


def _run_into(target: Path, command: Sequence[str]) -> None:
    """Run a compiler; its output appears whole or not at all, as processes share the cache."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        subprocess.run([*command, "-o", str(made)], check=True)
        made.replace(target)


class Stats(c.Structure):
    """`emucuda_device_stats`: what the emulated device holds; sizes in bytes."""

    _fields_ = [
        ("used_bytes", c.c_uint64),
        ("rdma_bytes", c.c_uint64),
        ("handles", c.c_uint64),
        ("orphans", c.c_uint64),
        ("mappings", c.c_uint64),
        ("reservations", c.c_uint64),
        ("double_releases", c.c_uint64),
        ("streams", c.c_uint64),
        ("queued", c.c_uint64),
        ("retained", c.c_uint64),
        ("registrations", c.c_uint64),
        ("registered_bytes", c.c_uint64),
        ("sticky_error", c.c_int64),
    ]


class EmulatedProcess:
    """A process as the checkpoint calls of others see it: its file in `EMUCUDA_PROCESSES`."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._file = folder / str(pid)

    def _fields(self) -> tuple[int, int]:
        state, refused = struct.unpack("ii", self._file.read_bytes())
        return state, refused

    @property
    def state(self) -> int:
        """0 running, 1 locked, 2 checkpointed, 3 failed."""
        return self._fields()[0]

    @property
    def refused_calls(self) -> int:
        """Driver calls that it made while it was not running: on a GPU they would have waited."""
        return self._fields()[1]


class EmulatedCuda:
    """The controls of a loaded emulator, and driver calls that stand in for the engine's own."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.lib = c.CDLL(str(library))

    def reset(self) -> None:
        """Settings, faults, counts and sticky errors as after loading; allocations stay."""
        self.lib.emucuda_reset()

    def stats(self, device: int = 0) -> Stats:
        out = Stats()
        self._check(self.lib.emucuda_stats(device, c.byref(out)))
        return out

    def fail(self, call: str, nth: int = 1, code: int = 999, times: int = 1) -> None:
        """Let the nth call from now of a libcuda function fail, `times` times."""
        self.lib.emucuda_fail(call.encode(), c.c_uint64(nth), code, c.c_int64(times))

    def calls(self, call: str) -> int:
        """How often a libcuda function was called since the last reset."""
        self.lib.emucuda_calls.restype = c.c_uint64
        return int(self.lib.emucuda_calls(call.encode()))

    def set_capacity(self, size: int, device: int = 0) -> None:
        self.lib.emucuda_set_capacity(device, c.c_uint64(size))

    def set_taken(self, size: int, device: int = 0) -> None:
        """Let other processes hold `size` bytes of the device."""
        self.lib.emucuda_set_taken(device, c.c_uint64(size))

    def set_attribute(self, attribute: int, value: int) -> None:
        self.lib.emucuda_set_attribute(attribute, value)

    def set_driver_version(self, version: int) -> None:
        self.lib.emucuda_set_driver_version(version)

    def set_poison(self, byte: int) -> None:
        self.lib.emucuda_set_poison(byte)

    def set_pin_limit(self, size: int) -> None:
        self.lib.emucuda_set_pin_limit(c.c_uint64(size))

    def set_delay(self, seconds: float) -> None:
        """Let every queued copy and fill stay in flight for a while."""
        self.lib.emucuda_set_delay(c.c_uint64(round(seconds * 1e6)))

    @contextmanager
    def context(self, device: int = 0) -> Iterator[None]:
        """The device's primary context, current on this thread, as a framework has it."""
        context = c.c_void_p()
        self._check(self.lib.cuInit(0))
        self._check(self.lib.cuDevicePrimaryCtxRetain(c.byref(context), device))
        self._check(self.lib.cuCtxSetCurrent(context))
        try:
            yield
        finally:
            self._check(self.lib.cuCtxSetCurrent(None))
            self._check(self.lib.cuDevicePrimaryCtxRelease_v2(device))

    def current_context(self) -> int:
        context = c.c_void_p()
        self._check(self.lib.cuCtxGetCurrent(c.byref(context)))
        return context.value or 0

    @contextmanager
    def stream(self, flags: int = STREAM_NON_BLOCKING) -> Iterator[int]:
        """A stream of the engine's own in the current context."""
        stream = c.c_void_p()
        self._check(self.lib.cuStreamCreate(c.byref(stream), flags))
        try:
            yield stream.value or 0
        finally:
            self.lib.cuStreamDestroy_v2(stream)

    def launch_write(
        self, stream: int, address: int, value: int, size: int, seconds: float
    ) -> None:
        """Queue a kernel that runs for `seconds` and then writes `size` bytes of `value`."""
        delay = c.c_uint64(round(seconds * 1e6))
        arguments = (
            c.c_void_p(stream),
            c.c_uint64(address),
            c.c_uint8(value),
            c.c_uint64(size),
            delay,
        )
        self._check(self.lib.emucuda_launch_write(*arguments))

    def copy_to_host(self, stream: int, host: int, address: int, size: int) -> None:
        """Queue a copy to host memory, as a connector that moves KV blocks does."""
        arguments = (c.c_void_p(host), c.c_uint64(address), c.c_size_t(size), c.c_void_p(stream))
        self._check(self.lib.cuMemcpyDtoHAsync_v2(*arguments))

    def register_host(self, host: int, size: int) -> None:
        self._check(self.lib.cuMemHostRegister_v2(c.c_void_p(host), c.c_size_t(size), 0))

    def unregister_host(self, host: int) -> None:
        self._check(self.lib.cuMemHostUnregister(c.c_void_p(host)))

    def launch_failure(self, stream: int, code: int, seconds: float = 0.0) -> None:
        """Queue a kernel that fails with a sticky error."""
        delay = c.c_uint64(round(seconds * 1e6))
        self._check(self.lib.emucuda_launch_failure(c.c_void_p(stream), code, delay))

    def capture_begin(self, stream: int, mode: int = CAPTURE_GLOBAL) -> None:
        self._check(self.lib.emucuda_capture_begin(c.c_void_p(stream), mode))

    def capture_end(self, stream: int) -> int:
        """End a capture; returns 0, or the code of a capture that was broken."""
        return int(self.lib.emucuda_capture_end(c.c_void_p(stream)))

    @staticmethod
    def _check(code: int) -> None:
        if code != 0:
            raise RuntimeError(f"the emulated libcuda answered {code}")
