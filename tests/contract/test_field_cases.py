"""Failures met in the field, each under its number in docs/field_cases.md, on every platform that
runs here.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from hal.core import BackupOptions, Policy, SleepManager, State
from hal.core.kv_init import KVInitScope
from hal.errors import (
    AsleepError,
    BackupCorrupted,
    DirtyError,
    DriverError,
    HalError,
    HookError,
    HostMemoryError,
    OutOfDeviceMemory,
    StateError,
    Unsupported,
)
from hal.platform import Platform, PoolNesting
from support import MIB, Target, books, fill, hold, large, pattern

Make = Callable[..., SleepManager]


def calls(platform: Platform) -> dict[str, int]:
    counters = platform.device().counters().as_dict()
    return {name: counters[name] for name in ("creates", "maps", "unmaps", "releases")}


# -- A. state machine, tags, concurrency


def test_r03_a_use_while_asleep_is_a_typed_error_without_side_effects(
    sleeper: SleepManager,
) -> None:
    hold(fill(sleeper, "weights", 1))
    sleeper.sleep(level=1)
    before = books(sleeper.platform)
    for _ in range(2):
        with pytest.raises(AsleepError, match=r"'weights'.*call wake_up\(\) first"):
            sleeper.require_awake("weights")
    assert sleeper.is_sleeping
    assert books(sleeper.platform) == before
    sleeper.wake_up()
    sleeper.require_awake()


def test_r08_each_segment_is_created_mapped_unmapped_and_released_once_a_cycle(
    sleeper: SleepManager,
) -> None:
    for seed in range(3):
        hold(fill(sleeper, f"tag{seed}", seed))
    start = calls(sleeper.platform)
    sleeper.sleep(level=1)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    sleeper.wake_up()
    made = {name: count - start[name] for name, count in calls(sleeper.platform).items()}
    assert made["creates"] == made["maps"] == made["unmaps"] == made["releases"] > 0


def test_r09_a_tensor_freed_while_asleep_is_freed_once(sleeper: SleepManager) -> None:
    kept, freed = fill(sleeper, "weights", 1), fill(sleeper, "weights", 2, large())
    slept = sleeper.sleep(level=1)
    released = calls(sleeper.platform)["releases"]
    del freed
    gc.collect()
    report = sleeper.wake_up()
    assert report.total_bytes <= slept.total_bytes - large(), "what was freed is not restored"
    assert calls(sleeper.platform)["releases"] == released, "no handle was released twice"
    assert torch.equal(kept, pattern(3 * MIB, 1))
    assert books(sleeper.platform)["asleep_bytes"] == 0


def test_r10_garbage_collection_while_asleep_is_harmless(sleeper: SleepManager) -> None:
    tensors = [fill(sleeper, "weights", seed, large()) for seed in range(8)]
    sleeper.sleep(level=1)
    del tensors[::2]
    gc.collect()
    for managed in sleeper._pools:
        managed.pool.trim()
    sleeper.wake_up()
    assert all(torch.equal(t, pattern(large(), 2 * i + 1)) for i, t in enumerate(tensors))
    assert books(sleeper.platform)["segments"] == 4


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_r11_a_restore_hook_waits_for_its_own_tag(
    sleeper: SleepManager, order: tuple[str, str]
) -> None:
    with sleeper.pool("weights"):
        buffer = torch.arange(1000.0)
    hold(fill(sleeper, "kv_cache", 1))
    snapshot = buffer.clone()
    ran: list[frozenset[str]] = []

    def restore() -> None:
        ran.append(sleeper.sleeping_tags)
        buffer.copy_(snapshot)

    sleeper.after_wake(restore, tag="weights")
    sleeper.sleep(level=2)
    for tag in order:
        sleeper.wake_up(tag)
    assert len(ran) == 1, "once, when its tag woke"
    assert "weights" not in ran[0]
    assert torch.equal(buffer, snapshot)


def test_r13_wake_out_of_memory_rolls_back(manager: Make, target: Target, backing: str) -> None:
    sleeper = manager(backing)
    tensors = [fill(sleeper, "weights", seed, large()) for seed in range(4)]
    hold(fill(sleeper, "kv_cache", 9))
    sleeper.sleep(level=1)
    asleep = books(sleeper.platform)
    for nth in range(1, 6):
        sleeper.platform.device().fail("create", nth, target.out_of_memory)
        with pytest.raises(OutOfDeviceMemory) as caught:
            sleeper.wake_up()
        assert "weights" in (caught.value.tag or "")
        assert caught.value.needed >= 4 * large()
        free_is_known = bool(sleeper.capabilities.free_is_truthful)
        assert (caught.value.free is not None) == free_is_known
        assert books(sleeper.platform) == asleep
        assert sleeper.state is State.ASLEEP
        assert sleeper.last_error is caught.value
    sleeper.platform.device().clear_faults()
    sleeper.wake_up()
    assert all(torch.equal(t, pattern(large(), seed)) for seed, t in enumerate(tensors))


def test_r14_a_failed_map_is_an_error_and_nothing_is_copied(
    sleeper: SleepManager, target: Target
) -> None:
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(level=1)
    asleep = books(sleeper.platform)
    sleeper.platform.device().fail("map", 1, target.other_error)
    with pytest.raises(DriverError) as caught:
        sleeper.wake_up()
    assert (caught.value.call, caught.value.code) == ("map", target.other_error)
    assert caught.value.size > 0
    assert caught.value.address == weights.data_ptr() // 4096 * 4096
    assert books(sleeper.platform) == asleep
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))


@pytest.mark.parametrize("call", ["create", "map", "access"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_r16_a_failure_in_a_later_chunk_leaks_nothing(target: Target, call: str, nth: int) -> None:
    if target.name.startswith("cpu"):
        from hal.native import Device

        device = Device("cpu", 0, f"chunk={MIB}")
        device_pool = device.create_pool("weights").id
        before = device.counters().as_dict()
        device.fail(call, nth if call != "access" else 1, target.out_of_memory)
        with pytest.raises(HalError):
            device.allocate(device_pool, 3 * MIB)
        after = device.counters().as_dict()
        for name in ("segments", "handles", "mappings", "reservations", "mapped_bytes"):
            assert after[name] == before[name], name
        device.clear_faults()
        address = device.allocate(device_pool, 3 * MIB)
        assert device.counters().handles == before["handles"] + 3
        device.free(address)
        assert device.counters().reservations == before["reservations"]


def test_r17_waking_one_model_while_another_sleeps_never_crashes(target: Target) -> None:
    target.require("capacity")
    platform = target.make(capacity=24 * MIB)
    backup = BackupOptions(backing="anonymous")
    one, two = (SleepManager(platform, backup=backup) for _ in range(2))
    first = fill(one, "weights", 1, 10 * MIB)
    one.sleep(level=1)
    second = fill(two, "weights", 2, 16 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        one.wake_up()
    sleeping = threading.Thread(target=lambda: (time.sleep(0.1), two.sleep(level=1)))
    sleeping.start()
    one.wake_up(wait_for_memory=30)
    sleeping.join()
    assert torch.equal(first, pattern(10 * MIB, 1))
    one.sleep(level=1)
    two.wake_up()
    assert torch.equal(second, pattern(16 * MIB, 2))


def test_r22_a_failing_wake_hook_leaves_it_asleep_and_is_named(sleeper: SleepManager) -> None:
    weights, kv = fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2)
    asleep_books: dict[str, int] = {}
    broken = [True]

    def reconnect() -> None:
        if broken[0]:
            raise ConnectionError("peer is gone")

    sleeper.after_wake(reconnect, name="connector")
    sleeper.sleep(level=1)
    asleep_books = books(sleeper.platform)
    with pytest.raises(HookError, match=r"connector.*peer is gone") as caught:
        sleeper.wake_up()
    assert caught.value.hook == "connector"
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert sleeper.last_error is caught.value
    assert sleeper.state is State.ASLEEP
    assert books(sleeper.platform) == asleep_books
    broken[0] = False
    sleeper.wake_up()
    assert sleeper.last_error is None
    assert torch.equal(weights, pattern(3 * MIB, 1))
    assert not kv.any()


def test_r23_before_hooks_run_in_reverse_order_and_a_failing_one_cancels(
    sleeper: SleepManager,
) -> None:
    weights = fill(sleeper, "weights", 1)
    log: list[str] = []
    failing = [False]

    def peer() -> None:
        if failing[0]:
            raise RuntimeError("still sending")
        log.append(f"peer sees {int(weights[0])}")

    sleeper.before_sleep(lambda: log.append("first registered"))
    sleeper.before_sleep(peer, name="peer copies")
    sleeper.after_wake(lambda: log.append("awake"))
    sleeper.sleep(level=1)
    assert log == [f"peer sees {int(pattern(1, 1)[0])}", "first registered"]
    sleeper.wake_up()
    before, failing[0] = books(sleeper.platform), True
    log.clear()
    with pytest.raises(HookError, match="peer copies"):
        sleeper.sleep(level=1)
    assert log == ["awake"], "the engine is told that it stays awake"
    assert books(sleeper.platform) == before
    assert sleeper.state is State.AWAKE
    assert torch.equal(weights, pattern(3 * MIB, 1))


# -- B. wrong contents after a wake


class Model(torch.nn.Module):
    """A parameter, a buffer that no checkpoint has, and a map that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(65536.0))
        self.register_buffer("rotary", torch.linspace(0, 1, 4096), persistent=False)
        self.experts = torch.arange(4096, dtype=torch.int32).flip(0)


