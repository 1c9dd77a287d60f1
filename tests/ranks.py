"""What each rank does in the group tests: a module, so that spawned processes can import it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hal.core import BackupOptions, SleepManager, State
from hal.core.group import RankGroup
from hal.cpu.platform import CpuPlatform
from hal.errors import AsleepError, BusyError, DriverError, GroupError
from support import MIB, pattern

EINVAL = 22


def second_pause(rank: int, sleeper: SleepManager) -> None:
    sleeper.sleep(level=1)
    again = sleeper.sleep(level=1)
    assert again.total_bytes == 0
    with pytest.raises(AsleepError):
        sleeper.require_awake("weights")
    assert sleeper.state is State.ASLEEP


def delayed(rank: int, sleeper: SleepManager) -> None:
    time.sleep(0.5 * rank)
    started = time.monotonic()
    sleeper.sleep(level=1)
    if rank == 0:
        assert time.monotonic() - started > 0.3, "the early rank did not wait for the late one"


def one_fails(rank: int, sleeper: SleepManager) -> None:
    device = sleeper.platform.device()
    for sleeping in (False, True):
        if rank == 1:
            device.fail("map" if sleeping else "unmap", 1, EINVAL)
        transition = sleeper.wake_up if sleeping else sleeper.sleep
        with pytest.raises(DriverError if rank == 1 else GroupError, match="map"):
            transition()
        assert sleeper.state is (State.ASLEEP if sleeping else State.AWAKE)
        device.clear_faults()
        sleeper.sleep(level=1)


def late(rank: int, sleeper: SleepManager) -> None:
    sleeper._group = RankGroup(timeout=1.0)
    if rank == 1:
        time.sleep(2.5)
    else:
        with pytest.raises(BusyError, match="Ranks 1"):
            sleeper.sleep(level=1)
        assert sleeper.state is State.ASLEEP
    sleeper._group = None


SCENARIOS: tuple[Callable[[int, SleepManager], None], ...] = (
    second_pause,
    delayed,
    one_fails,
    late,  # the last: gloo keeps no order after a barrier that failed
)


def main(rank: int, folder: str) -> None:
    """Run every scenario and write how each ended."""
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    outcomes = {scenario.__name__: _outcome(scenario, rank) for scenario in SCENARIOS}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(outcomes))


def _outcome(scenario: Callable[[int, SleepManager], None], rank: int) -> str:
    backup = BackupOptions(backing="anonymous")
    sleeper = SleepManager(CpuPlatform(), backup=backup, group=RankGroup(timeout=60))
    source_weights = pattern(MIB, rank)
    with sleeper.pool("weights"):
        weights = source_weights.clone()
    try:
        scenario(rank, sleeper)
        sleeper.wake_up()
        assert torch.equal(weights, pattern(MIB, rank))
    except BaseException:  # noqa: BLE001 - reported to the test, which runs in another process
        return traceback.format_exc()
    return "done"
