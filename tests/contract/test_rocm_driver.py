"""The ROCm driver over the emulated HIP runtime: versions, devices and every known quirk."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conftest import RunPython
from emulator import emucuda, emuhip
from emulator.emucuda import EmulatedCuda
from emulator.emuhip import EmulatedHip
from emulator.platforms import EmulatedRocmPlatform, emulated_hip
from hal.core import BackupOptions, SleepManager, State
from hal.errors import (
    AddressLostError,
    DriverError,
    OutOfDeviceMemory,
    Unsupported,
)
from hal.native import Action, Arena, Device, Fact, Order, SegmentState, TransferFailed
from hal.rocm.platform import RocmPlatform
from support import MIB, fill, pattern

SIZE = 10 * MIB
CHUNK = "chunk=4194304"
CHUNKS = 3
PROBED = 64 * MIB


@pytest.fixture(scope="session")
def machine() -> tuple[EmulatedCuda, EmulatedHip]:
    """Libraries with books of their own, which no other test file uses."""
    cuda = EmulatedCuda(emucuda.build(name="libemucuda-beneath.so"))
    return cuda, EmulatedHip(emuhip.build(name="libemuhip-alone.so"), cuda.path)


@pytest.fixture
def cuda(
    machine: tuple[EmulatedCuda, EmulatedHip], monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmulatedCuda]:
    """Two devices of the libcuda beneath; at the end everything must have been given back."""
    monkeypatch.setenv("EMUCUDA_DEVICES", "2")
    emulator, _ = machine
    emulator.reset()
    before = [holdings(emulator, device) for device in (0, 1)]
    yield emulator
    after = [holdings(emulator, device) for device in (0, 1)]
    emulator.reset()
    assert after == before


@pytest.fixture
def hip(
    machine: tuple[EmulatedCuda, EmulatedHip], cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmulatedHip]:
    _, runtime = machine
    monkeypatch.setenv("HAL_LIBAMDHIP64", str(runtime.path))
    runtime.reset()
    yield runtime
    runtime.reset()


@pytest.fixture
def open_device(cuda: EmulatedCuda, hip: EmulatedHip) -> Iterator[Callable[..., Device]]:
    opened: list[Device] = []

    def make(*quirks: str, index: int = 0, options: str = CHUNK) -> Device:
        hip.set_quirks(*quirks)
        opened.append(Device("rocm", index, options))
        return opened[-1]

    yield make
    cuda.reset()
    for device in opened:
        for segment in device.segments():
            device.free(segment.address)
        device.close()


@pytest.fixture
def device(open_device: Callable[..., Device]) -> Device:
    return open_device()


def holdings(emulator: EmulatedCuda, device: int = 0) -> dict[str, int]:
    stats = emulator.stats(device)
    names = ("used_bytes", "handles", "orphans", "mappings", "reservations", "streams")
    return {name: int(getattr(stats, name)) for name in names} | {
        "double releases": int(stats.double_releases)
    }


def release_of(device: Device) -> str:
    found = re.search(r"release: (.+)\)", device.facts.version)
    return found[1] if found else ""


def fresh(device: Device, seed: int, size: int = SIZE, tag: str = "weights") -> int:
    """The address of a segment with a pattern."""
    address = device.allocate(device.create_pool(tag).id, size)
    source = pattern(size, seed)
    device.copy_to_device(address, source.data_ptr(), size)
    device.synchronize(0)
    return address


def read(device: Device, address: int, size: int = SIZE) -> bytes:
    target = ctypes.create_string_buffer(size)
    device.copy_to_host(ctypes.addressof(target), address, size)
    device.synchronize(0)
    return target.raw


def expected(seed: int, size: int = SIZE) -> bytes:
    return bytes(pattern(size, seed).numpy())


@contextmanager
def arena_of(device: Device) -> Iterator[Arena]:
    arena = Arena(device)
    yield arena
    arena.close()


def sleep(device: Device, arena: Arena, action: Action = Action.OFFLOAD) -> Any:
    return device.sleep(arena, [Order(segment, action) for segment in device.segments()])


# ---- opening -------------------------------------------------------------------------------------


def test_facts_of_a_device(cuda: EmulatedCuda, open_device: Callable[..., Device]) -> None:
    facts = open_device(options="").facts
    assert facts.granularity == facts.alignment == 2 * MIB
    assert facts.chunk == 256 * MIB
    assert facts.streams == 2
    assert facts.yes == {Fact.VMM, Fact.PIN_HOST, Fact.FREE_TRUTHFUL, Fact.RDMA}
    assert all(reason for reason in facts.why_not.values())
    assert facts.device_name == "Emulated GPU 0"
    assert facts.device_uuid == "0000:01:00.0"
    assert facts.version == "HIP 7.2.26015 (release: plain)"
    assert cuda.stats().used_bytes == cuda.stats().reservations == 0, "the trial left nothing"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("chunk=3145728", "multiple of the granularity"),
        ("chunk=64M", "whole number of bytes"),
        ("chunks=1", "there is: chunk=BYTES and release=WAY"),
        ("release=never", "there are auto, plain, placeholder and anon-remap"),
    ],
)
def test_wrong_options_are_refused(hip: EmulatedHip, options: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(reason)):
        Device("rocm", 0, options)


def test_releases_before_5_3_are_refused_for_their_layout(hip: EmulatedHip) -> None:
    hip.set_version(50221153)
    with pytest.raises(Unsupported, match=r"needs HIP 5\.3\.0 or later, this is 5\.2\.21153"):
        Device("rocm")
    hip.set_version(50300000)
    with Device("rocm") as device:
        assert device.facts.version.startswith("HIP 5.3.0 ")
        assert Fact.RDMA not in device.facts.yes, "older releases have another attribute there"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("EMUCUDA_DEVICES", "0", "HIP says hipErrorNoDevice: no ROCm-capable device is detected"),
        ("EMUCUDA_ATTRIBUTES", "102=0", "does not support HIP's virtual memory management"),
        ("EMUCUDA_FAIL", "cuMemGetAllocationGranularity:2:1", "granularity"),
        ("EMUCUDA_FAIL", "cuMemMap:1:205:-1", "mapping memory for a trial failed with"),
        ("EMUCUDA_FAIL", "cuMemCreate:1:2:-1", "hipErrorOutOfMemory: out of memory"),
        ("HAL_LIBAMDHIP64", "/nowhere/libamdhip64.so", "names a library that does not load"),
    ],
)
def test_a_device_that_cannot_be_opened_says_why(
    cuda: EmulatedCuda,
    hip: EmulatedHip,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    reason: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(variable, value)
        cuda.reset()
        with pytest.raises(Unsupported, match=re.escape(reason)):
            Device("rocm")
    cuda.reset()
    Device("rocm").close()


def test_a_device_that_is_not_there(hip: EmulatedHip) -> None:
    with pytest.raises(Unsupported, match="no ROCm device 2: this process sees 2"):
        Device("rocm", 2)


def test_a_thread_keeps_its_current_device(
    cuda: EmulatedCuda, hip: EmulatedHip, open_device: Callable[..., Device]
) -> None:
    second = open_device(index=1)
    assert hip.current_device() == 0
    address = fresh(second, 1)
    assert read(second, address) == expected(1)
    with pytest.raises(DriverError):
        second.unmap(address, SIZE)
    assert hip.current_device() == 0
    assert (cuda.stats(0).used_bytes, cuda.stats(1).used_bytes) == (0, SIZE)
    hip.set_device(1)
    assert open_device(index=0).memory()
    assert hip.current_device() == 1
    hip.set_device(0)


# ---- symbols and libraries -----------------------------------------------------------------------


@pytest.fixture
def without(hip: EmulatedHip, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A runtime that lacks symbols."""
    monkeypatch.setenv("EMUHIP_LIBCUDA", str(hip.libcuda))

    def make(*symbols: str) -> None:
        monkeypatch.setenv("HAL_LIBAMDHIP64", str(emuhip.build(hidden=symbols)))

    return make


