"""Backups that outlive a wake: the next sleep copies what has changed and nothing else."""

from __future__ import annotations

import gc
from typing import Any, Protocol

import pytest
import torch

from hal.core import BackupOptions, Policy, SleepManager
from hal.core.kernels.fingerprint import why_not
from hal.errors import BackupCorrupted, HalError, HookError, HostMemoryError
from hal.platform import Platform
from support import MIB, fill, hold, large, pattern

SIZE = 12 * MIB


class Make(Protocol):
    def __call__(self, **options: Any) -> SleepManager: ...


@pytest.fixture(autouse=True)
def _fingerprints(platform: Platform) -> None:
    if reason := why_not(platform, 0):
        pytest.skip(f"{platform.name}: {reason}")


@pytest.fixture
def sleeper(manager: Make, backing: str) -> SleepManager:
    return manager(backup=BackupOptions(backing=backing, retain=True))


def test_what_did_not_change_is_not_copied(sleeper: SleepManager) -> None:
    weights, state = fill(sleeper, "weights", 1, SIZE), fill(sleeper, "runtime", 2, SIZE)
    first = sleeper.sleep(level=1)
    assert (first.unchanged_bytes, first.copied_bytes) == (0, 2 * SIZE)
    for _ in range(3):
        sleeper.wake_up()
        again = sleeper.sleep(level=1)
        assert (again.copied_bytes, again.unchanged_bytes) == (0, 2 * SIZE)
        assert again.total_bytes == first.total_bytes, "the device memory goes all the same"
    sleeper.wake_up()
    assert torch.equal(weights, pattern(SIZE, 1))
    assert torch.equal(state, pattern(SIZE, 2))


