"""The Level Zero driver behind the real loader, over an emulated Intel driver: facts, contexts,
transactions, faults and quirks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest

from emulator import emuze
from hal.errors import DriverError, HalError, OutOfDeviceMemory, StateError, Unsupported
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
    from pathlib import Path
    from subprocess import CompletedProcess

    from conftest import RunPython
    from emulator.emuze import EmulatedXpu

KIB = 1 << 10
SIZE = 10 * MIB
CARD, OTHER = 2, 3
"""The cards of these tests: other tests of the process may hold memory on the first."""
CHUNK = "chunk=4194304"
CHUNKS = 3
VMM_CALLS = (
    "zeVirtualMemReserve",
    "zePhysicalMemCreate",
    "zeVirtualMemMap",
    "zeVirtualMemUnmap",
    "zePhysicalMemDestroy",
    "zeVirtualMemFree",
)
"""Every call of a page's life."""

pytestmark = pytest.mark.skipif(emuze.why_not() is not None, reason=emuze.why_not() or "")


@pytest.fixture(scope="session")
def loaded() -> EmulatedXpu:
    return emuze.EmulatedXpu(emuze.build())


@pytest.fixture
def emu(loaded: EmulatedXpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedXpu]:
    """Fresh cards; at the end the driver must have given everything back."""
    for variable in ("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"):
        monkeypatch.delenv(variable, raising=False)
    loaded.reset()
    loaded.set(cards=emuze.CARDS)
    gc.collect()  # what other tests hold may only become less
    loaded.count_from_now()
    yield loaded
    loaded.reset()
    held = {card: holdings(loaded, card) for card in (CARD, OTHER)}
    loaded.count_from_the_start()
    assert not any(count > 0 for card in held.values() for count in card.values()), held


@pytest.fixture
def open_device(emu: EmulatedXpu) -> Iterator[Callable[..., Device]]:
    opened: list[Device] = []

    def make(index: int = CARD, options: str = CHUNK) -> Device:
        opened.append(Device("xpu", index, options))
        return opened[-1]

    yield make
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


@pytest.fixture
def run_emulated(run_python: RunPython, root: Path) -> Callable[..., CompletedProcess[str]]:
    """Run code in a process of its own, which can see the emulator: `run_emulated(code, *argv)`."""
    start = f"import sys; sys.path.insert(0, {str(root / 'tests')!r})\n"

    def run(code: str, *arguments: str, **environment: str) -> CompletedProcess[str]:
        return run_python("-c", start + code, *arguments, env=environment)

    return run


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


def holdings(emu: EmulatedXpu, card: int = CARD) -> dict[str, int]:
    stats = emu.stats(card)
    return {name: int(getattr(stats, name)) for name, _ in stats._fields_}


def memory_of(emu: EmulatedXpu) -> tuple[int, ...]:
    stats = emu.stats(CARD)
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
    assert facts.granularity == facts.alignment == 64 * KIB
    assert facts.chunk == 4 * MIB
    assert facts.streams == 2
    assert facts.yes == {Fact.VMM, Fact.PIN_HOST}
    assert all(reason for reason in facts.why_not.values())
    assert facts.device_name == "Emulated Intel GPU 2"
    assert facts.device_uuid == "0000:3c:00.0"
    assert facts.version == "Level Zero 1.4, driver 1.3.30000"


def test_the_largest_piece_is_what_the_device_allows(open_device: Callable[..., Device]) -> None:
    assert open_device(options="").facts.chunk == 512 * MIB


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("chunk=3145728", "multiple of its page size, 2097152 bytes"),
        ("chunk=64M", "'chunk=64M' is no option; there are queue=ADDRESS"),
        ("chunk=-1", "is no option"),
        ("chunk=99999999999999999999999", "is no option"),
        ("uuid=12", "is no option"),
        ("fast", "'fast' is no option"),
    ],
)
def test_wrong_options_are_refused(emu: EmulatedXpu, options: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(reason)):
        Device("xpu", CARD, options)