@pytest.mark.parametrize("symbol", ["hipMemCreate", "hipRuntimeGetVersion", "hipMemsetD32Async"])
def test_a_runtime_without_a_needed_symbol_is_refused(
    without: Callable[..., None], symbol: str
) -> None:
    without(symbol)
    with pytest.raises(Unsupported, match=f"{symbol} needs HIP .* update ROCm"):
        Device("rocm")


def test_without_an_address_a_device_is_known_by_its_uuid(without: Callable[..., None]) -> None:
    without("hipDeviceGetPCIBusId")
    with Device("rocm") as device:
        assert device.facts.device_uuid == "GPU-0000000000000000"


def test_r71_without_host_registration_backups_are_pageable(without: Callable[..., None]) -> None:
    without("hipHostRegister", "hipStreamIsCapturing", "hipThreadExchangeStreamCaptureMode")
    with Device("rocm", 0, CHUNK) as device, arena_of(device) as arena:
        assert "register host memory" in device.facts.why_not[Fact.PIN_HOST]
        address = fresh(device, 1)
        sleep(device, arena)
        device.wake(arena, device.segments())
        assert read(device, address) == expected(1)
        device.free(address)


OPEN = """
from hal.native import Device
with Device("rocm") as device:
    print(device.facts.device_name)
"""