def build(sleeper: SleepManager) -> Model:
    with sleeper.pool("weights"):
        model = Model()
    sleeper.track(model)
    return model


def test_r24_buffers_survive_a_discard_or_are_listed_as_dirty(sleeper: SleepManager) -> None:
    model = build(sleeper)
    sleeper.preserve([model.rotary])
    sleeper.sleep(level=2)
    sleeper.wake_up()
    assert torch.equal(model.rotary, torch.linspace(0, 1, 4096))
    assert "rotary" not in sleeper.dirty
    assert "weight" in sleeper.dirty


def test_r24_a_buffer_that_was_not_preserved_is_named(sleeper: SleepManager) -> None:
    model = build(sleeper)
    sleeper.sleep(level=2)
    sleeper.wake_up()
    sleeper.mark_loaded([model.weight])
    assert "rotary" in sleeper.dirty
    assert "weight" not in sleeper.dirty


def test_r25_discarded_weights_are_dirty_until_marked_loaded(sleeper: SleepManager) -> None:
    model = build(sleeper)
    sleeper.sleep(level=2)
    sleeper.wake_up()
    with pytest.raises(DirtyError, match="weight"):
        sleeper.require_awake("weights")
    with torch.no_grad():
        model.weight.copy_(torch.arange(65536.0))
    sleeper.mark_loaded("weights")
    sleeper.require_awake("weights")