def test_one_changed_byte_is_copied_and_comes_back(sleeper: SleepManager) -> None:
    weights, state = fill(sleeper, "weights", 1, SIZE), fill(sleeper, "runtime", 2, SIZE)
    expected = weights.clone()
    sleeper.sleep(level=1)
    for place in (0, SIZE // 2 + 1, SIZE - 1):
        sleeper.wake_up()
        weights[place] ^= 0x10
        expected[place] ^= 0x10
        report = sleeper.sleep(level=1)
        assert 0 < report.copied_bytes <= SIZE
        assert (entry := report.tag("runtime")) is not None
        assert (entry.copied, entry.unchanged) == (0, SIZE)
    sleeper.wake_up()
    assert torch.equal(weights, expected)
    assert torch.equal(state, pattern(SIZE, 2))


def test_a_tensor_that_took_anothers_place_is_copied(sleeper: SleepManager) -> None:
    kept, gone = fill(sleeper, "weights", 1, SIZE), fill(sleeper, "weights", 2, SIZE)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    del gone
    gc.collect()
    taken = fill(sleeper, "weights", 3, SIZE)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert torch.equal(kept, pattern(SIZE, 1))
    assert torch.equal(taken, pattern(SIZE, 3))


def test_backups_are_retained_by_tag(manager: Make) -> None:
    options = BackupOptions(backing="anonymous", retain={"weights"})
    sleeper = manager(backup=options)
    weights, state = fill(sleeper, "weights", 1, SIZE), fill(sleeper, "runtime", 2, SIZE)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert sleeper.backup_bytes == SIZE
    again = sleeper.sleep(level=1)
    assert [(t.tag, t.copied, t.unchanged) for t in again.tags] == [
        ("weights", 0, SIZE),
        ("runtime", SIZE, 0),
    ]
    sleeper.wake_up()
    assert torch.equal(weights, pattern(SIZE, 1))
    assert torch.equal(state, pattern(SIZE, 2))


def test_trimming_between_two_sleeps_costs_a_copy_and_nothing_else(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1, SIZE)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert sleeper.trim_host() >= SIZE
    assert sleeper.backup_bytes == 0
    assert sleeper.sleep(level=1).copied_bytes == SIZE
    sleeper.wake_up()
    assert torch.equal(weights, pattern(SIZE, 1))


def test_a_retained_backup_makes_room_when_host_memory_is_short(manager: Make) -> None:
    size = max(SIZE, large())
    options = BackupOptions(backing="anonymous", retain=True, budget=size + size // 2)
    sleeper = manager(backup=options)
    weights, state = fill(sleeper, "weights", 1, size), fill(sleeper, "runtime", 2, size)
    sleeper.sleep(policy={"weights": Policy.OFFLOAD})
    sleeper.wake_up()
    assert sleeper.backup_bytes == size
    only_state = {"runtime": Policy.OFFLOAD}
    assert sleeper.plan_sleep(policy=only_state).fits
    sleeper.sleep(policy=only_state)
    assert sleeper.backup_bytes == size, "that of the weights made room"
    sleeper.wake_up()
    assert torch.equal(weights, pattern(size, 1))
    assert torch.equal(state, pattern(size, 2))


def test_what_fits_not_even_without_retained_backups_is_refused(manager: Make) -> None:
    sleeper = manager(backup=BackupOptions(backing="anonymous", retain=True, budget=SIZE))
    weights = fill(sleeper, "weights", 1, SIZE)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    more = fill(sleeper, "weights", 2, SIZE)
    assert not sleeper.plan_sleep().fits
    with pytest.raises(HostMemoryError):
        sleeper.sleep(level=1)
    assert not sleeper.is_sleeping
    assert torch.equal(weights, pattern(SIZE, 1))
    assert torch.equal(more, pattern(SIZE, 2))


@pytest.mark.parametrize("call", ["unmap", "release"])
def test_a_failed_sleep_leaves_nothing_that_a_later_one_believes(
    sleeper: SleepManager, call: str
) -> None:
    weights = fill(sleeper, "weights", 1, SIZE)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    weights.copy_(pattern(SIZE, 2))
    sleeper.device.fail(call, nth=2, code=1, times=1)
    try:
        sleeper.sleep(level=1)
    except HalError:
        assert torch.equal(weights, pattern(SIZE, 2))
    finally:
        sleeper.device.clear_faults()
    if sleeper.is_sleeping:
        sleeper.wake_up()
    weights.copy_(pattern(SIZE, 1))  # as at the first sleep, whose backup is gone
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert torch.equal(weights, pattern(SIZE, 1))


def test_a_hook_that_changes_memory_and_then_fails_the_wake_loses_nothing(
    sleeper: SleepManager,
) -> None:
    weights = fill(sleeper, "weights", 1, SIZE)
    failing = True

    def change() -> None:
        if failing:
            weights.copy_(pattern(SIZE, 2))
            raise RuntimeError("not yet")

    sleeper.after_wake(change)
    sleeper.sleep(level=1)
    with pytest.raises(HookError):
        sleeper.wake_up()
    failing = False
    sleeper.wake_up()
    assert torch.equal(weights, pattern(SIZE, 2)), "what the hook wrote was there at its failure"
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert torch.equal(weights, pattern(SIZE, 2))


def test_a_discarded_tag_holds_no_backup_afterwards(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1, SIZE))
    sleeper.sleep(level=1)
    sleeper.wake_up()
    sleeper.sleep(level=2)
    assert sleeper.backup_bytes == 0


def test_a_damaged_backup_is_found_on_the_way_back(manager: Make) -> None:
    sleeper = manager(backup=BackupOptions(backing="anonymous", retain=True, verify=True))
    weights = fill(sleeper, "weights", 1, SIZE)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    sleeper.sleep(level=1)
    (segment, *_) = [s for s in sleeper.device.segments() if s.backup_bytes]
    sleeper.device.flip_backup_bit(segment.address, 12345)
    with pytest.raises(BackupCorrupted):
        sleeper.wake_up()
    sleeper.device.flip_backup_bit(segment.address, 12345)
    sleeper.wake_up()
    assert torch.equal(weights, pattern(SIZE, 1))
