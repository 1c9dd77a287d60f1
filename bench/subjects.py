"""One subject of the comparison of sleeps, in a process of its own: this library with an option, or
a peer from a folder outside the tree.

Run by bench/sleep_wake.py with a `Spec` as JSON. At each `observe` it writes a line and waits for
the figures that its parent reads beside it; the last line is the result.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import json
import logging
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from figures import environment, timed
from links import MIB, link_of, warm_host_memory
from pools import MIXED, SMALL
from transfer import decoder_sizes

import hal
from hal.core import BackupOptions, SleepManager
from hal.errors import Unsupported

FILL = 0x5A
STANDARD_DEVIATION = 0.02
CHUNK = 64 * MIB
LINK_ROUNDS = 5


@dataclass(frozen=True)
class Spec:
    """What one process measures; sizes in bytes."""

    subject: str
    part: str
    platform: str | None
    peers: str | None
    dtype: str
    size: int
    cycles: int
    touched: int
    small: int
    kv_cache: int
    kv_piece: int


class Subject(Protocol):
    """Memory that sleeps, whoever makes it sleep."""

    def region(self, *, keep: bool) -> AbstractContextManager[Any]:
        """A scope of allocations whose contents are kept over a sleep, or given up."""

    def sleep(self) -> dict[str, float]:
        """Give the memory up; returns what the subject itself says of it."""

    def wake(self) -> dict[str, float]: ...


# ---- this library --------------------------------------------------------------------------------


class Ours:
    """This library with some options."""

    def __init__(self, spec: Spec, *, park: bool = False, **options: Any) -> None:
        self._platform = hal.detect(spec.platform)
        pinned = self._platform.capabilities.pinned_host
        backup = BackupOptions(backing="pinned" if pinned else "anonymous", **options)
        self._sleeper = SleepManager(self._platform, backup=backup)
        self._options = {"park": True} if park else {}
        can = self._platform.capabilities.park
        if park and not can:
            raise Unsupported("parking", self._platform.name, can.reason)

    def track(self, tensors: Sequence[torch.Tensor]) -> None:
        """Name the tensors, and with them their types, as an engine does."""
        self._sleeper.track({str(index): tensor for index, tensor in enumerate(tensors)})

    def region(self, *, keep: bool) -> AbstractContextManager[Any]:
        return self._sleeper.pool("weights" if keep else "kv_cache")

    def sleep(self) -> dict[str, float]:
        report = self._sleeper.sleep(level=1, **self._options)
        said = {"copied": float(report.copied_bytes), "held": float(self._sleeper.held_bytes)}
        if self._options and report.park_seconds is not None:
            said |= {"park_seconds": report.park_seconds, "driver": report.parked_host_bytes}
        return said

    def wake(self) -> dict[str, float]:
        report = self._sleeper.wake_up()
        parked = self._options and report.unpark_seconds is not None
        return {"unpark_seconds": report.unpark_seconds} if parked else {}


# ---- peers ---------------------------------------------------------------------------------------


def peers_folder(spec: Spec) -> Path:
    if spec.peers is None or not torch.cuda.is_available():
        raise Unsupported("a peer", "this machine", "it needs a CUDA device and --peers")
    return Path(spec.peers)


class TorchMemorySaver:
    """torch_memory_saver in its default mode where its library was preloaded, else in torch's."""

    def __init__(self, spec: Spec, *, retain: bool = False) -> None:
        sys.path.insert(0, str(peers_folder(spec)))
        self._saver = importlib.import_module("torch_memory_saver").torch_memory_saver
        self.mode = "preload" if loaded("hook_mode_preload") else "torch"
        self._saver.hook_mode = self.mode
        if retain:
            self._saver.retain_cpu_backup = True

    def region(self, *, keep: bool) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = self._saver.region(
            tag="weights" if keep else "kv_cache", enable_cpu_backup=keep
        )
        return scope

    def sleep(self) -> dict[str, float]:
        self._saver.pause()
        return {"preload": float(self.mode == "preload")}

    def wake(self) -> dict[str, float]:
        self._saver.resume()
        return {}


class CuMem:
    """The allocator of vLLM, with stand-ins for the rest of its package."""

    def __init__(self, spec: Spec) -> None:
        folder = peers_folder(spec)
        preload("libnvrtc.so")
        _stand_ins(folder)
        self._allocator = importlib.import_module(
            "vllm.device_allocator.cumem"
        ).CuMemAllocator.get_instance()

    def region(self, *, keep: bool) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = self._allocator.use_memory_pool(
            tag="weights" if keep else "kv_cache"
        )
        return scope

    def sleep(self) -> dict[str, float]:
        self._allocator.sleep(offload_tags=("weights",))
        return {}

    def wake(self) -> dict[str, float]:
        self._allocator.wake_up()
        return {}


