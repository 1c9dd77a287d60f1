"""A graph of several decode steps, recorded on the host, holds addresses that outlive a sleep."""

from __future__ import annotations

import pytest
import torch

from decode_steps import DecodeSteps
from hal.core import BackupOptions, SleepManager
from hal.core.verify.graphs import GraphRunner
from recorded_graphs import RecordedGraph, RecordingPlatform, recorded_graphs

__all__ = ["recorded_graphs"]


def test_a_graph_of_several_steps_replays_after_a_wake(
    recorded_graphs: type[RecordedGraph],
) -> None:
    sleeper = SleepManager(RecordingPlatform(), backup=BackupOptions(backing="anonymous"))
    steps = DecodeSteps(sleeper, "cpu")
    run = GraphRunner(lambda size: steps(), (1,), sleeper, torch.device("cpu"))
    steps.begin()
    expected = run(1).clone()
    addresses = steps.addresses()
    steps.begin()
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert steps.addresses() == addresses
    steps.fill_cache()
    assert torch.equal(run(1), expected)
    assert recorded_graphs.replays == 2


def test_a_table_that_is_built_again_is_not_what_the_graph_reads(
    recorded_graphs: type[RecordedGraph],
) -> None:
    """Why nothing may be built again: the graph goes on with the old table."""
    sleeper = SleepManager(RecordingPlatform(), backup=BackupOptions(backing="anonymous"))
    steps = DecodeSteps(sleeper, "cpu")
    run = GraphRunner(lambda size: steps(), (1,), sleeper, torch.device("cpu"))
    steps.begin()
    before = run(1).clone()
    steps.tables = steps.tables.flip(0).contiguous()
    steps.begin()
    assert torch.equal(run(1), before)
    steps.begin()
    assert not torch.equal(steps(), before)


@pytest.mark.parametrize("lost", ["tables", "lengths"])
def test_the_comparison_notices_lost_state(recorded_graphs: type[RecordedGraph], lost: str) -> None:
    sleeper = SleepManager(RecordingPlatform(), backup=BackupOptions(backing="anonymous"))
    steps = DecodeSteps(sleeper, "cpu")
    run = GraphRunner(lambda size: steps(), (1,), sleeper, torch.device("cpu"))
    steps.begin()
    expected = run(1).clone()
    steps.begin()
    steps.state()[lost].zero_()
    assert not torch.equal(run(1), expected)
