"""The workspace in the `workspace` tag: over a sleep on every platform."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hal.core import Policy, SleepManager
from hal.core.workspace import TensorSpec, WorkspaceManager
from hal.errors import AsleepError, HookError, OutOfDeviceMemory, StateError, WorkspaceLocked
from support import MIB, Target, books


def spec(count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec((count,), dtype)


@pytest.fixture
def workspace(sleeper: SleepManager) -> WorkspaceManager:
    return WorkspaceManager.of(sleeper, num_ubatches=2)


def test_scratch_is_discarded_and_comes_back_at_the_same_addresses(
    sleeper: SleepManager, workspace: WorkspaceManager
) -> None:
    workspace.reserve("kernel", spec(MIB))
    workspace.lock()
    [before] = workspace.get_simultaneous(spec(MIB))
    address = before.data_ptr()
    assert sleeper.tag_of(before) == "workspace"
    report = sleeper.sleep(level=1)
    assert report.tag("workspace").policy is Policy.DISCARD
    assert report.tag("workspace").copied == 0
    assert report.tag("workspace").bytes >= 8 * MIB, "both slots"
    with pytest.raises(AsleepError):
        workspace.get_simultaneous(spec(4))
    sleeper.wake_up()
    [after] = workspace.get_simultaneous(spec(MIB))
    assert after.data_ptr() == address
    after.fill_(3.0)
    assert workspace.is_locked


def test_r112_zeroed_kinds_are_zero_again_after_dirty_pages(
    manager: Callable[..., SleepManager],
) -> None:
    sleeper = manager(debug=True)  # fills what a wake finds discarded with 0xFF
    workspace = WorkspaceManager.of(sleeper)
    counters = workspace.get_persistent("counters", (4096,), torch.int32, zeroed=True)
    scratch = workspace.get_persistent("scratch", (4096,), torch.int32)
    address = counters.data_ptr()
    for _ in range(2):
        sleeper.sleep(level=1)
        sleeper.wake_up()
        workspace.check_zeroed("counters")
        assert scratch.eq(-1).all(), "what is not of the zeroed kind is poisoned"
    assert workspace.get_persistent("counters", (4096,), torch.int32, zeroed=True) is counters
    assert counters.data_ptr() == address


def test_scratch_can_be_released_alone(sleeper: SleepManager, workspace: WorkspaceManager) -> None:
    workspace.reserve("kernel", spec(MIB))
    [before] = workspace.get_simultaneous(spec(MIB))
    mapped = books(sleeper.platform)["mapped_bytes"]
    workspace.release()
    assert workspace.is_asleep
    assert books(sleeper.platform)["mapped_bytes"] <= mapped - 8 * MIB
    workspace.restore()
    assert not workspace.is_asleep
    assert workspace.wake_count == 1
    assert workspace.get_simultaneous(spec(MIB))[0].data_ptr() == before.data_ptr()


def test_a_sleep_of_other_tags_leaves_scratch_alone(
    sleeper: SleepManager, workspace: WorkspaceManager
) -> None:
    [view] = workspace.get_simultaneous(spec(1024))
    view.fill_(5.0)
    with sleeper.pool("kv_cache"):
        cache = torch.zeros(MIB)
    sleeper.sleep(policy={"kv_cache": Policy.DISCARD})
    workspace.get_simultaneous(spec(16))
    assert view.eq(5.0).all()
    sleeper.wake_up()
    assert workspace.wake_count == 0
    assert not cache.any()


def test_growth_returns_the_old_buffer_to_the_device_first(
    sleeper: SleepManager, workspace: WorkspaceManager
) -> None:
    workspace.get_simultaneous(spec(4 * MIB))
    before = books(sleeper.platform)["mapped_bytes"]
    workspace.get_simultaneous(spec(6 * MIB))
    grown = books(sleeper.platform)["mapped_bytes"] - before
    assert grown <= 8 * MIB + 2 * MIB, "16 MiB became 24, nothing of the old is kept"


def test_growth_that_does_not_fit_fails_that_call_alone(target: Target) -> None:
    target.require("capacity")
    platform = target.make(capacity=64 * MIB)
    with SleepManager(platform) as sleeper:
        workspace = WorkspaceManager.of(sleeper)
        workspace.reserve("kernel", spec(MIB))
        with pytest.raises(OutOfDeviceMemory):
            workspace.get_simultaneous(spec(32 * MIB))
        [view] = workspace.get_simultaneous(spec(12 * MIB))  # after its 4 MiB went
        assert sleeper.tag_of(view) == "workspace"
        del workspace, view


def test_a_view_from_before_a_sleep_is_refused(manager: Callable[..., SleepManager]) -> None:
    sleeper = manager(debug=True)
    workspace = WorkspaceManager.of(sleeper)
    [view] = workspace.get_simultaneous(spec(8), owner="kernel")
    view.zero_()
    sleeper.sleep()
    with pytest.raises(StateError, match="before a sleep"):
        view.zero_()
    sleeper.wake_up()
    with pytest.raises(StateError, match="before a sleep"):
        view.zero_()


def test_r118_what_was_planned_is_planned_again(
    sleeper: SleepManager, workspace: WorkspaceManager
) -> None:
    class Wrapper:
        """Keeps its plan in scratch, as attention wrappers do."""

        def __init__(self) -> None:
            self.plan = torch.empty(8, dtype=torch.int32)
            self.schedule(self)

        @staticmethod
        def schedule(wrapper: Wrapper) -> None:
            wrapper.plan.copy_(torch.arange(1, 9, dtype=torch.int32))

    wrapper = workspace.get_persistent_resource("attention", Wrapper, on_wake=Wrapper.schedule)
    assert sleeper.tag_of(wrapper.plan) == "workspace"
    sleeper.sleep()
    sleeper.wake_up()
    assert wrapper.plan.tolist() == list(range(1, 9))


def test_a_plan_that_cannot_be_made_again_leaves_it_asleep(
    sleeper: SleepManager, workspace: WorkspaceManager
) -> None:
    def broken(resource: object) -> None:
        raise RuntimeError("no plan")

    workspace.get_persistent_resource("plan", object, on_wake=broken)
    workspace.get_simultaneous(spec(8))
    sleeper.sleep()
    with pytest.raises(HookError, match="'workspace' raised RuntimeError: no plan"):
        sleeper.wake_up()
    assert workspace.is_asleep
    workspace._slot.kept.clear()
    sleeper.wake_up()


def test_adopted_scratch_is_told_by_where_it_lies(
    sleeper: SleepManager, workspace: WorkspaceManager
) -> None:
    outside: Tensor = torch.ones(MIB // 4)
    with sleeper.pool("workspace"):
        inside = torch.ones(MIB // 4)
    workspace.adopt("inside", lambda: [inside])
    workspace.adopt("outside", lambda: [outside])
    assert [entry.tag for entry in workspace.report().adopted] == ["workspace", None]
    assert workspace.report().outside == MIB


def test_the_lock_outlives_a_sleep(sleeper: SleepManager, workspace: WorkspaceManager) -> None:
    workspace.reserve("kernel", spec(64))
    workspace.lock()
    sleeper.sleep()
    sleeper.wake_up()
    with pytest.raises(WorkspaceLocked):
        workspace.get_simultaneous(spec(MIB), owner="kernel")