def test_a_device_that_is_not_there(emu: EmulatedXpu) -> None:
    with pytest.raises(Unsupported, match="no Intel GPU 4: Level Zero shows this process 4"):
        Device("xpu", 4)


@pytest.mark.parametrize(("call", "nth"), [("zeContextCreate", 1), ("zeDeviceGetProperties", 5)])
def test_a_device_that_cannot_be_opened_says_why(emu: EmulatedXpu, call: str, nth: int) -> None:
    emu.fail(call, nth, emuze.UNINITIALIZED)
    with pytest.raises(Unsupported, match=rf"{call} failed with ZE_RESULT_ERROR_UNINITIALIZED"):
        Device("xpu", CARD)
    Device("xpu", CARD).close()


NO_DRIVER = """
from hal.errors import Unsupported
from hal.native import Device
try:
    Device("xpu")
except Unsupported as error:
    print(error.why)
"""


def test_a_machine_without_a_driver_says_what_to_install(run_python: RunPython) -> None:
    done = run_python("-c", NO_DRIVER, env={"ZE_ENABLE_ALT_DRIVERS": "/nowhere/libze.so"})
    assert "zeInit failed with ZE_RESULT_ERROR_UNINITIALIZED" in done.stdout, done.stderr
    assert "install libze_intel_gpu.so.1" in done.stdout
    done = run_python("-c", NO_DRIVER, env={"HAL_LIBZE": "/nowhere/libze_loader.so.1"})
    assert "HAL_LIBZE names a library that does not load" in done.stdout, done.stderr
    assert "package libze1" in done.stdout


def test_a_device_without_memory_of_its_own(
    emu: EmulatedXpu, open_device: Callable[..., Device]
) -> None:
    emu.set(integrated=1, card=OTHER)
    assert Fact.UNIFIED_MEMORY in open_device(OTHER).facts.yes
    assert Fact.UNIFIED_MEMORY not in open_device(CARD).facts.yes


def test_a_driver_that_cannot_import_host_memory(
    emu: EmulatedXpu, open_device: Callable[..., Device]
) -> None:
    emu.set(**{"import": 0})
    device = open_device()
    assert "import host memory" in device.facts.why_not[Fact.PIN_HOST]
    with open_pool(device) as entries:
        address = fresh(device, entries, 3)
        arena = Arena(device, Backing.PINNED)
        sleep(device, arena)
        assert arena.stats().fell_back
        wake(device, arena)
        assert read(device, address, SIZE) == pattern(SIZE, 3)
        arena.close()


# ---- the context ---------------------------------------------------------------------------------


@pytest.mark.parametrize("major", [8, 9])
def test_torchs_context_is_taken_from_its_queue(
    emu: EmulatedXpu,
    monkeypatch: pytest.MonkeyPatch,
    open_device: Callable[..., Device],
    major: int,
) -> None:
    monkeypatch.setenv("HAL_LIBSYCL", str(emuze.build_sycl(major)))
    device = open_device(0, f"{CHUNK};queue={emu.queue(OTHER)}")
    assert emu.stats().contexts == 0, "no context was made"
    assert device.facts.device_uuid == "0000:3d:00.0", "the device is the queue's"
    with open_pool(device) as entries:
        address = device.allocate(entries.id, SIZE)
        assert emu.kernel_write(address, 7, SIZE) == 0, "torch's kernels reach the memory"
        assert read(device, address, SIZE) == b"\7" * SIZE


