"""The contract of `SleepManager`: transactions, no-ops, selective wakes, plans and reports."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from hal.core import LEVELS, BackupOptions, Policy, SleepManager, State
from hal.errors import (
    AsleepError,
    HalError,
    HostMemoryError,
    InvalidArgument,
    OutOfDeviceMemory,
    StateError,
    UnknownTagError,
)
from support import MIB, Target, books, fill, hold, pattern

Make = Callable[..., SleepManager]


def test_sleep_releases_and_wake_restores_at_the_same_address(manager: Make, backing: str) -> None:
    sleeper = manager(backing)
    weights, kv = fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2)
    before, address = books(sleeper.platform), weights.data_ptr()
    report = sleeper.sleep(level=1)
    asleep = books(sleeper.platform)
    assert asleep["mapped_bytes"] == before["mapped_bytes"] - report.total_bytes
    assert report.total_bytes >= 6 * MIB
    assert report.tag("weights").policy is Policy.OFFLOAD
    assert report.tag("weights").copied >= 3 * MIB
    assert report.tag("kv_cache").copied == 0
    woken = sleeper.wake_up()
    assert books(sleeper.platform) == before
    assert weights.data_ptr() == address
    assert torch.equal(weights, pattern(3 * MIB, 1))
    assert woken.total_bytes == report.total_bytes
    assert not kv.any(), "discarded memory comes back zeroed"


def test_only_live_blocks_are_copied_and_free_segments_are_given_up(sleeper: SleepManager) -> None:
    keep = fill(sleeper, "weights", 1, MIB)
    drop = fill(sleeper, "weights", 2, 16 * MIB)
    del drop
    gc.collect()
    report = sleeper.sleep(level=1)
    assert report.tag("weights").copied <= 2 * MIB
    sleeper.wake_up()
    assert torch.equal(keep, pattern(MIB, 1))


def test_second_sleep_and_second_wake_are_counted_no_ops(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    sleeper.sleep(level=1)
    again = sleeper.sleep(level=1)
    assert (again.total_bytes, again.tags) == (0, ())
    assert again.skipped == 1
    sleeper.wake_up()
    assert sleeper.wake_up().skipped == 1
    assert sleeper.wake_up([]).total_bytes == 0


def test_an_empty_tag_list_wakes_nothing(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    sleeper.sleep(level=1)
    assert sleeper.wake_up([]).skipped == 1
    assert sleeper.sleeping_tags == {"weights"}


def test_level_1_then_level_2_is_ignored_with_a_warning(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(level=1)
    with pytest.warns(UserWarning, match="weights sleep already"):
        sleeper.sleep(level=2)
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))
    assert sleeper.dirty == ()


def test_same_level_twice_does_not_warn(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    sleeper.sleep(level=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sleeper.sleep(level=1)


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_selective_wakes_restore_every_tag_that_is_not_deferrable(
    sleeper: SleepManager, order: tuple[str, str]
) -> None:
    tensors = {
        tag: fill(sleeper, tag, seed) for seed, tag in enumerate(("weights", "runtime", "own"))
    }
    hold(fill(sleeper, "kv_cache", 9))
    sleeper.sleep(level=1)
    report = sleeper.wake_up([order[0]])
    assert report.still_asleep == (order[1],)
    assert sleeper.state is State.PARTLY_AWAKE
    assert torch.equal(tensors["runtime"], pattern(3 * MIB, 1))
    assert torch.equal(tensors["own"], pattern(3 * MIB, 2))
    sleeper.wake_up(order[1])
    assert sleeper.state is State.AWAKE
    assert torch.equal(tensors["weights"], pattern(3 * MIB, 0))


def test_deferrable_tags_are_the_users_choice(manager: Make) -> None:
    sleeper = manager(deferrable=("own",))
    hold(fill(sleeper, "weights", 1))
    hold(fill(sleeper, "own", 2))
    sleeper.sleep(level=1)
    assert sleeper.wake_up(["weights"]).still_asleep == ("own",)
    sleeper.wake_up()


def test_policy_keeps_what_it_does_not_name(sleeper: SleepManager) -> None:
    weights, kv = fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2)
    sleeper.sleep(policy={"kv_cache": Policy.DISCARD})
    assert sleeper.sleeping_tags == {"kv_cache"}
    assert sleeper.state is State.PARTLY_AWAKE
    assert torch.equal(weights, pattern(3 * MIB, 1))
    sleeper.wake_up()
    assert not kv.any()


def test_a_pools_own_policy_wins_over_the_level(sleeper: SleepManager) -> None:
    source_offloaded = pattern(MIB, 1)
    with sleeper.pool("weights"):
        offloaded = source_offloaded.clone()
    source_kept = pattern(MIB, 2)
    with sleeper.pool("weights", Policy.KEEP):
        kept = source_kept.clone()
    report = sleeper.sleep(level=2)
    assert torch.equal(kept, pattern(MIB, 2)), "still mapped"
    assert report.tag("weights").copied == 0
    sleeper.wake_up()
    assert not offloaded.any()


def test_levels_are_what_the_design_says() -> None:
    assert LEVELS[1].policy("weights") is Policy.OFFLOAD
    assert LEVELS[2].policy("weights") is Policy.DISCARD
    for level in LEVELS.values():
        assert level.policy("kv_cache") is level.policy("workspace") is Policy.DISCARD
        assert level.policy("runtime") is level.policy("cudagraph") is Policy.OFFLOAD
        assert level.policy("a name of the engine") is Policy.OFFLOAD


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.sleep(level=7), InvalidArgument),
        (lambda s: s.sleep(policy={"nobody": Policy.KEEP}), UnknownTagError),
        (lambda s: s.sleep(policy={"weights": "keep"}), InvalidArgument),
        (lambda s: s.wake_up("nobody"), UnknownTagError),
        (lambda s: s.wake_up(["weights", "nobody"]), UnknownTagError),
        (lambda s: s.discard("nobody"), UnknownTagError),
        (lambda s: s.mark_loaded("nobody"), UnknownTagError),
        (lambda s: s.require_awake("nobody"), UnknownTagError),
        (lambda s: s.preserve({"x": 3}), InvalidArgument),
        (lambda s: BackupOptions(budget=0), InvalidArgument),
        (lambda s: BackupOptions(backing="tape"), InvalidArgument),
        (lambda s: BackupOptions(backing="file:"), InvalidArgument),
        (lambda s: BackupOptions(compress="lz9"), InvalidArgument),
    ],
)
def test_bad_input_is_a_typed_error_before_any_change(
    sleeper: SleepManager, call: Callable[[SleepManager], object], error: type[HalError]
) -> None:
    weights = fill(sleeper, "weights", 1)
    before = books(sleeper.platform)
    with pytest.raises(error):
        call(sleeper)
    assert books(sleeper.platform) == before
    assert sleeper.state is State.AWAKE
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_sleep_inside_an_open_scope_is_refused(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"), pytest.raises(StateError, match="scope of weights is open"):
        sleeper.sleep(level=1)
    assert sleeper.state is State.AWAKE


def test_entering_an_asleep_pool_is_refused(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    sleeper.sleep(level=1)
    with pytest.raises(AsleepError, match="weights"), sleeper.pool("weights"):
        pass
    sleeper.wake_up()
    hold(fill(sleeper, "weights", 2))


def test_a_budget_too_small_refuses_before_anything_changes(manager: Make) -> None:
    sleeper = manager(backup=BackupOptions(backing="anonymous", budget=2 * MIB))
    weights = fill(sleeper, "weights", 1)
    before = books(sleeper.platform)
    hooks: list[str] = []
    sleeper.before_sleep(lambda: hooks.append("before"))
    with pytest.raises(HostMemoryError) as caught:
        sleeper.sleep(level=1)
    assert caught.value.needed >= 3 * MIB
    assert caught.value.limit == 2 * MIB
    assert hooks == [], "nothing was told of a sleep that cannot be"
    assert books(sleeper.platform) == before
    assert torch.equal(weights, pattern(3 * MIB, 1))
    assert sleeper.last_error is caught.value
    sleeper.sleep(level=2)
    sleeper.wake_up()


def test_plans_give_the_reports_numbers_and_change_nothing(sleeper: SleepManager) -> None:
    held = [fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2, 5 * MIB)]
    fill(sleeper, "weights", 3, 9 * MIB)  # freed at once: cached by the pool, given up at sleep
    before = books(sleeper.platform)
    plan = sleeper.plan_sleep(level=1)
    assert books(sleeper.platform) == before
    report = sleeper.sleep(level=1)
    assert plan.fits
    assert plan.freed == report.total_bytes
    assert plan.host_needed == report.copied_bytes
    wake_plan = sleeper.plan_wake_up(["weights"])
    assert [tag.tag for tag in wake_plan.tags] == ["weights"]
    assert wake_plan.fits is (True if sleeper.capabilities.free_is_truthful else None)
    woken = sleeper.wake_up(["weights"])
    assert woken.total_bytes == wake_plan.needed
    sleeper.wake_up()
    assert torch.equal(held[0], pattern(3 * MIB, 1))


def test_reports_are_plain_values(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    values = sleeper.sleep(level=1).as_dict()
    assert values["kind"] == "SleepReport"
    assert values["schema_version"] == 1
    assert values["tags"][0]["policy"] == "offload"
    assert "released" in str(sleeper.wake_up()) or sleeper.state is State.AWAKE
    sources = [entry["source"] for entry in values["residual"]]
    assert sources[:2] == ["awake tags", "other pools"]


def test_discard_while_awake_gives_memory_back_and_wakes_zeroed(sleeper: SleepManager) -> None:
    kv = fill(sleeper, "kv_cache", 1)
    assert sleeper.discard("kv_cache").total_bytes >= 3 * MIB
    assert sleeper.sleeping_tags == {"kv_cache"}
    sleeper.wake_up("kv_cache")
    assert not kv.any()


def test_discard_while_asleep_drops_the_backup(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(level=1)
    assert sleeper.backup_bytes >= 3 * MIB
    sleeper.discard("weights")
    assert sleeper.backup_bytes == 0
    sleeper.wake_up()
    assert not weights.any()
    assert len(sleeper.dirty) == 1


def test_a_second_manager_has_its_own_tags(manager: Make) -> None:
    one, two = manager(), manager()
    first, second = fill(one, "weights", 1), fill(two, "weights", 2)
    one.sleep(level=1)
    assert not two.is_sleeping
    assert torch.equal(second, pattern(3 * MIB, 2))
    two.sleep(level=1)
    one.wake_up()
    assert torch.equal(first, pattern(3 * MIB, 1))
    two.wake_up()
    assert torch.equal(second, pattern(3 * MIB, 2))


def test_transitions_of_many_threads_are_serialised(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1)
    errors: list[BaseException] = []

    def cycle() -> None:
        try:
            for _ in range(10):
                sleeper.sleep(level=1)
                sleeper.wake_up()
        except HalError as error:
            errors.append(error)

    threads = [threading.Thread(target=cycle) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_a_hook_may_not_call_back_into_the_transition(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    seen: list[str] = []

    def hook() -> None:
        with pytest.raises(StateError, match="called from a hook of sleep"):
            sleeper.wake_up()
        seen.append("refused")

    sleeper.before_sleep(hook)
    sleeper.sleep(level=1)
    assert seen == ["refused"]
    sleeper.wake_up()


def test_what_a_before_hook_allocates_is_backed_up_too(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "kv_cache", 1))
    made: list[torch.Tensor] = []
    sleeper.before_sleep(lambda: made.append(fill(sleeper, "own", 2)), name="late state")
    with sleeper.pool("own"):
        pass
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert torch.equal(made[0], pattern(3 * MIB, 2))


def test_close_refuses_to_lose_sleeping_tensors(manager: Make) -> None:
    sleeper = manager()
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(level=1)
    with pytest.raises(StateError, match="weights still sleep"):
        sleeper.close()
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))
    del weights
    gc.collect()
    sleeper.close()
    assert books(sleeper.platform)["segments"] == 0


def test_waiting_for_memory_ends_when_it_fits(target: Target) -> None:
    target.require("capacity")
    gc.collect()  # what earlier tests left goes now, not while free memory is compared
    platform = target.make(capacity=16 * MIB)
    sleeper = SleepManager(platform, backup=BackupOptions(backing="anonymous"))
    weights = fill(sleeper, "weights", 1, 6 * MIB)
    sleeper.sleep(level=1)
    device = platform.device()
    hog = device.create(12 * MIB)
    free_is_known = bool(platform.capabilities.free_is_truthful)
    assert sleeper.plan_wake_up().fits is (False if free_is_known else None)
    with pytest.raises(OutOfDeviceMemory) as caught:
        sleeper.wake_up(wait_for_memory=0.05)
    assert (caught.value.tag, caught.value.needed, caught.value.free) == (
        "weights",
        6 * MIB,
        4 * MIB if free_is_known else None,
    )
    timer = threading.Timer(0.2, device.release, (hog, 12 * MIB))
    timer.start()
    sleeper.wake_up(wait_for_memory=30)
    timer.join()
    assert torch.equal(weights, pattern(6 * MIB, 1))


def test_host_memory_is_given_back_after_a_wake(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1))
    sleeper.sleep(level=1)
    assert sleeper.held_bytes >= sleeper.backup_bytes >= 3 * MIB
    assert sleeper.held_bytes <= 1.01 * sleeper.backup_bytes
    sleeper.wake_up()
    assert sleeper.held_bytes == sleeper.backup_bytes == 0


def test_retained_backups_outlive_a_wake_until_trimmed(manager: Make) -> None:
    sleeper = manager(backup=BackupOptions(backing="anonymous", retain=True))
    weights = fill(sleeper, "weights", 1)
    for seed in (2, 3):
        sleeper.sleep(level=1)
        sleeper.wake_up()
        held = sleeper.held_bytes
        assert held >= 3 * MIB
        weights.copy_(pattern(3 * MIB, seed))
    sleeper.sleep(level=1)
    assert sleeper.held_bytes == held, "the next sleep reuses what was retained"
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 3))
    assert sleeper.trim_host() >= 3 * MIB
    assert sleeper.held_bytes == 0