@pytest.mark.parametrize("sample", ["adapter", "routing map"])
def test_r26_r38_tensors_of_no_module_are_listed_as_untracked(
    sleeper: SleepManager, sample: str
) -> None:
    model = build(sleeper)
    assert model.experts.max() == 4095
    sleeper.sleep(level=2)
    sleeper.wake_up()
    sleeper.mark_loaded(model)
    (name,) = sleeper.dirty
    assert name.startswith("untracked block of 16384 bytes")
    with pytest.raises(DirtyError):
        sleeper.require_awake("weights")
    model.experts.copy_(torch.arange(4096, dtype=torch.int32).flip(0))
    sleeper.mark_loaded([model.experts])
    sleeper.require_awake("weights")


def test_r27_a_wake_restores_the_mapped_bytes_of_every_tag(sleeper: SleepManager) -> None:
    for seed, tag in enumerate(("weights", "runtime", "kv_cache")):
        hold(fill(sleeper, tag, seed))
    slept = {tag.tag: tag.bytes for tag in sleeper.sleep(level=1).tags}
    woken = {tag.tag: tag.bytes for tag in sleeper.wake_up().tags}
    assert woken == slept


def test_r27_a_corrupted_file_backup_is_never_restored(manager: Make, backing: str) -> None:
    if backing == "anonymous":
        sleeper = manager(backup=BackupOptions(backing=backing, verify=True))
    else:
        sleeper = manager(backing)
    weights = fill(sleeper, "weights", 1)
    sleeper.sleep(level=1)
    asleep, device = books(sleeper.platform), sleeper.platform.device()
    (segment,) = sleeper._pools.segments("weights")
    device.flip_backup_bit(segment.address, 12345)
    for _ in range(2):
        with pytest.raises(BackupCorrupted):
            sleeper.wake_up()
        assert books(sleeper.platform) == asleep
    device.flip_backup_bit(segment.address, 12345)
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_r29_an_index_made_in_the_kv_pool_is_named_by_the_audit(sleeper: SleepManager) -> None:
    scope = sleeper.kv_init()
    scope.__enter__()
    with scope.cache():
        cache = scope.declare(torch.zeros(2 * MIB, dtype=torch.uint8))
        index = torch.arange(64)
    tables = torch.arange(1000)
    with pytest.warns(UserWarning, match=r"512 bytes of shape \[64\]"):
        scope.__exit__(None, None, None)
    (finding,) = scope.findings
    assert finding.address == index.data_ptr()
    assert __file__ in finding.where
    assert cache.data_ptr() != finding.address
    assert tables[-1] == 999


