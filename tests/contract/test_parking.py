"""Parking: the driver's own state of a sleeping process off the device and back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

from hal.core import Policy, SleepManager, State
from hal.core.parking import ProcessParking
from hal.errors import AsleepError, BusyError, StateError, Unsupported
from hal.platform import Platform
from support import MIB, books, fill, hold, pattern


@pytest.fixture
def sleeper(
    process: ProcessParking, manager: Callable[..., SleepManager], platform: Platform
) -> SleepManager:
    """A manager whose process can be parked."""
    del process  # each test has its own
    if not platform.capabilities.park:
        pytest.skip(f"no parking: {platform.capabilities.park.reason}")
    return manager()


def test_a_parked_process_comes_back_with_the_same_bytes(sleeper: SleepManager) -> None:
    weights, cache = fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2)
    for _ in range(2):
        slept = sleeper.sleep(level=1, park=True)
        assert sleeper.state is State.PARKED
        assert slept.park_seconds is not None
        assert slept.parked_residual is not None
        assert slept.parked_residual <= 16 * MIB
        assert slept.parked_host_bytes > 0
        assert "parked in" in str(slept)
        woke = sleeper.wake_up()
        assert woke.unpark_seconds is not None
        assert "unparked in" in str(woke)
        assert sleeper.state is State.AWAKE
        assert torch.equal(weights, pattern(3 * MIB, 1))
        assert not cache.any()
    assert sleeper.sleep().park_seconds is None
    assert sleeper.wake_up().unpark_seconds is None


def test_a_sleeping_manager_parks_later_and_wakes_a_tag_alone(sleeper: SleepManager) -> None:
    weights, cache = fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2)
    sleeper.sleep()
    assert sleeper.sleep(park=True).park_seconds is not None
    assert sleeper.wake_up(["weights"]).unpark_seconds is not None
    assert sleeper.state is State.PARTLY_AWAKE
    assert torch.equal(weights, pattern(3 * MIB, 1))
    sleeper.wake_up()
    assert not cache.any()


def test_a_process_without_tags_parks(sleeper: SleepManager) -> None:
    assert sleeper.sleep(park=True).park_seconds is not None
    assert sleeper.state is State.PARKED
    with pytest.raises(AsleepError, match="everything"):
        sleeper.require_awake()
    sleeper.wake_up()
    assert sleeper.state is State.AWAKE


# ---- refused before anything is touched ----------------------------------------------------------


def test_a_platform_that_cannot_park_says_why(
    process: ProcessParking, manager: Callable[..., SleepManager], platform: Platform
) -> None:
    if platform.capabilities.park:
        pytest.skip("it can")
    sleeper = manager()
    weights, before = fill(sleeper, "weights", 1), books(platform)
    with pytest.raises(Unsupported) as caught:
        sleeper.sleep(park=True)
    assert caught.value.why == platform.capabilities.park.reason
    assert books(platform) == before
    assert sleeper.state is State.AWAKE
    assert process.helper_pid is None
    assert torch.equal(weights, pattern(3 * MIB, 1))
    with pytest.raises(Unsupported, match="parking"):
        platform.process_checkpoint()


def test_a_tag_that_stays_awake_is_no_residual(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    hold(fill(sleeper, "kv_cache", 2))
    before = books(sleeper.platform)
    with pytest.raises(StateError, match=r"would stay awake \(kv_cache\)"):
        sleeper.sleep(policy={"weights": Policy.OFFLOAD}, park=True)
    assert books(sleeper.platform) == before
    assert sleeper.state is State.AWAKE


# ---- the helper ----------------------------------------------------------------------------------


def test_a_helper_that_is_killed_while_parked_is_replaced(
    sleeper: SleepManager, process: ProcessParking
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    first = process.helper_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    sleeper.wake_up()
    assert process.helper_pid not in (None, first)
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_a_helper_that_gives_no_answer_is_replaced(
    sleeper: SleepManager, process: ProcessParking
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    first = process.helper_pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    process._answer_seconds = 0.1
    sleeper.wake_up()
    assert process.helper_pid not in (None, first)
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_helpers_that_never_answer_leave_the_process_parked(
    sleeper: SleepManager, process: ProcessParking, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(park=True)
    checkpoint = process._checkpoint
    assert checkpoint is not None
    process.close()
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "command", lambda: ["/bin/false"])
        with pytest.raises(BusyError, match="3 helper processes were lost"):
            sleeper.wake_up()
    assert sleeper.state is State.PARKED
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))
