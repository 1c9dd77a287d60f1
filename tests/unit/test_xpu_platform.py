"""The XPU platform over a fake `torch.xpu`, the real Level Zero loader and an emulated GPU."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import support
from emulator import emuze
from emulator.fake_torch_xpu import AsHost, FakeTorchXpu, NoMemoryError
from emulator.platforms import emulated_xpu
from hal.core import BackupOptions, SleepManager
from hal.core.probe import OUTSIDE, probe_placements
from hal.errors import HalError, OutOfDeviceMemory, Unsupported
from hal.platform import PoolNesting
from hal.pools import storage_address
from hal.xpu import own_context, platform, telemetry, torch_memory
from hal.xpu.platform import XpuPlatform
from support import MIB, pattern

if TYPE_CHECKING:
    from emulator.emuze import EmulatedXpu

pytestmark = support.needs_level_zero()


@pytest.fixture
def emu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedXpu]:
    emulator = emulated_xpu()
    emulator.reset()
    emulator.set(total=emulator.used_bytes() + (1 << 30))
    monkeypatch.setenv("HAL_LIBSYCL", str(emuze.build_sycl(8)))
    monkeypatch.setenv("ZES_ENABLE_SYSMAN", "1")  # the way that every loader has
    telemetry.sysman.renew()
    monkeypatch.setattr(telemetry, "_verdicts", {})
    yield emulator
    gc.collect()
    emulator.reset()


@pytest.fixture
def fake(emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorchXpu]:
    made = FakeTorchXpu(emu)
    made.install(monkeypatch)
    for cached in (platform._torch, platform._scopes, torch_memory._allocator):
        cached.cache_clear()
    with AsHost():
        yield made


@pytest.fixture
def xpu(fake: FakeTorchXpu) -> XpuPlatform:
    return XpuPlatform()


@pytest.fixture
def sleeper(xpu: XpuPlatform) -> SleepManager:
    return SleepManager(xpu, backup=BackupOptions(backing="anonymous"))


def test_capabilities_are_what_was_probed(xpu: XpuPlatform, fake: FakeTorchXpu) -> None:
    found = xpu.capabilities
    assert (found.name, found.device_type) == ("xpu", "xpu")
    assert found.device_name == "Emulated Intel GPU 0"
    assert (found.pool_nesting, found.nesting_found) == (PoolNesting.FIFO, "probed")
    assert found.flatten
    assert found.virtual_memory
    assert found.pinned_host
    assert not found.free_is_truthful
    assert not found.graph_pools


def test_a_torch_that_nests_the_other_way_is_believed(
    emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cached in (platform._torch, platform._scopes, torch_memory._allocator):
        cached.cache_clear()
    FakeTorchXpu(emu, PoolNesting.LIFO).install(monkeypatch)
    assert XpuPlatform().capabilities.pool_nesting is PoolNesting.LIFO


def test_memory_sleeps_and_wakes_at_its_address_in_torchs_context(
    sleeper: SleepManager, emu: EmulatedXpu, fake: FakeTorchXpu
) -> None:
    source = pattern(5 * MIB, 1)
    with sleeper.pool("weights"):
        weights = source.clone()
    address = weights.data_ptr()
    assert emu.kernel_write(address, int(source[0]), 1) == 0, "torch's kernels reach it"
    fake.synchronized.clear()
    report = sleeper.sleep(level=1)
    assert fake.synchronized == [0], "torch's own streams were waited for"
    assert report.copied_bytes >= weights.nbytes
    sleeper.wake_up()
    assert weights.data_ptr() == address
    assert torch.equal(weights, source)


def test_hal_probe_shows_where_tensors_land(xpu: XpuPlatform) -> None:
    """The hardware's finding: inside nested scopes both tensors come from the runtime pool."""
    found = {(p.way, p.tensor): p for p in probe_placements(xpu)}
    nested = found["nested", "kv"]
    assert (nested.expected, nested.pool, nested.tag) == ("kv_cache", "runtime", "runtime")
    assert str(nested).endswith("segment tagged runtime: NOT as expected")
    assert found["nested", "rt"].is_right
    assert found["kv_init (fallback)", "kv"].is_right
    assert found["kv_init (fallback)", "rt"].expected == OUTSIDE
    assert found["kv_init (fallback)", "rt"].is_right
    assert found["kv_init (flatten)", "kv"].is_right
    assert found["kv_init (flatten)", "rt"].tag == "runtime"
    assert len(found) == 6


