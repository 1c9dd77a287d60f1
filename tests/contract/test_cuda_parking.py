"""Parking over the emulated libcuda: no driver call while parked, and all failures on both ways."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from emulator.emucuda import EmulatedProcess
from emulator.platforms import EmulatedCudaPlatform
from hal.core import BackupOptions, SleepManager, State, parking
from hal.core.parking import ProcessParking
from hal.errors import (
    AsleepError,
    BusyError,
    DriverError,
    GroupError,
    HostMemoryError,
    OutOfDeviceMemory,
    ProcessLost,
    StateError,
    Unsupported,
)
from support import MIB, books, fill, hold, pattern

Make = Callable[..., SleepManager]
NOT_READY, NOT_SUPPORTED, OUT_OF_MEMORY = 600, 801, 2
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)


@pytest.fixture
def platform(process: ProcessParking) -> EmulatedCudaPlatform:
    del process  # before a device is opened
    return EmulatedCudaPlatform()


@pytest.fixture
def emulated(sleeper: SleepManager, tmp_path: Path) -> EmulatedProcess:
    """This process as the emulated driver of another one sees it."""
    del sleeper  # its device is open
    return EmulatedProcess(tmp_path, os.getpid())


def set_state(folder: Path, state: int) -> None:
    (folder / str(os.getpid())).write_bytes(struct.pack("ii", state, 0))


# ---- there and back ------------------------------------------------------------------------------


def test_nothing_calls_the_driver_while_parked(
    sleeper: SleepManager, emulated: EmulatedProcess
) -> None:
    hold(fill(sleeper, "weights", 1))
    sleeper.sleep(park=True)
    assert emulated.state == CHECKPOINTED
    with pytest.raises(AsleepError, match=r"'weights' .*parked"):
        sleeper.require_awake()
    second = sleeper.sleep(level=2)
    assert second.skipped == 1
    assert second.park_seconds is not None
    assert sleeper.wake_up([]).skipped == 1
    assert sleeper.is_sleeping
    assert sleeper.sleeping_tags == {"weights"}
    assert sleeper.backup_bytes > 0
    assert sleeper.held_bytes > 0
    assert emulated.refused_calls == 0
    sleeper.wake_up()
    assert emulated.state == RUNNING


@pytest.mark.parametrize(
    "call",
    [
        lambda sleeper: sleeper.pool("weights").__enter__(),
        lambda sleeper: sleeper.pool("new").__enter__(),
        lambda sleeper: sleeper.kv_init(),
        lambda sleeper: sleeper.require_awake(),
        lambda sleeper: sleeper.plan_sleep(),
        lambda sleeper: sleeper.plan_wake_up(),
        lambda sleeper: sleeper.discard("weights"),
        lambda sleeper: sleeper.live_blocks("weights"),
        lambda sleeper: sleeper.prepare(MIB),
        lambda sleeper: sleeper.trim_host(),
        lambda sleeper: sleeper.close(),
    ],
    ids=("pool new kv require plan_sleep plan_wake discard blocks prepare trim close").split(),
)
def test_calls_while_parked_are_asleep_errors(
    sleeper: SleepManager, emulated: EmulatedProcess, call: Callable[[SleepManager], object]
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    with pytest.raises(AsleepError, match="parked"):
        call(sleeper)
    assert emulated.refused_calls == 0
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_another_manager_of_the_process_is_parked_too(
    sleeper: SleepManager, manager: Make, emulated: EmulatedProcess
) -> None:
    other = manager()
    tensor = fill(other, "weights", 2)
    hold(fill(sleeper, "weights", 1))
    with pytest.raises(StateError, match="of other managers"):
        sleeper.sleep(park=True)
    assert sleeper.state is State.AWAKE
    other.sleep()
    sleeper.sleep(park=True)
    assert other.state is State.PARKED
    with pytest.raises(AsleepError, match="parked"), other.pool("runtime"):
        pass
    other.wake_up()
    assert emulated.state == RUNNING
    assert sleeper.state is State.ASLEEP
    assert torch.equal(tensor, pattern(3 * MIB, 2))


# ---- refused before anything is touched ----------------------------------------------------------


def test_what_the_driver_is_known_to_refuse_is_refused_before(
    sleeper: SleepManager, emulated: EmulatedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(fill(sleeper, "weights", 1))
    monkeypatch.setattr(
        "hal.cuda.checkpoint.CudaCheckpoint.why_not_now", lambda self: "2 storages are shared"
    )
    with pytest.raises(Unsupported, match="2 storages are shared"):
        sleeper.sleep(park=True)
    assert sleeper.state is State.AWAKE
    assert emulated.state == RUNNING


def test_parking_needs_free_memory_without_the_driver(
    sleeper: SleepManager, emulated: EmulatedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hal.cuda.checkpoint import CudaCheckpoint

    del emulated
    hold(fill(sleeper, "weights", 1))
    checkpoint = CudaCheckpoint(sleeper.platform.open_devices())
    monkeypatch.setattr(sleeper.platform, "process_checkpoint", lambda: checkpoint)
    with pytest.raises(Unsupported, match="free memory of device 0 is not known"):
        sleeper.sleep(park=True)
    assert sleeper.state is State.AWAKE


def test_the_drivers_copies_count_in_the_host_budget(
    manager: Make, sleeper: SleepManager, emulated: EmulatedProcess
) -> None:
    small = manager(backup=BackupOptions(backing="anonymous", budget=16 * MIB))
    weights, before = fill(small, "weights", 1), books(sleeper.platform)
    with pytest.raises(HostMemoryError, match="driver's copies of a parked process") as caught:
        small.sleep(park=True)
    assert caught.value.needed is not None
    assert caught.value.needed > 64 * MIB
    assert caught.value.available == 16 * MIB
    assert books(sleeper.platform) == before
    assert small.state is State.AWAKE
    assert emulated.state == RUNNING
    small.sleep()
    small.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))


# ---- failures on the way out ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (f"cuCheckpointProcessLock:1:{NOT_READY}", BusyError),
        (f"cuCheckpointProcessLock:1:{NOT_SUPPORTED}", DriverError),
        (f"cuCheckpointProcessCheckpoint:1:{NOT_SUPPORTED}", DriverError),
        ("cuInit:1:999", Unsupported),
    ],
)
def test_a_process_that_cannot_be_parked_is_asleep_and_runs(
    sleeper: SleepManager,
    emulated: EmulatedProcess,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[Exception],
) -> None:
    weights = fill(sleeper, "weights", 1)
    monkeypatch.setenv("EMUCUDA_FAIL", fault)  # of the helper: it reads it when it starts
    with pytest.raises(error) as caught:
        sleeper.sleep(park=True)
    assert parking.NOT_PARKED in caught.value.__notes__
    assert sleeper.state is State.ASLEEP
    assert emulated.state == RUNNING
    monkeypatch.delenv("EMUCUDA_FAIL")
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))
    assert emulated.refused_calls == 0


def test_a_failed_park_can_be_tried_again(
    sleeper: SleepManager, emulated: EmulatedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = fill(sleeper, "weights", 1)
    monkeypatch.setenv("EMUCUDA_FAIL", f"cuCheckpointProcessLock:1:{NOT_READY}")
    with pytest.raises(BusyError, match="other threads"):
        sleeper.sleep(park=True)
    sleeper.sleep(park=True)
    assert emulated.state == CHECKPOINTED
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))


class Ranks:
    """A group in which another rank fails."""

    def __init__(self) -> None:
        self.failed: dict[int, str] = {}

    def failures(self, transition: str, own: BaseException | None) -> Mapping[int, str]:
        del transition
        return self.failed if own is None else {0: str(own)}


def test_a_group_parks_on_all_ranks_or_on_none(
    manager: Make,
    sleeper: SleepManager,
    emulated: EmulatedProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del sleeper
    ranks = Ranks()
    one = manager(group=ranks)
    weights = fill(one, "weights", 1)
    ranks.failed = {1: "BusyError"}
    with pytest.raises(GroupError):
        one.sleep(park=True)
    assert one.state is State.AWAKE
    assert emulated.state == RUNNING
    ranks.failed = {}
    one.sleep(park=True)
    ranks.failed = {1: "OutOfDeviceMemory"}
    with pytest.raises(GroupError):
        one.wake_up()
    assert one.state is State.PARKED
    ranks.failed = {}
    one.wake_up()
    parking.PROCESS.close()
    monkeypatch.setenv("EMUCUDA_FAIL", f"cuCheckpointProcessCheckpoint:1:{NOT_SUPPORTED}")
    with pytest.raises(DriverError):
        one.sleep(park=True)
    assert one.state is State.AWAKE, "as the other ranks are"
    assert torch.equal(weights, pattern(3 * MIB, 1))


# ---- failures on the way back --------------------------------------------------------------------


def test_a_restore_whose_helper_died_ends_in_an_unlock(
    sleeper: SleepManager, emulated: EmulatedProcess, process: ProcessParking, tmp_path: Path
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    process.close()
    set_state(tmp_path, LOCKED)  # the driver restores to the end, whoever asked it to
    sleeper.wake_up()
    assert emulated.state == RUNNING
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_without_device_memory_no_restore_is_tried(
    sleeper: SleepManager, emulated: EmulatedProcess, platform: EmulatedCudaPlatform
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    platform.taken = platform.emulated_total - 100 * MIB  # enough for the process, not for a margin
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory) as caught:
            sleeper.wake_up()
        assert caught.value.needed is not None
        assert caught.value.needed > 256 * MIB
        assert sleeper.state is State.PARKED
        assert emulated.state == CHECKPOINTED

    def give_back() -> None:
        time.sleep(0.1)
        platform.taken = 0

    other = threading.Thread(target=give_back)
    other.start()
    sleeper.wake_up(wait_for_memory=60)
    other.join()
    assert torch.equal(weights, pattern(3 * MIB, 1))
    assert emulated.refused_calls == 0


def test_a_process_that_ends_parked_waits_for_the_room_to_come_back(
    sleeper: SleepManager, emulated: EmulatedProcess, platform: EmulatedCudaPlatform
) -> None:
    fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    platform.taken = platform.emulated_total - 100 * MIB
    other = threading.Timer(0.1, lambda: setattr(platform, "taken", 0))
    other.start()
    parking._leave()
    other.join()
    assert emulated.state == RUNNING
    sleeper.wake_up()


def test_a_process_that_ends_without_that_room_says_so(
    sleeper: SleepManager,
    emulated: EmulatedProcess,
    platform: EmulatedCudaPlatform,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    monkeypatch.setattr(parking, "EXIT_SECONDS", 0.05)
    platform.taken = platform.emulated_total - 100 * MIB
    with pytest.warns(UserWarning, match="the process ends parked"):
        parking._leave()
    assert emulated.state == CHECKPOINTED
    platform.taken = 0
    sleeper.wake_up()


def test_a_restore_that_fails_is_final(
    sleeper: SleepManager,
    emulated: EmulatedProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    weights = fill(sleeper, "weights", 1)
    monkeypatch.setenv("EMUCUDA_FAIL", f"cuCheckpointProcessRestore:1:{OUT_OF_MEMORY}")
    sleeper.sleep(park=True)
    for _ in range(2):
        with pytest.raises(ProcessLost, match="cannot restore"):
            sleeper.wake_up()
        assert sleeper.state is State.PARKED
        assert emulated.state == FAILED
    assert emulated.refused_calls == 0
    set_state(tmp_path, RUNNING)  # so that the test can clean up
    monkeypatch.setattr(parking, "PROCESS", ProcessParking())
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_a_wake_that_fails_behind_the_restore_stays_asleep(
    sleeper: SleepManager, emulated: EmulatedProcess
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    sleeper.device.fail("create", 1, OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory) as caught:
        sleeper.wake_up()
    assert parking.NOT_PARKED in caught.value.__notes__
    assert sleeper.state is State.ASLEEP
    assert emulated.state == RUNNING
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))