def run_environment(hip: EmulatedHip, **more: str) -> dict[str, str]:
    return {"HAL_LIBAMDHIP64": "", "EMUHIP_LIBCUDA": str(hip.libcuda), **more}


def test_the_runtime_that_torch_has_loaded_is_used_whatever_the_loader_would_find(
    hip: EmulatedHip, run_python: RunPython
) -> None:
    library = emuhip.build(
        name="libamdhip64-1234abcd.so.999"
    )  # a name that the loader does not try
    load = f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_LOCAL)\n"
    done = run_python("-c", load + OPEN, env=run_environment(hip))
    assert done.stdout == "Emulated GPU 0\n", done.stderr


@pytest.mark.parametrize("name", ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"])
def test_the_runtime_is_found_by_the_loader(
    hip: EmulatedHip, run_python: RunPython, name: str
) -> None:
    folder = emuhip.build(hidden=[f"no_such_{name}"], name=name).parent
    done = run_python("-c", OPEN, env=run_environment(hip, LD_LIBRARY_PATH=str(folder)))
    assert done.stdout == "Emulated GPU 0\n", done.stderr


# ---- how memory comes back -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quirks", "way"),
    [
        ((), "plain"),
        (("hold",), "placeholder"),
        (("hold-hard",), "placeholder"),
        (("hold", "refuse-align"), "placeholder"),
        (("hold", "ignore-hint"), "anon-remap"),
        (("access-early",), "plain"),
        (("free-frozen",), "plain, unproved"),
    ],
)
def test_r97_the_way_to_give_memory_back_is_found_by_trial(
    open_device: Callable[..., Device], quirks: tuple[str, ...], way: str
) -> None:
    device = open_device(*quirks)
    assert release_of(device) == way
    assert Fact.VMM in device.facts.yes
    assert (Fact.FREE_TRUTHFUL in device.facts.yes) == (way != "plain, unproved")


@pytest.mark.parametrize("way", ["plain", "placeholder", "anon-remap"])
def test_a_way_that_is_asked_for_is_proved_too(
    open_device: Callable[..., Device], way: str
) -> None:
    assert release_of(open_device(options=f"{CHUNK};release={way}")) == way