# -- contexts


@pytest.fixture
def no_torch_context(monkeypatch: pytest.MonkeyPatch, fake: FakeTorchXpu) -> None:
    monkeypatch.setenv("HAL_LIBSYCL", str(emuze.build_sycl(10)))


@pytest.mark.usefixtures("no_torch_context")
def test_an_untested_libsycl_takes_an_own_context_only_after_a_trial(
    xpu: XpuPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(platform, "why_not_reached", lambda index: asked.append(index) or "")
    assert xpu.capabilities.virtual_memory
    assert asked == [0]


@pytest.mark.usefixtures("no_torch_context")
def test_without_proof_virtual_memory_is_off_with_the_reason(
    xpu: XpuPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "why_not_reached", lambda _: "the trial failed (device lost)")
    flag = xpu.capabilities.virtual_memory
    assert not flag
    assert "libsycl.so.10 is not one of the tested majors (8, 9)" in flag.reason
    assert "the trial failed (device lost)" in flag.reason
    assert xpu.capabilities.nesting_found == "declared"
    with pytest.raises(Unsupported, match="tested majors"):
        xpu.create_pool("weights")
    with pytest.raises(Unsupported, match="tested majors"):
        SleepManager(xpu)


@pytest.mark.usefixtures("no_torch_context")
def test_the_trial_lets_torch_write_and_read(
    emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host tensors stand in for torch's here: the trial's own steps are what runs."""
    assert own_context.try_it(0)
    monkeypatch.setattr(torch_memory.XpuDevice, "fill", lambda *_, **__: None)
    assert not own_context.try_it(0), "what the driver wrote did not arrive"


def test_the_trial_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = own_context.why_not_reached(0)
    assert reason.startswith("the trial failed ("), "there is no torch for XPU here"
    ran: list[Any] = []

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command)
        return SimpleNamespace(returncode=0, stdout=f"{own_context.REACHED}\n", stderr="")

    monkeypatch.setattr(own_context.subprocess, "run", run)
    assert own_context.why_not_reached(3) == ""
    assert ran == [[sys.executable, "-m", "hal.xpu.own_context", "3"]]


def test_r103_without_virtual_memory_the_platform_says_so_and_still_answers(
    emu: EmulatedXpu, xpu: XpuPlatform
) -> None:
    emu.fail("zeVirtualMemReserve", times=emuze.FOR_EVER)
    flag = xpu.capabilities.virtual_memory
    assert flag.reason.startswith("zeVirtualMemReserve failed with ZE_RESULT_ERROR_UNSUPPORTED")
    assert not xpu.capabilities.flatten
    with pytest.raises(Unsupported, match="zeVirtualMemReserve failed"):
        xpu.create_pool("weights")
    assert xpu.get_memory_info().total == xpu.device().memory()[1]


# -- what XPU cannot do


def test_r105_what_xpu_cannot_do_is_refused_with_a_reason(
    xpu: XpuPlatform, sleeper: SleepManager
) -> None:
    with pytest.raises(Unsupported, match="XPU graphs"), sleeper.graph_pool():
        pass
    with pytest.raises(Unsupported, match="XPU graphs"), xpu.create_pool("graphs").capture():
        pass
    refused = {name: flag for name, flag in xpu.capabilities.flags().items() if not flag}
    assert refused.keys() >= {"graph_pools", "park", "rdma", "scrubs_discarded"}
    assert all(flag.reason for flag in refused.values())


@pytest.mark.parametrize("stores_null", [False, True], ids=["raises", "stores NULL"])
def test_a_failed_allocation_is_a_typed_error_before_a_tensor_carries_it(
    emu: EmulatedXpu,
    fake: FakeTorchXpu,
    monkeypatch: pytest.MonkeyPatch,
    stores_null: bool,
) -> None:
    fake.stores_null = stores_null
    monkeypatch.setattr(torch_memory._NullGuard, "device_type", "meta" if stores_null else "xpu")
    xpu = XpuPlatform()
    sleeper = SleepManager(xpu, backup=BackupOptions(backing="anonymous"))
    assert xpu.create_pool("probe")._guarded is stores_null, "the build was probed"
    for call in (torch.empty, torch.zeros, torch.ones):
        xpu.device().fail("create", 1, emuze.OUT_OF_DEVICE_MEMORY)
        with pytest.raises(OutOfDeviceMemory) as caught, sleeper.pool("weights"):
            call(7 * MIB, dtype=torch.uint8)
        assert caught.value.tag == "weights"
        assert caught.value.needed >= 7 * MIB
    xpu.device().clear_faults()
    with sleeper.pool("weights"):
        tensor = torch.ones(7 * MIB, dtype=torch.uint8)
        assert torch.empty(0).numel() == 0, "a tensor without bytes needs no address"
    assert storage_address(tensor)


def test_a_build_that_finds_the_missing_block_by_an_assertion(xpu: XpuPlatform) -> None:
    pool = xpu.create_pool("weights")
    xpu.device().fail("create", 1, emuze.OUT_OF_DEVICE_MEMORY)

    def allocate() -> None:
        with contextlib.suppress(NoMemoryError):
            pool.torch_pool.storage(MIB)
        raise RuntimeError("INTERNAL ASSERT FAILED")

    with pytest.raises(OutOfDeviceMemory) as caught, pool.use():
        allocate()
    assert isinstance(caught.value.__cause__, RuntimeError)
    for text in ("of the engine's own", "INTERNAL ASSERT of another kind"):
        with pytest.raises(RuntimeError, match=text), pool.use():
            raise RuntimeError(text)


def test_expandable_segments_are_off_inside_and_the_whole_setting_is_restored(
    xpu: XpuPlatform, fake: FakeTorchXpu
) -> None:
    fake.settings = "garbage_collection_threshold:0.8,expandable_segments:True"
    with xpu.create_pool("weights").use():
        assert fake.settings == "garbage_collection_threshold:0.8,expandable_segments:False"
        kept = torch.ones(10)
    assert fake.settings == "garbage_collection_threshold:0.8,expandable_segments:True"
    assert kept.sum() == 10
    fake.applied.clear()
    fake.settings = ""
    with xpu.create_pool("weights").use():
        pass
    assert fake.applied == [], "a process without them is left alone"


def test_a_pool_is_made_on_its_own_device(
    emu: EmulatedXpu, fake: FakeTorchXpu, xpu: XpuPlatform
) -> None:
    emu.set(cards=2)
    fake.count = 2
    pool = xpu.create_pool("weights", device=1)
    with pool.use():
        tensor = torch.ones(10)
    assert fake.current_device == 0
    assert pool.holds(storage_address(tensor))
    assert not xpu.create_pool("weights", device=0).holds(storage_address(tensor))
    del tensor
    pool.close()
    assert emu.used_bytes(1) == 0


def test_a_failing_query_does_not_hide_the_shortage(xpu: XpuPlatform) -> None:
    device = xpu.device()
    pool = xpu.create_pool("weights")
    device.fail("create", 1, emuze.OUT_OF_DEVICE_MEMORY)
    device.fail("memory_info", 1, emuze.NOT_READY, times=-1)
    with pytest.raises(OutOfDeviceMemory), pool.use():
        torch.empty(7 * MIB, dtype=torch.uint8)
    device.clear_faults()
    assert device.take_pool_error(pool.id) is None


def test_torchs_own_memory_is_told_apart(
    sleeper: SleepManager, xpu: XpuPlatform, fake: FakeTorchXpu
) -> None:
    with sleeper.pool("weights"):
        weights = torch.ones(3 * MIB, dtype=torch.uint8)
    assert weights.any()
    usage = xpu.torch_usage()
    assert (usage.allocated, usage.cached) == (0, 0), "what is in pools is not outside them"


def test_nothing_is_asked_of_torch_before_it_is_started(
    fake: FakeTorchXpu, emu: EmulatedXpu
) -> None:
    platform = XpuPlatform()
    assert platform.device_count() == 1
    assert platform.get_memory_info().total
    assert not fake.initialized
    with pytest.raises(HalError, match="there is no device 1"):
        platform.device(1)