def test_r29_strict_audits_are_errors(sleeper: SleepManager) -> None:
    def careless() -> None:
        with sleeper.kv_init(strict=True) as kv, kv.cache():
            hold(kv.declare(torch.zeros(MIB, dtype=torch.uint8)))
            hold(torch.arange(64))

    with pytest.raises(StateError, match="not declared as KV payload"):
        careless()


def test_r29_an_index_in_runtime_survives(sleeper: SleepManager) -> None:
    scope: KVInitScope
    with sleeper.kv_init(strict=True) as scope:
        with scope.cache():
            cache = scope.declare(torch.ones(2 * MIB, dtype=torch.uint8))
        index = torch.arange(64)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert torch.equal(index, torch.arange(64))
    assert not cache.any()
    assert sleeper.tag_of(cache) == "kv_cache"


@pytest.mark.parametrize("level", [1, 2])
def test_r31_fp8_scales_come_back_as_they_were(sleeper: SleepManager, level: int) -> None:
    with sleeper.pool("weights"):
        scale = torch.tensor([0.03125])
        weight = torch.ones(MIB)
    sleeper.preserve([scale])
    sleeper.sleep(level=level)
    sleeper.wake_up()
    assert scale.item() == 0.03125
    assert (weight[0].item() == 1.0) is (level == 1)