@pytest.mark.parametrize(
    ("quirk", "way"), [("hold", "plain"), ("hold-hard", "anon-remap"), ("hold", "placeholder")]
)
def test_r97_a_way_that_does_not_work_is_not_taken(
    open_device: Callable[..., Device], quirk: str, way: str
) -> None:
    device = open_device(quirk, "ignore-hint", options=f"{CHUNK};release={way}")
    assert release_of(device) == "none works"
    assert device.facts.why_not[Fact.VMM].startswith("of 64 MiB released only 0 MiB came back")


@pytest.mark.parametrize(
    "quirks", [("hold",), ("hold-hard",), ("hold", "ignore-hint"), ("hold", "refuse-align")]
)
def test_r97_a_sleep_gives_memory_back_although_the_runtime_holds_it(
    cuda: EmulatedCuda,
    hip: EmulatedHip,
    open_device: Callable[..., Device],
    quirks: tuple[str, ...],
) -> None:
    device = open_device(*quirks)
    addresses = [fresh(device, seed) for seed in range(3)]
    free, total = device.memory()
    with arena_of(device) as arena:
        for _ in range(3):
            sleep(device, arena)
            assert device.memory() == (free + 3 * SIZE, total)
            assert (cuda.stats().handles, hip.held_bytes) == (0, 0)
            device.wake(arena, device.segments())
            assert device.memory() == (free, total)
            assert [read(device, address) for address in addresses] == [
                expected(seed) for seed in range(3)
            ]
    device.free(addresses[0])
    assert device.memory() == (free + SIZE, total), "a free gives the range up anyway"


@pytest.mark.parametrize("quirk", ["hold-hard", "hold"])
def test_r97_memory_of_a_failed_wake_comes_back_too(
    cuda: EmulatedCuda, open_device: Callable[..., Device], quirk: str
) -> None:
    device = open_device(quirk)
    address = fresh(device, 1)
    free, _ = device.memory()
    with arena_of(device) as arena:
        sleep(device, arena)
        device.fail("map", nth=3, code=1)
        with pytest.raises(TransferFailed):
            device.wake(arena, device.segments())
        assert device.memory()[0] == free + SIZE
        device.wake(arena, device.segments())
        assert read(device, address) == expected(1)


def test_r97_where_nothing_gives_memory_back_there_is_no_sleep_and_both_numbers_are_told() -> None:
    platform = EmulatedRocmPlatform(quirks=("leak",), capacity=512 * MIB)
    with pytest.raises(Unsupported, match=r"of \d+ MiB released only 0 MiB came back") as caught:
        SleepManager(platform)
    assert "update ROCm" in str(caught.value)
    platform.device().close()
    emulated_hip().reset()


def test_what_leaks_is_not_tried_for_long(
    cuda: EmulatedCuda, hip: EmulatedHip, open_device: Callable[..., Device]
) -> None:
    cuda.set_capacity(4096 * MIB)
    assert release_of(open_device("leak")) == "none works"
    assert cuda.stats().used_bytes <= 2 * PROBED
    hip.reset()