def test_r105_a_context_of_its_own_is_not_torchs(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    address = device.allocate(pool.id, SIZE)
    assert emu.kernel_write(address, 7, SIZE) == emuze.DEVICE_LOST


@pytest.mark.parametrize("major", [7, 10])
def test_an_untested_libsycl_is_not_called(
    emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch, major: int
) -> None:
    monkeypatch.setenv("HAL_LIBSYCL", str(emuze.build_sycl(major)))
    with pytest.raises(Unsupported, match=rf"libsycl.so.{major} is not one of the tested majors"):
        Device("xpu", 0, f"queue={emu.queue()}")


def test_a_queue_on_another_backend_is_refused(
    emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_LIBSYCL", str(emuze.build_sycl(8)))
    with pytest.raises(Unsupported, match="set ONEAPI_DEVICE_SELECTOR=level_zero:gpu"):
        Device("xpu", 0, f"queue={emu.queue(backend=emuze.OPENCL)}")


def test_a_libsycl_without_the_functions_is_refused(
    emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    empty = tmp_path / "libsycl.so.8"
    empty.write_bytes(emuze.build().read_bytes())
    monkeypatch.setenv("HAL_LIBSYCL", str(empty))
    with pytest.raises(Unsupported, match=r"libsycl.so.8 does not export _ZNK4sycl"):
        Device("xpu", 0, f"queue={emu.queue()}")


OPEN_QUEUE = """
import sys
from emulator import emuze
from hal.native import Device
emu = emuze.EmulatedXpu(emuze.build())
if sys.argv[1] != "none":
    import ctypes
    ctypes.CDLL(str(emuze.build_sycl(int(sys.argv[1]))), mode=ctypes.RTLD_LOCAL)
try:
    with Device("xpu", 0, f"queue={emu.queue()}") as device:
        print(device.facts.device_name, emu.stats().contexts)
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("major", "said"),
    [("9", "Emulated Intel GPU 0 0"), ("none", "this process has loaded no libsycl")],
)
def test_only_the_libsycl_that_the_process_has_is_asked(
    run_emulated: RunPython, major: str, said: str
) -> None:
    done = run_emulated(OPEN_QUEUE, major, HAL_LIBSYCL="")
    assert said in done.stdout, done.stderr


# ---- devices by name -----------------------------------------------------------------------------


def test_r89_a_device_is_chosen_by_uuid(
    emu: EmulatedXpu, open_device: Callable[..., Device]
) -> None:
    uuid = f"01{'22' * 14}00"
    assert open_device(0, f"uuid={uuid}").facts.device_name == "Emulated Intel GPU 1"
    with pytest.raises(Unsupported, match="no Intel GPU with UUID"):
        Device("xpu", 0, f"uuid={'33' * 16}")


@pytest.mark.parametrize(
    ("hierarchy", "mask", "names"),
    [
        ("FLAT", None, ["0000:3a:00.0#0", "0000:3a:00.0#1"]),
        ("COMBINED", None, ["0000:3a:00.0#0", "0000:3a:00.0#1"]),
        ("COMPOSITE", None, ["0000:3a:00.0"]),
        ("COMPOSITE", "0.0,0.1", ["0000:3a:00.0#0", "0000:3a:00.0#1"]),
        ("COMPOSITE", "0.1", ["0000:3a:00.0#1"]),
        ("FLAT", "0", ["0000:3a:00.0"]),
    ],
)
def test_r96_a_tile_is_named_as_one(
    emu: EmulatedXpu,
    monkeypatch: pytest.MonkeyPatch,
    open_device: Callable[..., Device],
    hierarchy: str,
    mask: str | None,
    names: list[str],
) -> None:
    emu.set(cards=1)
    emu.set(tiles=2)
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", hierarchy)
    if mask is not None:
        monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
    devices = [open_device(index) for index in range(len(names))]
    assert [device.facts.device_uuid for device in devices] == names
    whole = hierarchy == "COMPOSITE" and mask is None
    assert all(device.memory()[1] == (512 if whole else 256) * MIB for device in devices)


def test_a_device_without_a_pci_address_is_known_by_its_uuid(
    emu: EmulatedXpu, open_device: Callable[..., Device]
) -> None:
    emu.fail("zeDevicePciGetPropertiesExt", times=emuze.FOR_EVER)
    assert open_device(1, "").facts.device_uuid == f"01{'22' * 14}00"


# ---- virtual memory ------------------------------------------------------------------------------


BROKEN_CALL = """
import sys
from emulator import emuze
from hal.errors import Unsupported
from hal.native import Device, Fact
emu = emuze.EmulatedXpu(emuze.build())
emu.fail(sys.argv[1], times=emuze.FOR_EVER)
device = Device("xpu")
print(device.facts.why_not[Fact.VMM])
pool = device.create_pool("weights")
emu.reset()
try:
    device.allocate(pool.id, 1 << 20)
except Unsupported:
    print("refused", emu.calls("zeVirtualMemReserve"))
"""


@pytest.mark.parametrize("call", VMM_CALLS)
def test_r103_a_call_that_only_looks_supported_is_found_out(
    run_emulated: RunPython, call: str
) -> None:
    done = run_emulated(BROKEN_CALL, call)
    reason, refused = done.stdout.splitlines()
    said = f"{call} failed with ZE_RESULT_ERROR_UNSUPPORTED_FEATURE (0x78000003); update"
    assert reason.startswith(said), done.stderr
    assert refused == "refused 0"


@pytest.mark.parametrize(
    ("size", "page"),
    [(64 * KIB, 64 * KIB), (MIB, 64 * KIB), (2 * MIB, 2 * MIB), (1 << 30, 2 * MIB)],
)
def test_r103_the_page_size_is_asked_for_each_size(
    emu: EmulatedXpu, device: Device, pool: PoolEntries, size: int, page: int
) -> None:
    assert device.granularity(size) == page
    before = emu.calls("zeVirtualMemQueryPageSize")
    address = device.allocate(pool.id, min(size, 64 * MIB) - 1000)
    assert emu.calls("zeVirtualMemQueryPageSize") == before + 1
    (segment,) = device.segments()
    assert segment.size % page == 0
    assert address % page == 0


def test_a_driver_that_does_not_tell_page_sizes_gets_the_usual_one(
    emu: EmulatedXpu, open_device: Callable[..., Device]
) -> None:
    emu.fail("zeVirtualMemQueryPageSize", times=emuze.FOR_EVER)
    device = open_device()
    assert device.facts.granularity == device.granularity(1) == 2 * MIB


def test_what_is_allocated_is_given_back(emu: EmulatedXpu, device: Device, pool: Any) -> None:
    free, total = device.memory()
    address = device.allocate(pool.id, SIZE)
    assert device.memory() == (free - SIZE, total)
    assert memory_of(emu) == (SIZE, CHUNKS, 0, CHUNKS, 1)
    device.free(address)
    assert device.memory() == (free, total)
    assert memory_of(emu) == (0, 0, 0, 0, 0)


def test_r104_no_physical_memory_is_ever_mapped_twice(
    emu: EmulatedXpu, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    """A second mapping is answered with success here, and its pages fault."""
    address, again = device.reserve(2 * MIB), device.reserve(2 * MIB)
    handle = device.create(2 * MIB)
    device.map(address, 2 * MIB, handle)
    device.map(again, 2 * MIB, handle)
    assert emu.stats().shared_mappings == 1
    with pytest.raises(DriverError):
        device.fill(again, 0, 2 * MIB)
    for mapped in (address, again):
        device.unmap(mapped, 2 * MIB)
        device.unreserve(mapped, 2 * MIB)
    device.release(handle, 2 * MIB)
    addresses = [fresh(device, pool, seed) for seed in range(3)]
    sleep(device, arena)
    wake(device, arena)
    assert [read(device, at, SIZE) for at in addresses] == [pattern(SIZE, s) for s in range(3)]
    assert emu.stats().shared_mappings == 1, "no other was made"


def test_misuse_is_an_error_and_breaks_nothing(emu: EmulatedXpu, device: Device) -> None:
    address, handle = device.reserve(4 * MIB), device.create(4 * MIB)
    with pytest.raises(DriverError, match="ZE_RESULT_ERROR_INVALID_ARGUMENT") as caught:
        device.fill(address, 0, 4 * MIB)
    assert caught.value.code == emuze.INVALID_ARGUMENT
    device.map(address, 4 * MIB, handle)
    device.access(address, 4 * MIB)
    for wrong in (
        lambda: device.unmap(address, 2 * MIB),
        lambda: device.unreserve(address, 4 * MIB),
        lambda: device.release(handle, 4 * MIB),
        lambda: device.reserve(100),
        lambda: device.create(3 * MIB),
        lambda: device.fill(address, 0, 4096, stream=2),
        lambda: device.synchronize(2),
    ):
        with pytest.raises(DriverError):
            wrong()
    write(device, address, b"still here")
    assert read(device, address, 10) == b"still here"
    device.unmap(address, 4 * MIB)
    device.release(handle, 4 * MIB)
    with pytest.raises(DriverError):
        device.release(handle, 4 * MIB)
    device.unreserve(address, 4 * MIB)
    assert emu.stats(CARD).double_releases == 1


def test_memory_that_another_process_holds_is_out_of_memory_with_the_books_figure(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    emu.set(card=CARD, taken=508 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        device.allocate(pool.id, SIZE)
    assert caught.value.needed == SIZE
    assert caught.value.free == 512 * MIB, "Level Zero does not tell what others hold"
    assert memory_of(emu) == (0, 0, 0, 0, 0)


def test_memory_that_runs_out_only_when_it_is_mapped(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    emu.set(late_memory=1)
    for _ in range(5):
        device.allocate(pool.id, 96 * MIB)
    emu.set(card=CARD, total=500 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(pool.id, 24 * MIB)
    assert memory_of(emu)[0] == 480 * MIB


def test_what_can_never_fit_is_not_even_asked_for(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    """Drivers answer success and move memory to the host."""
    emu.set(late_memory=1)
    device.allocate(pool.id, 500 * MIB)
    before = emu.calls("zePhysicalMemCreate")
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(pool.id, 14 * MIB)
    assert emu.calls("zePhysicalMemCreate") == before + 3, "12 MiB fit"
    assert device.memory() == (12 * MIB, 512 * MIB)


# ---- copies --------------------------------------------------------------------------------------


def test_lists_are_made_at_their_first_use(emu: EmulatedXpu, device: Device, pool: Any) -> None:
    address = device.allocate(pool.id, SIZE)
    assert emu.stats().lists == 0
    device.fill(address, 1, SIZE, stream=1)
    device.synchronize(1)
    assert emu.stats().lists == 1
    emu.fail("zeCommandListCreateImmediate", code=emuze.OUT_OF_DEVICE_MEMORY)
    with pytest.raises(OutOfDeviceMemory):
        device.fill(address, 1, SIZE)
    device.fill(address, 2, SIZE)
    device.synchronize()
    assert emu.stats().lists == 2
    assert read(device, address, SIZE) == b"\2" * SIZE


def test_what_is_queued_on_a_stream_keeps_its_order(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    """The emulated lists run what no barrier orders the other way round."""
    emu.set(delay_us=2000)
    address = device.allocate(pool.id, SIZE)
    for value in range(1, 6):
        device.fill(address, value, SIZE)
    target = ctypes.create_string_buffer(SIZE)
    device.copy_to_host(ctypes.addressof(target), address, SIZE)
    device.fill(address, 9, SIZE)
    device.synchronize(0)
    assert target.raw == b"\5" * SIZE
    assert read(device, address, SIZE) == b"\x09" * SIZE


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


def test_threads_never_share_a_list(emu: EmulatedXpu, device: Device, pool: PoolEntries) -> None:
    emu.set(delay_us=200)
    address = device.allocate(pool.id, SIZE)

    def use(part: int) -> None:
        for round_ in range(20):
            device.fill(address + part * MIB, part, MIB, stream=round_ % 2)
            device.synchronize(round_ % 2)

    threads = [threading.Thread(target=use, args=(part,)) for part in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.synchronize()
    assert emu.stats().concurrent_uses == 0
    assert read(device, address, 6 * MIB) == b"".join(bytes([p]) * MIB for p in range(6))


def has_no_waiting() -> bool:
    loader = ctypes.CDLL(os.environ.get("HAL_LIBZE") or emuze.LOADER)
    return not hasattr(loader, "zeCommandListHostSynchronize")


def test_an_asynchronous_error_surfaces_when_it_is_waited_for(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    address = device.allocate(pool.id, SIZE)

    def fill_and_wait() -> None:
        device.fill(address, 1, SIZE)
        device.synchronize()

    fill_and_wait()
    # Where the loader cannot wait for a list, lists are synchronous.
    emu.fail("zeCommandListHostSynchronize", code=emuze.DEVICE_LOST)
    emu.fail("zeCommandListAppendMemoryFill", nth=2 - has_no_waiting(), code=emuze.DEVICE_LOST)
    with pytest.raises(DriverError, match="ZE_RESULT_ERROR_DEVICE_LOST"):
        fill_and_wait()


# ---- transitions ---------------------------------------------------------------------------------


def test_sleep_and_wake_are_bit_exact_at_the_same_address(
    emu: EmulatedXpu, device: Device, pool: PoolEntries, arena: Arena
) -> None:
    emu.set(delay_us=1000)
    addresses = [fresh(device, pool, seed, 3 * MIB + seed * 64 * KIB) for seed in range(4)]
    for _ in range(3):
        slept = sleep(device, arena)
        assert states(device) == {SegmentState.ASLEEP_BACKED}
        assert emu.stats(CARD).used_bytes == 0
        assert slept.released == sum(segment.size for segment in device.segments())
        wake(device, arena)
    for seed, address in enumerate(addresses):
        size = 3 * MIB + seed * 64 * KIB
        assert read(device, address, size) == pattern(size, seed)
    assert emu.stats().concurrent_uses == 0


def test_r33_discarded_memory_wakes_zeroed(device: Device, pool: PoolEntries, arena: Arena) -> None:
    address = fresh(device, pool, 1)
    sleep(device, arena, Action.DISCARD)
    wake(device, arena)
    assert read(device, address, SIZE) == bytes(SIZE)


@pytest.mark.parametrize("call", ["reserve", "create", "map", "access"])
def test_r16_a_failure_in_a_later_piece_leaks_nothing(
    emu: EmulatedXpu, device: Device, pool: PoolEntries, call: str
) -> None:
    for nth in range(1, CHUNKS + 1 if call in ("create", "map") else 2):
        device.fail(call, nth, emuze.INVALID_ARGUMENT)
        with pytest.raises(HalError):
            device.allocate(pool.id, SIZE)
        assert memory_of(emu) == (0, 0, 0, 0, 0)
    address = fresh(device, pool, 2)
    assert read(device, address, SIZE) == pattern(SIZE, 2)


SLEEP_CALLS = {
    "zeCommandListAppendMemoryCopy": "copy_to_host",
    "zeVirtualMemUnmap": "unmap",
    "zePhysicalMemDestroy": "release",
}


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("zeCommandListAppendMemoryCopy", 1),
        ("zeCommandListAppendMemoryCopy", 2),
        ("zeVirtualMemUnmap", 1),
        ("zeVirtualMemUnmap", 4),
        ("zePhysicalMemDestroy", 1),
        ("zePhysicalMemDestroy", 4),
    ],
)
def test_a_sleep_that_the_driver_fails_ends_awake_with_the_same_bytes(
    emu: EmulatedXpu, device: Device, pool: PoolEntries, call: str, nth: int
) -> None:
    arena = Arena(device)
    addresses = [fresh(device, pool, seed) for seed in range(2)]
    emu.fail(call, nth, emuze.INVALID_ARGUMENT)
    with pytest.raises(TransferFailed) as caught:
        sleep(device, arena)
    assert isinstance(caught.value.error, DriverError)
    assert caught.value.error.call == SLEEP_CALLS[call]
    assert caught.value.report.rolled_back
    assert states(device) == {SegmentState.MAPPED}
    assert [read(device, at, SIZE) for at in addresses] == [pattern(SIZE, s) for s in range(2)]
    sleep(device, arena)
    wake(device, arena)
    assert [read(device, at, SIZE) for at in addresses] == [pattern(SIZE, s) for s in range(2)]
    arena.close()


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("zePhysicalMemCreate", 1),
        ("zePhysicalMemCreate", 5),
        ("zeVirtualMemMap", 1),
        ("zeVirtualMemMap", 6),
        ("zeCommandListAppendMemoryCopy", 2),
    ],
)
def test_r13_a_wake_that_the_driver_fails_stays_asleep_with_its_backups(
    emu: EmulatedXpu, device: Device, pool: PoolEntries, call: str, nth: int
) -> None:
    arena = Arena(device)
    addresses = [fresh(device, pool, seed) for seed in range(2)]
    sleep(device, arena)
    emu.fail(call, nth, emuze.OUT_OF_DEVICE_MEMORY)
    with pytest.raises(TransferFailed) as caught:
        wake(device, arena)
    assert isinstance(caught.value.error, OutOfDeviceMemory)
    assert states(device) == {SegmentState.ASLEEP_BACKED}
    assert emu.stats(CARD).used_bytes == 0
    wake(device, arena)
    assert [read(device, at, SIZE) for at in addresses] == [pattern(SIZE, s) for s in range(2)]
    arena.close()


def test_a_failed_import_falls_back_to_pageable_memory(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    address = fresh(device, pool, 1)
    arena = Arena(device, Backing.PINNED)
    emu.fail("zexDriverImportExternalPointer", code=emuze.INVALID_ARGUMENT)
    sleep(device, arena)
    assert arena.stats().fell_back
    wake(device, arena)
    assert read(device, address, SIZE) == pattern(SIZE, 1)
    arena.close()


def test_pinned_backups_are_imported_and_given_back(
    emu: EmulatedXpu, device: Device, pool: PoolEntries
) -> None:
    fresh(device, pool, 1)
    arena = Arena(device, Backing.PINNED)
    sleep(device, arena)
    assert not arena.stats().fell_back
    assert emu.stats().registered_bytes == arena.stats().pinned >= SIZE
    wake(device, arena)
    arena.close()
    assert emu.stats().registrations == 0


FAULT_POINTS = (
    "granularity memory_info reserve unreserve create release map access unmap copy_to_host "
    "copy_to_device fill synchronize host_register host_unregister"
).split()


def live_through(device: Device, pool: PoolEntries, arena: Arena) -> None:
    """Everything that a segment can go through."""
    address = fresh(device, pool, 1)
    device.memory()
    for action in (Action.OFFLOAD, Action.DISCARD):
        sleep(device, arena, action)
        wake(device, arena)
    device.free(address)
    arena.trim()


@pytest.mark.parametrize("call", FAULT_POINTS)
def test_every_fault_point_is_hit_and_survived(
    emu: EmulatedXpu, device: Device, pool: PoolEntries, call: str
) -> None:
    arena = Arena(device, Backing.PINNED)
    device.fail(call, 1, emuze.INVALID_ARGUMENT)
    with contextlib.suppress(HalError, TransferFailed):
        live_through(device, pool, arena)
    assert device.fault_hits(call) == 1
    device.clear_faults()
    wake(device, arena)
    for segment in device.segments():
        device.free(segment.address)
    live_through(device, pool, arena)
    arena.close()
    assert memory_of(emu) == (0, 0, 0, 0, 0)


def test_closing_with_live_segments_is_refused(device: Device, pool: PoolEntries) -> None:
    device.allocate(pool.id, SIZE)
    with pytest.raises(StateError):
        device.close()