@pytest.mark.parametrize(("debug", "expected"), [(False, 0), (True, 0xFF)])
def test_r33_discarded_pages_never_wake_with_old_bytes(
    target: Target, debug: bool, expected: int
) -> None:
    target.require("dirty")
    platform = target.make(dirty=0x5A)
    sleeper = SleepManager(platform, backup=BackupOptions(backing="anonymous"), debug=debug)
    with sleeper.pool("kv_cache"):
        cache = torch.full((4 * MIB,), 7, dtype=torch.uint8)
    with sleeper.pool("weights"):
        live = torch.full((MIB,), 3, dtype=torch.uint8)
        dead = torch.full((MIB // 2,), 4, dtype=torch.uint8)
    hole = torch.frombuffer(_view(dead), dtype=torch.uint8)
    del dead
    gc.collect()
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert (cache == expected).all()
    assert (live == 3).all()
    assert (hole == expected).all(), "nor does a hole in an offloaded segment"


def _view(tensor: torch.Tensor) -> object:
    import ctypes

    return (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())


def test_r36_blocks_are_never_reused_across_tags(sleeper: SleepManager) -> None:
    gone = weakref.ref(fill(sleeper, "kv_cache", 1, 8 * MIB))
    gc.collect()
    assert gone() is None
    weights = fill(sleeper, "weights", 2, 8 * MIB)
    sleeper.sleep(policy={"kv_cache": Policy.DISCARD})
    assert torch.equal(weights, pattern(8 * MIB, 2))
    sleeper.wake_up()


def test_r39_a_transform_of_the_load_runs_once(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"):
        weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t().contiguous().t())
    shape, stride, values = weight.shape, weight.stride(), weight.detach().clone()
    for _ in range(2):
        sleeper.sleep(level=1)
        sleeper.wake_up()
    assert (weight.shape, weight.stride()) == (shape, stride)
    assert torch.equal(weight, values)


# -- C. pools and allocator


def test_r43_nested_scopes_never_mis_tag(sleeper: SleepManager) -> None:
    with sleeper.pool("runtime"):
        outer = torch.ones(1000)
        if sleeper.capabilities.pool_nesting is PoolNesting.FIFO:
            with pytest.raises(StateError, match="outermost pool"), sleeper.pool("kv_cache"):
                pass
        else:
            with sleeper.pool("kv_cache"):
                inner = torch.ones(1000)
            assert sleeper.tag_of(inner) == "kv_cache"
    assert sleeper.tag_of(outer) == "runtime"


def test_r45_freed_blocks_return_to_the_device(sleeper: SleepManager) -> None:
    tensor = fill(sleeper, "weights", 1, 16 * MIB)
    assert books(sleeper.platform)["mapped_bytes"] >= 16 * MIB
    del tensor
    gc.collect()
    report = sleeper.sleep(level=1)
    assert (report.total_bytes, report.copied_bytes) == (0, 0)
    assert books(sleeper.platform)["segments"] == 0
    sleeper.wake_up()


def test_r56_nothing_grows_over_fifty_cycles(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1)
    hold(fill(sleeper, "kv_cache", 2))
    after: list[dict[str, int]] = []
    for cycle in range(50):
        sleeper.sleep(level=1)
        sleeper.wake_up()
        with sleeper.pool("workspace"):
            torch.ones(1000 + cycle).sum()
        if cycle >= 1:
            after.append(books(sleeper.platform))
    assert after[0] == after[-1]
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_r54_a_pool_that_cannot_sleep_is_known_before_use(platform: Platform) -> None:
    flag = platform.capabilities.graph_pools
    assert flag or flag.reason


# -- D. graphs, collectives, sharing


def test_r60_an_interprocess_handle_is_refused_before_any_driver_call(
    sleeper: SleepManager,
) -> None:
    tensor = fill(sleeper, "weights", 1)
    before = calls(sleeper.platform)
    with pytest.raises(Unsupported, match="outside the pools"):
        sleeper.ipc_handle(tensor)
    assert calls(sleeper.platform) == before


# -- E. host memory


def test_r64_backups_take_exactly_their_bytes(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1, 33 * MIB))
    hold(fill(sleeper, "runtime", 2, 5 * MIB))
    report = sleeper.sleep(level=1)
    assert report.copied_bytes >= 38 * MIB
    assert sleeper.held_bytes <= 1.01 * report.copied_bytes
    sleeper.wake_up()


@pytest.mark.parametrize("call", ["copy_to_host", "unmap", "release", "synchronize"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_r66_a_failed_sleep_leaves_everything_awake(
    manager: Make, target: Target, backing: str, call: str, nth: int
) -> None:
    if call == "copy_to_host" and backing != "anonymous":
        call = "file write"
    sleeper = manager(backing)
    tensors = [fill(sleeper, "weights", seed, large()) for seed in range(3)]
    before, device = books(sleeper.platform), sleeper.platform.device()
    device.fail(call, nth, 5 if call == "file write" else target.other_error)
    if call == "synchronize" and nth > 1:
        pytest.skip("a sleep waits for the whole device once")
    with pytest.raises(HalError) as caught:
        sleeper.sleep(level=1)
    assert device.fault_hits(call) == 1
    assert sleeper.last_error is caught.value
    assert sleeper.state is State.AWAKE
    assert books(sleeper.platform) == before
    device.clear_faults()
    assert all(torch.equal(t, pattern(large(), seed)) for seed, t in enumerate(tensors))
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert all(torch.equal(t, pattern(large(), seed)) for seed, t in enumerate(tensors))


def test_r66_no_room_for_the_backup_is_found_before_the_first_unmap(
    manager: Make, target: Target
) -> None:
    sleeper = manager()
    weights = fill(sleeper, "weights", 1)
    start = calls(sleeper.platform)
    sleeper.platform.device().fail("arena grow", 1, 12)
    with pytest.raises(HostMemoryError):
        sleeper.sleep(level=1)
    assert calls(sleeper.platform) == start
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_r66_a_sleep_whose_memory_was_taken_ends_asleep_with_its_backups(
    target: Target,
) -> None:
    platform = target.make()
    sleeper = SleepManager(platform, backup=BackupOptions(backing="anonymous"))
    tensors = [fill(sleeper, "weights", seed, large()) for seed in range(4)]
    device = platform.device()
    device.fail("release", 4, target.other_error)
    device.fail("create", 1, target.out_of_memory, times=-1)
    with pytest.raises(DriverError) as caught:
        sleeper.sleep(level=1)
    assert any("ended asleep" in note for note in caught.value.__notes__)
    assert sleeper.state is State.ASLEEP
    device.clear_faults()
    sleeper.wake_up()
    assert all(torch.equal(t, pattern(large(), seed)) for seed, t in enumerate(tensors))


def test_r69_host_copies_go_before_discarded_tags_take_their_memory(target: Target) -> None:
    platform = target.make()
    if not platform.capabilities.unified_memory:
        pytest.skip("device and host memory are separate here")
    sleeper = SleepManager(platform, backup=BackupOptions(backing="anonymous"))
    weights, _kv = fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2)
    sleeper.sleep(level=1)
    held_at_create: list[int] = []
    wake = platform.device().wake

    def watched(arena: object, segments: object, **options: object) -> object:
        held_at_create.append(sleeper.held_bytes)
        return wake(arena, segments, **options)  # type: ignore[arg-type]

    platform.device().wake = watched  # type: ignore[method-assign,assignment]
    try:
        sleeper.wake_up()
    finally:
        del platform.device().wake
    assert held_at_create == [held_at_create[0], 0]
    assert held_at_create[0] >= 3 * MIB
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_r71_a_backing_that_is_not_there_falls_back_once_or_fails(manager: Make) -> None:
    sleeper = manager(backup=BackupOptions(backing="pinned"))
    weights = fill(sleeper, "weights", 1)
    if sleeper.capabilities.pinned_host:
        sleeper.sleep(level=1)
        sleeper.wake_up()
    else:
        with pytest.warns(UserWarning, match="pageable"):
            sleeper.sleep(level=1)
        sleeper.wake_up()
        strict = manager(backup=BackupOptions(backing="pinned", require_pinned=True))
        hold(fill(strict, "weights", 2))
        with pytest.raises(Unsupported, match="pinned host memory"):
            strict.sleep(level=1)
    assert torch.equal(weights, pattern(3 * MIB, 1))


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_r24_r66_a_discard_with_preserved_tensors_is_undone_whole(
    sleeper: SleepManager, target: Target, nth: int
) -> None:
    """What a sleep was to give up is still there when it did not happen."""
    weights, cache = fill(sleeper, "weights", 1), fill(sleeper, "kv_cache", 2)
    buffer = weights[:1000]
    sleeper.preserve({"buffer": buffer})
    sleeper.device.fail("unmap", nth, target.other_error)
    try:
        sleeper.sleep(level=2)
    except HalError:
        assert not sleeper.is_sleeping
        assert torch.equal(weights, pattern(len(weights), 1))
        assert torch.equal(cache, pattern(len(cache), 2))
    sleeper.device.clear_faults()
    sleeper.sleep(level=2)
    sleeper.wake_up()
    assert torch.equal(buffer, pattern(1000, 1))
