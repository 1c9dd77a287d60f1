"""Every primitive of every driver fails once in the life of a segment, and nothing is lost."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import pytest

from hal.errors import HalError
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
)
from hal.platform import Platform
from support import MIB, Target, pattern

SIZE = 6 * MIB
POINTS = (
    "granularity memory_info reserve unreserve create release map access unmap copy_to_host "
    "copy_to_device fill synchronize host_register host_unregister vacate"
).split()


class Life:
    """One pool and one arena on a device, and everything that a segment can go through."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool: PoolEntries = device.create_pool("fault-points")
        backing = Backing.PINNED if Fact.PIN_HOST in device.facts.yes else Backing.ANONYMOUS
        self.arena = Arena(device, backing)

    def live(self) -> None:
        address = self.device.allocate(self.pool.id, SIZE)
        self.device.memory()
        self.write(address)
        for _ in range(2):
            self.transition(Action.OFFLOAD)
            self.check(address)
        self.transition(Action.DISCARD)
        self.device.free(address)
        self.arena.trim()

    def write(self, address: int) -> None:
        source = self.contents()
        self.device.copy_to_device(address, ctypes.addressof(source), SIZE)
        self.device.synchronize()

    def check(self, address: int) -> None:
        target = ctypes.create_string_buffer(SIZE)
        self.device.copy_to_host(ctypes.addressof(target), address, SIZE)
        self.device.synchronize()
        assert target.raw == self.contents().raw

    @staticmethod
    def contents() -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(bytes(pattern(SIZE, 1).cpu().numpy()), SIZE)

    def transition(self, action: Action) -> None:
        segments = self.device.segments(self.pool.id)
        self.device.sleep(self.arena, [Order(segment, action) for segment in segments])
        self.device.wake(self.arena, self.device.segments(self.pool.id), fill=0x33)

    def recover(self) -> None:
        """Whatever the fault has left behind wakes and is freed."""
        segments = self.device.segments(self.pool.id)
        self.device.wake(self.arena, [s for s in segments if s.state is not SegmentState.MAPPED])
        for segment in self.device.segments(self.pool.id):
            self.device.free(segment.address)

    def close(self) -> None:
        self.device.clear_faults()
        self.arena.close()
        self.device.destroy_pool(self.pool.id)


@pytest.fixture
def life(platform: Platform) -> Iterator[Life]:
    made = Life(platform.device())
    yield made
    made.close()


def why_unsupported(device: Device, call: str) -> str:
    """Why this driver is never asked for a primitive; "" when it is."""
    if call in ("host_register", "host_unregister"):
        return device.facts.why_not.get(Fact.PIN_HOST, "")
    if call == "vacate" and device.driver != "rocm":
        return "release alone gives memory back"
    return ""


def balance(device: Device) -> dict[str, int]:
    names = ("segments", "mapped_bytes", "handles", "mappings", "reservations")
    counters = device.counters().as_dict()
    return {name: counters[name] for name in names}


@pytest.mark.parametrize("call", POINTS)
def test_every_fault_point_is_hit_and_survived(
    life: Life, target: Target, call: str, record_property: Callable[[str, object], None]
) -> None:
    device = life.device
    if reason := why_unsupported(device, call):
        pytest.skip(f"unsupported: {reason}")
    before = balance(device)
    device.fail(call, 1, target.other_error)
    with contextlib.suppress(HalError, TransferFailed):
        life.live()
    hits = device.fault_hits(call)
    record_property("fault point", call)
    assert hits == 1
    device.clear_faults()
    life.recover()
    assert balance(device) == before
    life.live()
    assert balance(device) == before