class CudaRuntime:
    """The one call of the CUDA runtime that the allocator makes on this path."""

    def __init__(self) -> None:
        path = loaded("libcudart")
        if path is None:
            raise Unsupported("vLLM's allocator", "this process", "libcudart is not loaded")
        self._copy = ctypes.CDLL(path).cudaMemcpy
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def cudaMemcpy(self, target: int, source: int, size: int) -> None:  # noqa: N802 - its name
        if code := self._copy(target, source, size, 4):
            raise RuntimeError(f"cudaMemcpy failed with {code}")


def _stand_ins(folder: Path) -> None:
    """Give the allocator's file the few names that it imports from its package."""
    platform = types.SimpleNamespace(
        is_rocm=lambda: False, is_cuda_alike=lambda: True, is_xpu=lambda: False
    )
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": [str(folder / "vllm")]},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": {"__path__": []},
        "vllm.utils.system_utils": {"find_loaded_library": loaded},
        "vllm.utils.torch_utils": {"PIN_MEMORY": True},
        "vllm.distributed": {"__path__": []},
        "vllm.distributed.device_communicators": {"__path__": []},
        "vllm.distributed.device_communicators.cuda_wrapper": {"CudaRTLibrary": CudaRuntime},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module


def loaded(name: str) -> str | None:
    """The path of a loaded library whose file's name holds `name`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if name in Path(path).name:
            return path
    return None


def nvidia_library(name: str) -> str | None:
    """A library that the packages of torch's CUDA build bring, the newest by name."""
    pattern = str(Path(torch.__file__).parents[1] / "nvidia" / "**" / f"{name}*")
    found = sorted(glob.glob(pattern, recursive=True))
    return found[-1] if found else None


def preload(name: str) -> None:
    """Load a library by its path, so that another one that needs it finds it there."""
    if path := nvidia_library(name):
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


SUBJECTS: dict[str, Callable[[Spec], Subject]] = {
    "ours": Ours,
    "ours-retain": lambda spec: Ours(spec, retain=True),
    "ours-ans": lambda spec: Ours(spec, compress="ans"),
    "ours-park": lambda spec: Ours(spec, park=True),
    "tms": TorchMemorySaver,
    "tms-retain": lambda spec: TorchMemorySaver(spec, retain=True),
    "cumem": CuMem,
}
PEERS = ("tms", "tms-retain", "cumem")


# ---- what is measured ----------------------------------------------------------------------------


def observe(label: str) -> dict[str, Any]:
    """The device's and the host's memory in use, as the parent sees it now."""
    print(json.dumps({"observe": label}), flush=True)
    answer: dict[str, Any] = json.loads(sys.stdin.readline())
    return answer


def device_of(spec: Spec) -> torch.device:
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None or spec.platform == "cpu" else found


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def cycle(subject: Subject, device: torch.device) -> dict[str, Any]:
    """One sleep and one wake, timed, and what was in use between them.

    Nothing here may touch the device while the subject sleeps: it could be parked.
    """
    synchronize(device)
    start = time.perf_counter()
    slept = subject.sleep()
    asleep = time.perf_counter()
    seen = observe("asleep")
    resumed = time.perf_counter()
    woke = subject.wake()
    synchronize(device)
    return {
        "sleep_seconds": asleep - start,
        "wake_seconds": time.perf_counter() - resumed,
        "asleep": seen,
        **slept,
        **woke,
    }


def weights(spec: Spec, subject: Subject) -> dict[str, Any]:
    """Cycles of tensors of mixed sizes whose contents are kept."""
    device = device_of(spec)
    sizes = decoder_sizes(spec.size)
    with subject.region(keep=True):
        tensors = [empty(size, spec.dtype, device) for size in sizes]
    for tensor in tensors:
        write(tensor.view(torch.uint8), spec.dtype)
    if isinstance(subject, Ours):
        subject.track(tensors)
    expected = checksum(tensors)
    empty_cache(device)
    awake = observe("awake")
    cycles = []
    for _ in range(spec.cycles):
        cycles.append(cycle(subject, device))
        if checksum(tensors) != expected:
            raise RuntimeError("the weights changed over a sleep: the figures mean nothing")
    return {"bytes": spec.size, "tensors": len(sizes), "awake": awake, "cycles": cycles}