def test_a_neighbour_that_takes_memory_in_a_trial_changes_nothing(
    cuda: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    cuda.set_capacity(4096 * MIB)
    stop = threading.Event()

    def neighbour() -> None:
        while not stop.wait(0.05):
            cuda.set_taken(0 if cuda.stats().used_bytes else 100 * MIB)

    thread = threading.Thread(target=neighbour)
    thread.start()
    device = open_device()
    stop.set()
    thread.join()
    assert Fact.VMM in device.facts.yes


def test_a_device_with_little_memory_left_is_tried_with_less(
    cuda: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    cuda.set_capacity(7 * MIB)
    assert release_of(open_device()) == "plain"
    assert release_of(open_device("hold")) == "placeholder"


# ---- addresses -----------------------------------------------------------------------------------


def test_r98_a_stolen_address_is_a_typed_error_and_the_other_segments_are_intact(
    cuda: EmulatedCuda, hip: EmulatedHip, open_device: Callable[..., Device]
) -> None:
    device = open_device("hold-hard")
    kept, lost = fresh(device, 1), fresh(device, 2)
    segments = {segment.address: segment for segment in device.segments()}
    with arena_of(device) as arena, hip.thief():
        with pytest.raises(TransferFailed) as caught:
            device.sleep(arena, [Order(segments[lost]), Order(segments[kept])])
        error = caught.value.error
        assert isinstance(error, AddressLostError)
        assert error.wanted == lost
        assert error.got not in (0, lost)
        assert caught.value.report.ended_asleep
        assert {s.state for s in device.segments()} == {SegmentState.ASLEEP_BACKED}
        assert cuda.stats().handles == hip.held_bytes == 0, "the memory is given back all the same"

        with pytest.raises(TransferFailed) as caught:
            device.wake(arena, device.segments())
        assert isinstance(caught.value.error, AddressLostError)
        assert cuda.stats().handles == 0, "nothing is mapped where somebody else is"
        device.wake(arena, [segments[kept]])
        assert read(device, kept) == expected(1)
        device.free(lost)
        assert [segment.address for segment in device.segments()] == [kept]


def test_r98_an_address_that_was_given_back_wakes(
    hip: EmulatedHip, open_device: Callable[..., Device]
) -> None:
    device = open_device("hold-hard")
    address = fresh(device, 1)
    with arena_of(device) as arena:
        with hip.thief(), pytest.raises(TransferFailed):
            sleep(device, arena)
        device.wake(arena, device.segments())
        assert read(device, address) == expected(1)


def test_r98_a_manager_is_asleep_after_it_and_says_so() -> None:
    hip = emulated_hip()
    platform = EmulatedRocmPlatform(quirks=("hold-hard",))
    sleeper = SleepManager(platform, backup=BackupOptions(backing="anonymous"))
    tensor = fill(sleeper, "weights", 1)
    with hip.thief():
        with pytest.raises(AddressLostError) as caught:
            sleeper.sleep(level=1)
        assert any("ended asleep" in note for note in caught.value.__notes__)
        assert sleeper.state is State.ASLEEP
        with pytest.raises(AddressLostError):
            sleeper.wake_up()
        assert sleeper.state is State.ASLEEP
    sleeper.wake_up()
    assert bytes(tensor.numpy()) == expected(1, 3 * MIB)
    del tensor
    sleeper.close()
    platform.device().close()


def test_the_anon_remap_way_never_gives_an_address_up(
    hip: EmulatedHip, open_device: Callable[..., Device]
) -> None:
    device = open_device("hold", options=f"{CHUNK};release=anon-remap")
    address = fresh(device, 1)
    with arena_of(device) as arena, hip.thief(count=100):
        sleep(device, arena)
        device.wake(arena, device.segments())
        assert read(device, address) == expected(1)


def test_an_alignment_that_is_refused_is_left_out(open_device: Callable[..., Device]) -> None:
    device = open_device("refuse-align")
    address = fresh(device, 1)
    assert address % device.facts.granularity == 0


def test_a_shortage_of_addresses_is_still_a_shortage(cuda: EmulatedCuda, device: Device) -> None:
    pool = device.create_pool("weights")
    cuda.fail("cuMemAddressReserve", code=emucuda.OUT_OF_MEMORY, times=2)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(pool.id, SIZE)
    device.allocate(pool.id, SIZE)


# ---- mapping -------------------------------------------------------------------------------------


def test_r100_each_mapping_is_unmapped_by_a_call_of_its_own(
    cuda: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    device = open_device("unmap-several")
    address = fresh(device, 1)
    cuda.reset()
    with arena_of(device) as arena:
        sleep(device, arena)
        assert cuda.calls("cuMemUnmap") == CHUNKS
        device.wake(arena, device.segments())
    device.free(address)
    assert cuda.stats().reservations == 0, "the range could be freed"


def test_r101_access_is_given_once_to_a_whole_allocation(
    cuda: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    device = open_device("access-parts")
    cuda.reset()
    for seed in range(3):
        fresh(device, seed)
    assert cuda.calls("cuMemMap") == 3 * CHUNKS
    assert cuda.calls("cuMemSetAccess") == 3


def test_r101_refused_access_waits_for_the_device_once_and_tries_again(
    cuda: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    device = open_device("access-early")
    cuda.reset()
    address = fresh(device, 1)
    assert cuda.calls("cuCtxSynchronize") == 1
    assert read(device, address) == expected(1)


def test_r101_access_that_stays_refused_is_an_error_with_address_and_size(
    cuda: EmulatedCuda, device: Device
) -> None:
    before = holdings(cuda)
    cuda.fail("cuMemSetAccess", code=emucuda.INVALID_VALUE, times=emucuda.FOR_EVER)
    pool = device.create_pool("weights")
    with pytest.raises(DriverError, match="hipErrorInvalidValue") as caught:
        device.allocate(pool.id, SIZE)
    assert caught.value.call == "access"
    assert caught.value.size == SIZE
    assert caught.value.address
    assert holdings(cuda) == before


def test_pages_of_4_kib_are_taken_as_they_are(
    cuda: EmulatedCuda, open_device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMUCUDA_GRANULARITY_KB", "4")
    cuda.reset()
    device = open_device(options="")
    assert device.facts.granularity == 4096
    fresh(device, 1, size=5000)
    assert [segment.size for segment in device.segments()] == [8192]


def test_allocating_during_a_capture_does_not_break_it(cuda: EmulatedCuda, device: Device) -> None:
    entry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    allocate = entry(device.create_pool("cudagraph").allocate)
    with cuda.context(), cuda.stream() as stream:
        cuda.capture_begin(stream)
        assert allocate(SIZE, 0, stream)
        assert cuda.capture_end(stream) == 0


def test_physical_memory_is_made_in_chunks(cuda: EmulatedCuda, device: Device) -> None:
    fresh(device, 1)
    assert cuda.stats().handles == CHUNKS


def test_what_would_crash_the_runtime_is_an_error(cuda: EmulatedCuda, device: Device) -> None:
    address, handle = device.reserve(4 * MIB), device.create(4 * MIB)
    wrong: list[Callable[[], object]] = [
        lambda: device.unmap(address, 4 * MIB),
        lambda: device.release(handle + 1, 4 * MIB),
        lambda: device.release(0, 4 * MIB),
        lambda: device.map(address, 4 * MIB, handle + 1),
        lambda: device.map(address + 2 * MIB, 4 * MIB, handle),
        lambda: device.unreserve(address + 2 * MIB, 2 * MIB),
        lambda: device.unreserve(address, 2 * MIB),
    ]
    for misuse in wrong:
        with pytest.raises(DriverError, match="hipErrorInvalidValue"):
            misuse()
    device.map(address, 4 * MIB, handle)
    for misuse in (
        lambda: device.map(address, 4 * MIB, handle),
        lambda: device.release(handle, 4 * MIB),
        lambda: device.unmap(address, 2 * MIB),
        lambda: device.unreserve(address, 4 * MIB),
    ):
        with pytest.raises(DriverError, match="hipErrorInvalidValue"):
            misuse()
    device.unmap(address, 4 * MIB)
    device.release(handle, 4 * MIB)
    with pytest.raises(DriverError, match="hipErrorInvalidValue"):
        device.release(handle, 4 * MIB)
    device.unreserve(address, 4 * MIB)
    with pytest.raises(DriverError, match="hipErrorInvalidValue"):
        device.unreserve(address, 4 * MIB)
    assert cuda.stats().double_releases == 0


CRASH = """
import sys
from emulator.platforms import emulated_hip
import ctypes
emulated_hip().lib.{call}
"""


@pytest.mark.parametrize(
    "call",
    [
        "hipMemRelease(ctypes.c_void_p(0x77))",
        "hipMemUnmap(ctypes.c_void_p(1 << 40), ctypes.c_size_t(1 << 21))",
        "hipMemAddressFree(ctypes.c_void_p(1 << 40), ctypes.c_size_t(1 << 21))",
    ],
)
def test_the_emulator_crashes_where_the_runtime_does(
    hip: EmulatedHip, run_python: RunPython, root: Any, call: str
) -> None:
    path = os.pathsep.join([str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    done = run_python("-c", CRASH.format(call=call), env={"PYTHONPATH": path})
    assert done.returncode == -6
    assert "would crash AMD's runtime" in done.stderr


def test_calls_of_many_threads_do_not_meet(cuda: EmulatedCuda, device: Device) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            pool = device.create_pool(f"thread-{seed}")
            for _ in range(8):
                device.free(device.allocate(pool.id, SIZE))
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert cuda.stats().mappings == 0


# ---- contents ------------------------------------------------------------------------------------


def test_r33_stale_pages_never_show(cuda: EmulatedCuda, device: Device) -> None:
    cuda.set_poison(0xFF)
    address = device.allocate(device.create_pool("kv_cache").id, SIZE)
    assert set(read(device, address)) == {0xFF}, "the runtime hands out what was there"
    with arena_of(device) as arena:
        sleep(device, arena, Action.DISCARD)
        device.wake(arena, device.segments())
        assert set(read(device, address)) == {0}


def test_r34_zeroing_goes_by_pieces_and_waits_for_each(cuda: EmulatedCuda, device: Device) -> None:
    device.allocate(device.create_pool("kv_cache").id, SIZE)
    with arena_of(device) as arena:
        sleep(device, arena, Action.DISCARD)
        cuda.reset()
        device.wake(arena, device.segments())
    assert cuda.calls("cuMemsetD32Async") == CHUNKS, "no fill reaches over two pieces"
    assert cuda.calls("cuStreamSynchronize") >= CHUNKS


def test_codes_have_hip_s_words(cuda: EmulatedCuda, device: Device) -> None:
    pool = device.create_pool("weights")
    cuda.fail("cuMemCreate", code=700)
    with pytest.raises(DriverError, match="hipErrorIllegalAddress: an illegal memory access"):
        device.allocate(pool.id, SIZE)
    cuda.fail("cuMemCreate", code=emucuda.OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(pool.id, SIZE)


# ---- the platform --------------------------------------------------------------------------------


def test_the_platform_opens_its_device_and_tells_its_doubts(
    hip: EmulatedHip, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RocmPlatform, "device_count", lambda self: 2)
    hip.set_version(60042131)
    platform = RocmPlatform(chunk=8 * MIB, release="placeholder")
    device = platform.device(1)
    assert device.facts.chunk == 8 * MIB
    assert release_of(device) == "placeholder"
    assert "is older than ROCm 6.3.4" in caplog.text
    info = platform.get_memory_info(1)
    assert (info.source, info.total) == ("driver", 512 * MIB)
    device.close()


def test_a_platform_without_virtual_memory_says_so_and_probes_no_pools(
    hip: EmulatedHip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RocmPlatform, "device_count", lambda self: 1)
    hip.set_quirks("hold-hard", "ignore-hint")
    platform = RocmPlatform()
    capabilities = platform.capabilities
    assert not capabilities.virtual_memory
    assert not capabilities.graph_pools
    assert "came back in every way tried" in capabilities.virtual_memory.reason
    assert capabilities.nesting_found == "declared"
    with pytest.raises(Unsupported, match="sleep is not supported on rocm: of 64 MiB"):
        SleepManager(platform)
    platform.device().close()
