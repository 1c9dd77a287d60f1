"""The CUDA driver over the emulated libcuda: facts, transactions, faults and captures."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest

from emulator import emucuda
from hal.errors import (
    DriverError,
    HalError,
    HostMemoryError,
    OutOfDeviceMemory,
    StateError,
    Unsupported,
)
from hal.native import (
    Action,
    Arena,
    Backing,
    Device,
    Fact,
    Order,
    PoolEntries,
    SegmentState,
    TransferFailed,
    TransferReport,
)
from support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import RunPython
    from emulator.emucuda import EmulatedCuda

SIZE = 10 * MIB
CHUNK = "chunk=4194304"
CHUNKS = 3
POISON = 0xA5


@pytest.fixture(scope="session")
def loaded() -> EmulatedCuda:
    return emucuda.EmulatedCuda(emucuda.build())


@pytest.fixture
def emu(loaded: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCuda]:
    """Two fresh devices; at the end the driver must have given everything back."""
    monkeypatch.setenv("HAL_LIBCUDA", str(loaded.path))
    monkeypatch.setenv("EMUCUDA_DEVICES", "2")
    loaded.reset()
    before = [holdings(loaded, device) for device in (0, 1)]
    yield loaded
    after = [holdings(loaded, device) for device in (0, 1)]
    loaded.reset()
    assert after == before


@pytest.fixture
def open_device(emu: EmulatedCuda) -> Iterator[Callable[..., Device]]:
    opened: list[Device] = []

    def make(index: int = 0, options: str = CHUNK) -> Device:
        opened.append(Device("cuda", index, options))
        return opened[-1]

    yield make
    emu.reset()
    for device in opened:
        device.close()


@pytest.fixture
def device(open_device: Callable[..., Device]) -> Device:
    return open_device()


@pytest.fixture
def pool(device: Device) -> Iterator[PoolEntries]:
    """A pool whose segments are all freed at the end, mapped or asleep."""
    with open_pool(device) as entries:
        yield entries


@pytest.fixture(params=[Backing.ANONYMOUS, Backing.PINNED], ids=["anonymous", "pinned"])
def arena(request: pytest.FixtureRequest, device: Device, pool: PoolEntries) -> Iterator[Arena]:
    """Closed before the pool's segments are freed, so every test ends awake."""
    made = Arena(device, request.param)
    yield made
    made.close()


class open_pool:  # noqa: N801 - used like a function
    """A pool for one test, torn down with everything that was allocated from it."""

    def __init__(self, device: Device, tag: str = "weights") -> None:
        self.device, self.entries = device, device.create_pool(tag)

    def __enter__(self) -> PoolEntries:
        return self.entries

    def __exit__(self, *_: object) -> None:
        for segment in self.device.segments(self.entries.id):
            self.device.free(segment.address)
        self.device.destroy_pool(self.entries.id)


def holdings(emu: EmulatedCuda, device: int = 0) -> dict[str, int]:
    stats = emu.stats(device)
    return {name: int(getattr(stats, name)) for name, _ in stats._fields_}


def memory_of(emu: EmulatedCuda, device: int = 0) -> tuple[int, ...]:
    stats = emu.stats(device)
    return stats.used_bytes, stats.handles, stats.orphans, stats.mappings, stats.reservations