def empty(size: int, dtype: str, device: torch.device) -> torch.Tensor:
    """A tensor of a type that takes `size` bytes."""
    kind = _TYPES[dtype]
    return torch.empty(size // kind.itemsize, dtype=kind, device=device)


def write(tensor: torch.Tensor, dtype: str) -> None:
    """Fill bytes with values as weights of a type have them: normal, and quantized to the type."""
    for chunk in tensor.split(CHUNK):
        elements = len(chunk) // _TYPES[dtype].itemsize
        values = torch.empty(elements, dtype=torch.bfloat16, device=tensor.device)
        values.normal_(0, STANDARD_DEVIATION)
        chunk.copy_(_QUANTIZED[dtype](values).view(torch.uint8))


_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_QUANTIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": lambda values: values,
    # Scaled so that five standard deviations reach the type's largest value, as quantizers do.
    "fp8": lambda values: (values * (448 / 0.1)).clamp(-448, 448).to(torch.float8_e4m3fn),
    "int8": lambda values: (values * (127 / 0.1)).round().clamp(-127, 127).to(torch.int8),
}


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """The sum of all 8-byte words, which wraps."""
    return sum(int(tensor.view(torch.int64).sum()) for tensor in tensors)


def multiply_once(device: torch.device) -> None:
    """Have the matrix library's workspace and kernels, as every engine does: 98 MiB on an H200."""
    square = torch.ones(16, 16, device=device)
    torch.addmm(square[0], square, square @ square)


def empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def touch(spec: Spec, subject: Subject) -> dict[str, Any]:
    """The first allocation and write of many tensors, in a region and by torch alone."""
    device = device_of(spec)
    torch.ones(1, device=device)
    with subject.region(keep=True):
        torch.ones(1, device=device)

    def allocate(scope: Callable[[], AbstractContextManager[Any]]) -> float:
        held: list[torch.Tensor] = []

        def act() -> None:
            with scope():
                for index in range(spec.touched):
                    size = MIXED[index % len(MIXED)]
                    held.append(torch.empty(size, dtype=torch.uint8, device=device))
            for tensor in held:
                tensor.fill_(FILL)
            synchronize(device)

        return timed(act)

    plain = allocate(nullcontext)
    empty_cache(device)
    return {
        "tensors": spec.touched,
        "plain_seconds": plain,
        "region_seconds": allocate(lambda: subject.region(keep=True)),
    }


def small(spec: Spec, subject: Subject) -> dict[str, Any]:
    """Cycles of many small tensors."""
    device = device_of(spec)
    with subject.region(keep=True):
        tensors = [
            torch.full((SMALL[index % len(SMALL)],), FILL, dtype=torch.uint8, device=device)
            for index in range(spec.small)
        ]
    cycles = [cycle(subject, device) for _ in range(2)]
    if not all(bool((tensor == FILL).all()) for tensor in tensors[:: max(1, spec.small // 64)]):
        raise RuntimeError("small tensors changed over a sleep: the figures mean nothing")
    return {"tensors": spec.small, "cycles": cycles}


def kv_cache(spec: Spec, subject: Subject) -> dict[str, Any]:
    """A wake of memory whose contents were given up, and whether it came back zero."""
    device = device_of(spec)
    with subject.region(keep=False):
        pieces = [
            torch.empty(spec.kv_piece, dtype=torch.uint8, device=device)
            for _ in range(spec.kv_cache // spec.kv_piece)
        ]
    cycles = []
    for _ in range(spec.cycles):
        for piece in pieces:
            piece.fill_(FILL)
        cycles.append(cycle(subject, device))
        cycles[-1]["zeroed"] = not any(bool(piece.view(torch.int64).any()) for piece in pieces)
        cycles[-1]["zero_seconds"] = timed(lambda: _zero(pieces, device))
    return {"bytes": spec.kv_cache, "cycles": cycles}


def _zero(pieces: Sequence[torch.Tensor], device: torch.device) -> None:
    for piece in pieces:
        piece.zero_()
    synchronize(device)


PARTS: dict[str, Callable[[Spec, Subject], dict[str, Any]]] = {
    "weights": weights,
    "touch": touch,
    "small": small,
    "kv_cache": kv_cache,
}


def link(spec: Spec) -> dict[str, Any]:
    """Plain copies both ways, in bytes a second, and where they were measured."""
    platform = hal.detect(spec.platform)
    if not platform.capabilities.unified_memory:
        warm_host_memory(spec.size + spec.size // 4)
    found = link_of(platform, min(spec.size, 4096 * MIB))
    rounds = [(found.copy_out(), found.copy_in()) for _ in range(LINK_ROUNDS)]
    out, into = zip(*rounds, strict=True)
    return {"out": out, "in": into, "environment": environment(platform)}


def main() -> int:
    spec = Spec(**json.loads(sys.argv[1]))
    print(json.dumps({"result": outcome(spec)}), flush=True)
    return 0


def outcome(spec: Spec) -> dict[str, Any]:
    """What was measured, or why it was skipped, or how it failed: the parent goes on."""
    try:
        if spec.subject == "link":
            return link(spec)
        subject = SUBJECTS[spec.subject](spec)
        multiply_once(device_of(spec))
        return PARTS[spec.part](spec, subject)
    except Unsupported as error:
        return {"skipped": str(error)}
    except Exception as error:  # noqa: BLE001 - a peer may raise anything
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
