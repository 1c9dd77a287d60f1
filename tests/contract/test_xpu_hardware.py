"""What only an Intel GPU can show; skipped elsewhere with the reason that detection gives."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from hal.core import BackupOptions, SleepManager
from hal.core.probe import placement_report
from hal.cpu.telemetry import resident_bytes
from hal.environment import collect
from hal.pools import storage_address
from support import MIB

pytestmark = pytest.mark.xpu
GIB = 1 << 30


@pytest.fixture
def sleeper() -> Iterator[SleepManager]:
    from hal.xpu.platform import XpuPlatform

    with torch.device("xpu"):
        yield SleepManager(XpuPlatform(), backup=BackupOptions(backing="anonymous"))


def read(sleeper: SleepManager, tensor: torch.Tensor) -> bytes:
    """A tensor's bytes by the driver and not by torch."""
    host = (ctypes.c_uint8 * tensor.nbytes)()
    sleeper.device.synchronize()
    sleeper.device.copy_to_host(ctypes.addressof(host), storage_address(tensor), tensor.nbytes)
    sleeper.device.synchronize()
    return bytes(host)


def test_r105_kernels_and_the_driver_see_the_same_memory(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"):
        tensor = torch.arange(MIB, dtype=torch.int32)
    expected = bytes(torch.arange(MIB, dtype=torch.int32, device="cpu").numpy().tobytes())
    assert read(sleeper, tensor) == expected
    for _ in range(3):
        sleeper.sleep(level=1)
        sleeper.wake_up()
        assert read(sleeper, tensor) == expected
        assert int((tensor.to(torch.int64)).sum().item()) == MIB * (MIB - 1) // 2


def test_kv_init_puts_every_tensor_where_it_belongs() -> None:
    report = placement_report(collect("xpu"))
    assert report.placements
    assert report.problems == ()


def test_r72_device_memory_has_no_mirror_on_the_host(sleeper: SleepManager) -> None:
    before, _, _ = resident_bytes()
    with sleeper.pool("kv_cache"):
        cache = torch.ones(4 * GIB, dtype=torch.uint8)
    torch.xpu.synchronize()
    after, _, _ = resident_bytes()
    assert cache.any()
    assert before is not None
    assert after is not None
    assert after - before < GIB, "the runtime keeps device memory in host memory too"


def test_r90_r91_free_memory_moves_or_is_not_believed(sleeper: SleepManager) -> None:
    assert sleeper.capabilities.virtual_memory
    before = sleeper.platform.get_memory_info()
    with sleeper.pool("weights"):
        weights = torch.ones(GIB, dtype=torch.uint8)
    torch.xpu.synchronize()
    after = sleeper.platform.get_memory_info()
    assert weights.any()
    moved = before.free_since(after)
    assert moved is None or moved > GIB // 2, (before, after)
    assert after.exact or after.reason


def test_r95_sysman_answers_after_the_runtime_has_started(sleeper: SleepManager) -> None:
    torch.xpu.init()
    info = sleeper.platform.get_memory_info()
    assert info.total
    assert info.source == "sysman" or "sysman" in info.reason