@functools.cache
def pattern(size: int, seed: int) -> bytes:
    """Bytes that no other seed gives."""
    unit = bytes((index * 7 + seed * 31 + index // 251) % 256 for index in range(64 * 1024))
    return (unit * (size // len(unit) + 1))[:size]


def write(device: Device, address: int, data: bytes) -> None:
    source = ctypes.create_string_buffer(data, len(data))
    device.copy_to_device(address, ctypes.addressof(source), len(data))
    device.synchronize()


def read(device: Device, address: int, size: int) -> bytes:
    target = ctypes.create_string_buffer(size)
    device.copy_to_host(ctypes.addressof(target), address, size)
    device.synchronize()
    return target.raw


def fresh(device: Device, pool: PoolEntries, seed: int, size: int = SIZE) -> int:
    address = device.allocate(pool.id, size)
    write(device, address, pattern(size, seed))
    return address


def sleep(device: Device, arena: Arena, action: Action = Action.OFFLOAD) -> TransferReport:
    return device.sleep(arena, [Order(segment, action) for segment in device.segments()])


def wake(device: Device, arena: Arena, **options: Any) -> TransferReport:
    return device.wake(arena, device.segments(), **options)


def states(device: Device) -> set[SegmentState]:
    return {segment.state for segment in device.segments()}


# ---- opening -------------------------------------------------------------------------------------


def test_facts_of_a_device(device: Device) -> None:
    facts = device.facts
    assert facts.granularity == facts.alignment == 2 * MIB
    assert facts.chunk == 4 * MIB
    assert facts.streams == 2
    assert facts.yes == {Fact.VMM, Fact.PIN_HOST, Fact.FREE_TRUTHFUL, Fact.RDMA, Fact.PARK}
    assert all(reason for reason in facts.why_not.values())
    assert facts.device_name == "Emulated GPU 0"
    assert facts.device_uuid == "GPU-e0000000-0000-0000-0000-000000000000"
    assert facts.version == "driver 13.0"


def test_opening_makes_no_stream_and_takes_one_reference_to_the_primary_context(
    emu: EmulatedCuda, device: Device
) -> None:
    assert emu.stats().retained == 1
    assert emu.stats().streams == emu.calls("cuStreamCreate") == 0
    assert emu.stats(1).retained == 0
    assert emu.current_context() == 0, "the calling thread has the context it had before"


def test_streams_are_made_at_their_first_use(emu: EmulatedCuda, device: Device, pool: Any) -> None:
    address = device.allocate(pool.id, SIZE)
    assert emu.stats().streams == 0
    device.fill(address, 1, SIZE, stream=1)
    device.synchronize(1)
    assert emu.stats().streams == 1
    read(device, address, 16)
    assert emu.stats().streams == 2
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        device.fill(address, 1, SIZE, stream=2)


def test_default_chunk_is_512_mib_and_allocations_are_cut_into_chunks(
    emu: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    assert open_device(options="").facts.chunk == 512 * MIB
    device = open_device()
    with open_pool(device) as entries:
        device.allocate(entries.id, SIZE)
        assert emu.stats().handles == CHUNKS
        assert emu.stats().used_bytes == SIZE


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("chunk=3145728", "multiple of the granularity, 2097152 bytes"),
        ("chunk=", "whole number of bytes"),
        ("chunk=-1", "whole number of bytes"),
        ("chunk=64M", "whole number of bytes"),
        ("chunk=99999999999999999999999", "whole number of bytes"),
        ("chunks=1", "unknown option 'chunks=1'; there is: chunk=BYTES"),
        ("chunk=4194304;fast", "unknown option 'fast'"),
    ],
)
def test_wrong_options_are_refused(emu: EmulatedCuda, options: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(reason)):
        Device("cuda", 0, options)


def test_a_thread_keeps_its_own_context(emu: EmulatedCuda, device: Device, pool: Any) -> None:
    with emu.context(1):
        before = emu.current_context()
        address = fresh(device, pool, 1)
        assert read(device, address, SIZE) == pattern(SIZE, 1)
        assert emu.current_context() == before
        with pytest.raises(DriverError):
            device.unmap(address + SIZE, SIZE)
        assert emu.current_context() == before
    assert emu.stats().retained == 1


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("EMUCUDA_DEVICES", "0", "CUDA_ERROR_NO_DEVICE"),
        ("EMUCUDA_DRIVER_VERSION", "10010", "of CUDA 11.0 or later, this is 10.1; update"),
        ("EMUCUDA_ATTRIBUTES", "102=0", "virtual memory management"),
        ("EMUCUDA_FAIL", "cuInit:1:803", "CUDA error"),
        ("EMUCUDA_FAIL", "cuDevicePrimaryCtxRetain:1:2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("EMUCUDA_FAIL", "cuMemGetAllocationGranularity:2:1", "granularity"),
        ("HAL_LIBCUDA", "/nowhere/libcuda.so", "HAL_LIBCUDA names a library that does not load"),
    ],
)
def test_a_device_that_cannot_be_opened_says_why(
    emu: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(variable, value)
        emu.reset()
        with pytest.raises(Unsupported, match=re.escape(reason)):
            Device("cuda")
    emu.reset()
    Device("cuda").close()


def test_a_device_that_is_not_there(emu: EmulatedCuda) -> None:
    with pytest.raises(Unsupported, match="no CUDA device 2: this process sees 2"):
        Device("cuda", 2)


def test_facts_follow_the_device_and_the_driver(
    emu: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    emu.set_attribute(110, 0)
    emu.set_attribute(18, 1)
    emu.set_driver_version(12040)
    facts = open_device().facts
    assert Fact.UNIFIED_MEMORY in facts.yes
    assert "GPUDirect RDMA" in facts.why_not[Fact.RDMA]
    assert facts.why_not[Fact.PARK].endswith("driver of CUDA 12.8, this is 12.4")
    assert facts.version == "driver 12.4"


def test_a_mig_instance_is_named_as_one(
    emu: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, open_device: Callable[..., Device]
) -> None:
    monkeypatch.setenv("EMUCUDA_MIG", "1")
    emu.reset()
    assert open_device(1).facts.device_uuid == "MIG-e0010000-0000-0000-0000-000000000001"


@pytest.mark.parametrize("supported", [True, False])
def test_memory_is_made_for_rdma_where_the_device_can(
    emu: EmulatedCuda, open_device: Callable[..., Device], supported: bool
) -> None:
    emu.set_attribute(110, int(supported))
    device = open_device()
    with open_pool(device) as entries:
        device.allocate(entries.id, SIZE)
        assert emu.stats().rdma_bytes == (SIZE if supported else 0)


# ---- symbols that a driver lacks -----------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EmulatedCuda]:
    """A libcuda that lacks symbols; another library, with books of its own."""

    def make(*symbols: str) -> EmulatedCuda:
        library = emucuda.build(hidden=symbols)
        monkeypatch.setenv("HAL_LIBCUDA", str(library))
        return emucuda.EmulatedCuda(library)

    return make


def test_without_host_registration_pinned_backups_fall_back(
    without: Callable[..., EmulatedCuda],
) -> None:
    without("cuMemHostRegister_v2")
    with Device("cuda") as device, open_pool(device) as entries:
        assert "register host memory" in device.facts.why_not[Fact.PIN_HOST]
        address = fresh(device, entries, 3)
        arena = Arena(device, Backing.PINNED)
        sleep(device, arena)
        assert arena.stats().fell_back
        wake(device, arena)
        assert read(device, address, SIZE) == pattern(SIZE, 3)
        arena.close()
        with pytest.raises(Unsupported):
            device.host_register(address, SIZE)


def test_without_process_checkpoints_there_is_no_parking(
    without: Callable[..., EmulatedCuda],
) -> None:
    without("cuCheckpointProcessLock")
    with Device("cuda") as device:
        assert "CUDA 12.8" in device.facts.why_not[Fact.PARK]


def test_without_uuids_a_device_is_known_by_its_pci_address(
    without: Callable[..., EmulatedCuda],
) -> None:
    without("cuDeviceGetUuid_v2")
    with Device("cuda") as device:
        assert device.facts.device_uuid == "0000:01:00.0"


def test_without_captures_memory_sleeps_and_wakes(without: Callable[..., EmulatedCuda]) -> None:
    without("cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode")
    with Device("cuda") as device, open_pool(device) as entries:
        address = fresh(device, entries, 4)
        arena = Arena(device)
        sleep(device, arena)
        wake(device, arena)
        assert read(device, address, SIZE) == pattern(SIZE, 4)
        arena.close()


@pytest.mark.parametrize("symbol", ["cuMemCreate", "cuDriverGetVersion", "cuMemsetD32Async"])
def test_a_driver_without_a_needed_symbol_is_refused(
    without: Callable[..., EmulatedCuda], symbol: str
) -> None:
    without(symbol)
    with pytest.raises(Unsupported, match=f"{symbol} needs a driver of CUDA .* update the NVIDIA"):
        Device("cuda")


# ---- finding the library, and forks --------------------------------------------------------------

OPEN = """
from hal.native import Device
with Device("cuda") as device:
    print(device.facts.device_name)
"""


def test_the_loaded_libcuda_is_used_whatever_the_loader_would_find(run_python: RunPython) -> None:
    library = emucuda.build(name="libcuda.so.999.1")  # a name that the loader alone does not match
    load = f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_LOCAL)\n"
    done = run_python("-c", load + OPEN, env={"HAL_LIBCUDA": ""})
    assert done.stdout == "Emulated GPU 0\n", done.stderr


def test_libcuda_is_found_by_the_loader(run_python: RunPython) -> None:
    folder = emucuda.build(name="libcuda.so.1").parent
    done = run_python("-c", OPEN, env={"HAL_LIBCUDA": "", "LD_LIBRARY_PATH": str(folder)})
    assert done.stdout == "Emulated GPU 0\n", done.stderr


FORK = """
import os, sys
from hal.errors import HalError
from hal.native import Device
opened = Device("cuda") if sys.argv[1] == "parent" else None
child = os.fork()
if child == 0:
    try:
        with Device("cuda") as device:
            print(device.facts.device_name, flush=True)
    except HalError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
if opened:
    opened.memory()
    opened.close()
"""


def test_a_child_of_a_process_that_used_cuda_is_told_why_it_cannot(
    loaded: EmulatedCuda, run_python: RunPython
) -> None:
    done = run_python("-c", FORK, "parent", env={"HAL_LIBCUDA": str(loaded.path)})
    assert done.returncode == 0, done.stderr
    assert "initialized before this process was forked" in done.stdout
    assert "spawn" in done.stdout


def test_a_child_of_a_process_that_did_not_use_cuda_can(
    loaded: EmulatedCuda, run_python: RunPython
) -> None:
    done = run_python("-c", FORK, "child", env={"HAL_LIBCUDA": str(loaded.path)})
    assert done.stdout == "Emulated GPU 0\n", done.stderr


# ---- memory --------------------------------------------------------------------------------------


def test_what_is_allocated_is_given_back(emu: EmulatedCuda, device: Device, pool: Any) -> None:
    free, total = device.memory()
    address = device.allocate(pool.id, SIZE)
    assert device.memory() == (free - SIZE, total)
    assert memory_of(emu) == (SIZE, CHUNKS, 0, CHUNKS, 1)
    device.free(address)
    assert device.memory() == (free, total)
    assert memory_of(emu) == (0, 0, 0, 0, 0)


def test_a_released_piece_stays_while_it_is_mapped(emu: EmulatedCuda, device: Device) -> None:
    address, handle = device.reserve(4 * MIB), device.create(4 * MIB)
    device.map(address, 4 * MIB, handle)
    device.release(handle, 4 * MIB)
    assert emu.stats().orphans == 1
    assert emu.stats().used_bytes == 4 * MIB
    device.unmap(address, 4 * MIB)
    assert emu.stats().used_bytes == 0
    device.unreserve(address, 4 * MIB)


def test_misuse_is_an_error_and_breaks_nothing(emu: EmulatedCuda, device: Device) -> None:
    address, handle = device.reserve(4 * MIB), device.create(4 * MIB)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE: invalid argument") as caught:
        device.fill(address, 0, 4 * MIB)
    assert caught.value.code == emucuda.INVALID_VALUE
    device.map(address, 4 * MIB, handle)
    with pytest.raises(DriverError):
        read(device, address, 16)
    device.access(address, 4 * MIB)
    with pytest.raises(DriverError):
        device.unmap(address, 2 * MIB)
    with pytest.raises(DriverError):
        device.unreserve(address, 4 * MIB)
    write(device, address, b"still here")
    assert read(device, address, 10) == b"still here"
    device.unmap(address, 4 * MIB)
    device.release(handle, 4 * MIB)
    with pytest.raises(DriverError):
        device.release(handle, 4 * MIB)
    assert emu.stats().double_releases == 1
    device.unreserve(address, 4 * MIB)
    emu.reset()


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (1, 4096), (4, 6), (2, 2)])
def test_fill_reaches_every_byte_and_no_other(
    device: Device, pool: PoolEntries, offset: int, size: int
) -> None:
    address = fresh(device, pool, 5)
    device.fill(address + offset, 0x3C, size)
    device.synchronize(0)
    expected = bytearray(pattern(SIZE, 5))
    expected[offset : offset + size] = bytes([0x3C]) * size
    assert read(device, address, SIZE) == bytes(expected)


def test_aligned_fills_go_by_words(emu: EmulatedCuda, device: Device, pool: PoolEntries) -> None:
    address = device.allocate(pool.id, SIZE)
    emu.reset()
    device.fill(address, 1, SIZE)
    device.fill(address + 1, 1, 3)
    device.synchronize()
    assert emu.calls("cuMemsetD32Async") == emu.calls("cuMemsetD8Async") == 1


def test_a_stream_that_could_not_be_made_is_made_at_the_next_use(
    emu: EmulatedCuda, device: Device, pool: PoolEntries
) -> None:
    address = device.allocate(pool.id, SIZE)
    emu.fail("cuStreamCreate", code=emucuda.OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory):
        device.fill(address, 1, SIZE)
    device.fill(address, 1, SIZE)
    device.synchronize()
    assert read(device, address, SIZE) == b"\1" * SIZE


def test_two_devices_have_their_own_memory(
    emu: EmulatedCuda, open_device: Callable[..., Device]
) -> None:
    first, second = open_device(0), open_device(1)
    with open_pool(first) as one, open_pool(second) as two:
        here, there = fresh(first, one, 1), fresh(second, two, 2)
        assert first.facts.device_uuid != second.facts.device_uuid
        with pytest.raises(DriverError):
            read(second, here, 16)
        arena = Arena(second)
        sleep(second, arena)
        assert (emu.stats(0).used_bytes, emu.stats(1).used_bytes) == (SIZE, 0)
        assert read(first, here, SIZE) == pattern(SIZE, 1)
        wake(second, arena)
        assert read(second, there, SIZE) == pattern(SIZE, 2)
        arena.close()


def test_threads_allocate_and_free_at_once(emu: EmulatedCuda, device: Device, pool: Any) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(10):
                address = fresh(device, pool, seed + turn, 2 * MIB)
                assert read(device, address, 2 * MIB) == pattern(2 * MIB, seed + turn)
                device.free(address)
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert memory_of(emu) == (0, 0, 0, 0, 0)


# ---- host memory ---------------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[int]:
    """The address of SIZE bytes of page-aligned host memory."""
    memory = mmap.mmap(-1, SIZE)
    view = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(view)
    del view
    memory.close()


def test_host_memory_is_registered_once(emu: EmulatedCuda, device: Device, host: int) -> None:
    device.host_register(host, SIZE)
    assert emu.stats().registered_bytes == SIZE
    with pytest.raises(StateError, match="HOST_MEMORY_ALREADY_REGISTERED"):
        device.host_register(host + 4096, 4096)
    device.host_unregister(host, SIZE)
    with pytest.raises(StateError, match="HOST_MEMORY_NOT_REGISTERED"):
        device.host_unregister(host, SIZE)


def test_a_failed_registration_does_not_poison_the_next_call(
    emu: EmulatedCuda, device: Device, pool: PoolEntries
) -> None:
    address, arena = fresh(device, pool, 6), Arena(device, Backing.PINNED)
    emu.set_pin_limit(4096)
    sleep(device, arena)
    assert arena.stats().fell_back
    wake(device, arena)
    assert read(device, address, SIZE) == pattern(SIZE, 6)
    assert emu.stats().registrations == 0
    arena.close()


def test_r68_registrations_are_small_pieces_and_all_undone_when_one_fails(
    emu: EmulatedCuda, device: Device
) -> None:
    arena = Arena(device, Backing.PINNED, require_pinned=True)
    arena.prepare(520 * MIB)
    stats = emu.stats()
    assert stats.registrations >= 3
    assert stats.registered_bytes == 520 * MIB
    assert arena.trim() == 520 * MIB
    emu.fail("cuMemHostRegister_v2", nth=3, code=2)
    with pytest.raises(HostMemoryError):
        arena.prepare(520 * MIB)
    assert emu.stats().registrations == 0
    arena.close()


def test_required_pinning_that_fails_changes_nothing(
    emu: EmulatedCuda, device: Device, pool: PoolEntries
) -> None:
    address = fresh(device, pool, 7)
    arena = Arena(device, Backing.PINNED, require_pinned=True)
    emu.set_pin_limit(4096)
    with pytest.raises(TransferFailed) as caught:
        sleep(device, arena)
    assert isinstance(caught.value.error, HalError)
    assert states(device) == {SegmentState.MAPPED}
    emu.set_pin_limit(0)
    sleep(device, arena)
    wake(device, arena)
    assert read(device, address, SIZE) == pattern(SIZE, 7)
    arena.close()


# ---- sleep and wake ------------------------------------------------------------------------------


def test_sleep_gives_device_memory_back_and_wake_is_bit_exact(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    addresses = [fresh(device, pool, seed) for seed in range(3)]
    emu.set_delay(0.002)
    for _ in range(3):
        assert sleep(device, arena).copied == 3 * SIZE
        assert memory_of(emu) == (0, 0, 0, 0, 3)
        wake(device, arena)
        for seed, address in enumerate(addresses):
            assert read(device, address, SIZE) == pattern(SIZE, seed)
    assert arena.stats().pinned == (arena.stats().held if arena.backing is Backing.PINNED else 0)


def test_each_cycle_makes_one_call_a_chunk(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    fresh(device, pool, 1)
    emu.reset()
    sleep(device, arena)
    sleep(device, arena)
    wake(device, arena)
    wake(device, arena)
    calls = ("cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease")
    assert {call: emu.calls(call) for call in calls} == dict.fromkeys(calls, CHUNKS)


@pytest.mark.parametrize(("fill", "byte"), [(None, 0), (0xCD, 0xCD)])
def test_discarded_memory_wakes_filled_and_never_with_the_driver_s_bytes(
    device: Device, pool: PoolEntries, arena: Arena, fill: int | None, byte: int
) -> None:
    address = device.allocate(pool.id, SIZE)
    assert set(read(device, address, SIZE)) == {POISON}, "fresh pages hold what was there before"
    sleep(device, arena, Action.DISCARD)
    wake(device, arena, fill=fill)
    assert set(read(device, address, SIZE)) == {byte}


def test_freeing_while_asleep_gives_the_address_back_once(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    kept, freed = fresh(device, pool, 1), fresh(device, pool, 2)
    sleep(device, arena)
    device.free(freed)
    wake(device, arena)
    assert read(device, kept, SIZE) == pattern(SIZE, 1)
    assert memory_of(emu) == (SIZE, CHUNKS, 0, CHUNKS, 1)


def test_sleep_waits_for_kernels_on_any_stream(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    address = fresh(device, pool, 1)
    with emu.context(), emu.stream() as stream:
        emu.launch_write(stream, address, 0x77, SIZE, seconds=0.2)
        sleep(device, arena)
        assert emu.stats().queued == 0
    wake(device, arena)
    assert set(read(device, address, SIZE)) == {0x77}
    assert emu.stats().sticky_error == 0


def test_sleep_waits_for_copies_on_a_connector_s_stream(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena, host: int
) -> None:
    address = fresh(device, pool, 8)
    with emu.context(), emu.stream() as stream:
        emu.register_host(host, SIZE)
        emu.set_delay(0.2)
        emu.copy_to_host(stream, host, address, SIZE)
        emu.set_delay(0)
        sleep(device, arena, Action.DISCARD)
        assert ctypes.string_at(host, SIZE) == pattern(SIZE, 8)
        emu.unregister_host(host)
    assert emu.stats().sticky_error == 0
    wake(device, arena)


def test_freeing_waits_for_kernels(emu: EmulatedCuda, device: Device, pool: PoolEntries) -> None:
    address = device.allocate(pool.id, SIZE)
    with emu.context(), emu.stream() as stream:
        emu.launch_write(stream, address, 1, SIZE, seconds=0.1)
        device.free(address)
    assert emu.stats().sticky_error == 0


def test_the_emulator_notices_memory_that_goes_under_a_kernel(
    emu: EmulatedCuda, device: Device
) -> None:
    address, handle = device.reserve(2 * MIB), device.create(2 * MIB)
    device.map(address, 2 * MIB, handle)
    device.access(address, 2 * MIB)
    with emu.context(), emu.stream() as stream:
        emu.launch_write(stream, address, 1, 2 * MIB, seconds=0.05)
        device.unmap(address, 2 * MIB)
        with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
            device.synchronize()
        assert caught.value.code == emucuda.ILLEGAL_ADDRESS
    emu.reset()
    device.release(handle, 2 * MIB)
    device.unreserve(address, 2 * MIB)


def test_an_error_of_an_earlier_kernel_fails_the_sleep_and_releases_nothing(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    fresh(device, pool, 1)
    before = memory_of(emu)
    with emu.context(), emu.stream() as stream:
        emu.launch_failure(stream, 719, seconds=0.05)
        with pytest.raises(TransferFailed) as caught:
            sleep(device, arena)
    assert isinstance(caught.value.error, DriverError)
    assert caught.value.error.code == 719
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(caught.value.error)
    assert memory_of(emu) == before
    assert states(device) == {SegmentState.MAPPED}
    emu.reset()


# ---- failures ------------------------------------------------------------------------------------

ALLOCATE_CALLS = [
    *(("cuMemCreate", nth) for nth in (1, 2, 3)),
    *(("cuMemMap", nth) for nth in (1, 2, 3)),
    ("cuMemSetAccess", 1),
    ("cuMemAddressReserve", 1),
]


@pytest.mark.parametrize(("call", "nth"), ALLOCATE_CALLS)
def test_a_failed_allocation_leaves_nothing(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, call: str, nth: int
) -> None:
    fresh(device, pool, 1)
    before = memory_of(emu)
    emu.fail(call, nth, code=emucuda.OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(pool.id, SIZE)
    assert memory_of(emu) == before
    address = fresh(device, pool, 2)
    assert read(device, address, SIZE) == pattern(SIZE, 2)


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("cuCtxSynchronize", 1),
        ("cuMemcpyDtoHAsync_v2", 1),
        ("cuMemcpyDtoHAsync_v2", 2),
        ("cuStreamSynchronize", 1),
        *(("cuMemUnmap", nth) for nth in (1, 2, 4, 6)),
        *(("cuMemRelease", nth) for nth in (1, 2, 4, 6)),
    ],
)
def test_a_failed_sleep_is_undone(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena, call: str, nth: int
) -> None:
    addresses = [fresh(device, pool, 1), fresh(device, pool, 2)]
    before = memory_of(emu)
    emu.fail(call, nth)
    with pytest.raises(TransferFailed) as caught:
        sleep(device, arena)
    assert isinstance(caught.value.error, DriverError)
    assert caught.value.error.code == 999
    assert not caught.value.report.ended_asleep
    assert memory_of(emu) == before
    for seed, address in enumerate(addresses, 1):
        assert read(device, address, SIZE) == pattern(SIZE, seed)
    sleep(device, arena)
    wake(device, arena)
    for seed, address in enumerate(addresses, 1):
        assert read(device, address, SIZE) == pattern(SIZE, seed)


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        *(("cuMemCreate", nth) for nth in (1, 2, 4, 6)),
        *(("cuMemMap", nth) for nth in (1, 2, 4, 6)),
        ("cuMemSetAccess", 1),
        ("cuMemSetAccess", 2),
        ("cuMemcpyHtoDAsync_v2", 1),
        ("cuMemcpyHtoDAsync_v2", 2),
        ("cuStreamSynchronize", 1),
    ],
)
@pytest.mark.parametrize("code", [emucuda.OUT_OF_MEMORY, 999])
def test_a_failed_wake_stays_asleep_and_can_be_repeated(
    emu: EmulatedCuda,
    device: Device,
    pool: PoolEntries,
    arena: Arena,
    call: str,
    nth: int,
    code: int,
) -> None:
    addresses = [fresh(device, pool, 1), fresh(device, pool, 2)]
    sleep(device, arena)
    before = memory_of(emu)
    emu.fail(call, nth, code)
    with pytest.raises(TransferFailed) as caught:
        wake(device, arena)
    kind = OutOfDeviceMemory if code == emucuda.OUT_OF_MEMORY else DriverError
    assert isinstance(caught.value.error, kind)
    assert memory_of(emu) == before
    assert states(device) == {SegmentState.ASLEEP_BACKED}
    wake(device, arena)
    for seed, address in enumerate(addresses, 1):
        assert read(device, address, SIZE) == pattern(SIZE, seed)


def test_a_failed_fill_stays_asleep(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    address = fresh(device, pool, 1)
    sleep(device, arena, Action.DISCARD)
    emu.fail("cuMemsetD32Async")
    with pytest.raises(TransferFailed):
        wake(device, arena)
    assert memory_of(emu) == (0, 0, 0, 0, 1)
    wake(device, arena)
    assert not any(read(device, address, SIZE))


def test_a_wake_finds_that_another_process_took_the_memory(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    addresses = [fresh(device, pool, seed) for seed in range(3)]
    sleep(device, arena)
    emu.set_capacity(64 * MIB)
    emu.set_taken(64 * MIB - 2 * SIZE)
    with pytest.raises(TransferFailed) as caught:
        wake(device, arena)
    error = caught.value.error
    assert isinstance(error, OutOfDeviceMemory)
    assert error.needed == 3 * SIZE
    assert memory_of(emu) == (0, 0, 0, 0, 3)
    assert states(device) == {SegmentState.ASLEEP_BACKED}
    emu.set_taken(0)
    wake(device, arena)
    for seed, address in enumerate(addresses):
        assert read(device, address, SIZE) == pattern(SIZE, seed)


def test_a_sleep_that_fails_after_its_memory_was_taken_ends_asleep_and_whole(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    addresses = [fresh(device, pool, 1), fresh(device, pool, 2)]
    emu.fail("cuMemUnmap", nth=5)
    emu.fail("cuMemCreate", code=emucuda.OUT_OF_MEMORY, times=emucuda.FOR_EVER)
    with pytest.raises(TransferFailed) as caught:
        sleep(device, arena)
    assert isinstance(caught.value.error, DriverError)
    assert caught.value.report.ended_asleep
    emu.reset()
    wake(device, arena)
    for seed, address in enumerate(addresses, 1):
        assert read(device, address, SIZE) == pattern(SIZE, seed)


# ---- captures ------------------------------------------------------------------------------------

MODES = [emucuda.CAPTURE_GLOBAL, emucuda.CAPTURE_THREAD_LOCAL, emucuda.CAPTURE_RELAXED]


def torch_entries(pool: PoolEntries) -> tuple[Any, Any]:
    """The pool's entry points, called as torch's pluggable allocator calls them."""
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    return allocate(pool.allocate), free(pool.free)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "flags", [0, emucuda.STREAM_NON_BLOCKING], ids=["blocking", "non-blocking"]
)
def test_allocating_during_a_capture_does_not_break_it(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, mode: int, flags: int
) -> None:
    allocate, _ = torch_entries(pool)
    with emu.context(), emu.stream(flags) as stream:
        emu.capture_begin(stream, mode)
        synchronized = emu.calls("cuCtxSynchronize")
        address = allocate(SIZE, 0, stream)
        assert address
        assert emu.calls("cuCtxSynchronize") == synchronized
        assert emu.capture_end(stream) == 0


@pytest.mark.parametrize(
    "flags", [0, emucuda.STREAM_NON_BLOCKING], ids=["blocking", "non-blocking"]
)
def test_freeing_during_a_capture_waits_until_it_has_ended(
    emu: EmulatedCuda, device: Device, pool: PoolEntries, flags: int
) -> None:
    allocate, free = torch_entries(pool)
    address = allocate(SIZE, 0, None)
    with emu.context(), emu.stream(flags) as stream:
        emu.capture_begin(stream)
        free(address, SIZE, 0, stream)
        assert emu.stats().used_bytes == SIZE
        other = allocate(SIZE, 0, stream)
        assert emu.capture_end(stream) == 0
        free(other, SIZE, 0, stream)
    assert memory_of(emu) == (0, 0, 0, 0, 0)


def test_a_free_without_its_stream_sees_a_capture_on_a_blocking_stream(
    emu: EmulatedCuda, device: Device, pool: PoolEntries
) -> None:
    allocate, free = torch_entries(pool)
    address = allocate(SIZE, 0, None)
    with emu.context(), emu.stream(flags=0) as stream:
        emu.capture_begin(stream)
        free(address, SIZE, 0, None)
        assert emu.stats().used_bytes == SIZE
        assert emu.capture_end(stream) == 0
        device.free(device.allocate(pool.id, SIZE))
    assert memory_of(emu) == (0, 0, 0, 0, 0)


def test_another_thread_s_capture_survives_what_this_thread_allocates(
    emu: EmulatedCuda, device: Device, pool: PoolEntries
) -> None:
    ended: list[int] = []
    capturing, done = threading.Event(), threading.Event()

    def capture() -> None:
        with emu.context(), emu.stream() as stream:
            emu.capture_begin(stream)
            capturing.set()
            done.wait(30)
            ended.append(emu.capture_end(stream))

    thread = threading.Thread(target=capture)
    thread.start()
    capturing.wait(30)
    address = device.allocate(pool.id, SIZE)
    device.fill(address, 9, SIZE)
    device.synchronize(0)
    done.set()
    thread.join()
    assert ended == [0]


def test_the_emulator_breaks_a_capture_as_a_driver_does(emu: EmulatedCuda, device: Device) -> None:
    with emu.context(), emu.stream() as stream:
        emu.capture_begin(stream)
        other = ctypes.c_void_p()
        assert emu.lib.cuStreamCreate(ctypes.byref(other), 0) == emucuda.CAPTURE_UNSUPPORTED
        assert emu.capture_end(stream) == emucuda.CAPTURE_INVALIDATED
        emu.capture_begin(stream, emucuda.CAPTURE_RELAXED)
        with pytest.raises(DriverError, match="STREAM_CAPTURE_UNSUPPORTED"):
            device.synchronize()
        assert emu.capture_end(stream) == emucuda.CAPTURE_INVALIDATED
