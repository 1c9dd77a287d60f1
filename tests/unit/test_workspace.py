"""The workspace without a sleep: slots, floors, the lock, kept resources, reports, debug mode."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.core.workspace import ALIGNMENT, TensorSpec, WorkspaceManager, total_bytes
from hal.errors import AsleepError, InvalidArgument, StateError, WorkspaceLocked
from support import MIB

FLOATS = torch.float32


def spec(*shape: int, dtype: torch.dtype = FLOATS) -> TensorSpec:
    return TensorSpec(shape, dtype)


def span(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def disjoint(a: Tensor, b: Tensor) -> bool:
    return span(a).stop <= span(b).start or span(b).stop <= span(a).start


# -- views


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.bfloat16, FLOATS])
def test_views_have_their_shape_and_type_and_do_not_overlap(dtype: torch.dtype) -> None:
    views = WorkspaceManager("cpu").get_simultaneous(spec(3, 5, dtype=dtype), spec(7), spec(0, 4))
    assert [tuple(view.shape) for view in views] == [(3, 5), (7,), (0, 4)]
    assert [view.dtype for view in views] == [dtype, FLOATS, FLOATS]
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in views[:2])
    assert disjoint(views[0], views[1])


def test_requests_share_one_buffer() -> None:
    workspace = WorkspaceManager("cpu")
    [first] = workspace.get_simultaneous(spec(1000))
    [second] = workspace.get_simultaneous(((500,), torch.float64))
    assert first.data_ptr() == second.data_ptr()
    assert workspace.report().bytes == 4096


def test_int8_and_uint8_views_are_of_the_same_bytes() -> None:
    workspace = WorkspaceManager("cpu")
    workspace.get_simultaneous(spec(4, dtype=torch.int8))[0].fill_(-1)
    assert workspace.get_simultaneous(spec(4, dtype=torch.uint8))[0].tolist() == [255] * 4


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="negative"):
        WorkspaceManager("cpu").get_simultaneous(spec(-1))


# -- slots


def test_each_ubatch_and_lane_has_a_slot_of_its_own() -> None:
    workspace = WorkspaceManager("cpu", num_ubatches=2, num_lanes=2)
    views = []
    for ubatch in range(2):
        for lane in range(2):
            with workspace.use_ubatch(ubatch), workspace.use_lane(lane):
                views += workspace.get_simultaneous(spec(100))
    assert all(disjoint(a, b) for i, a in enumerate(views) for b in views[:i])


def test_one_slots_growth_leaves_the_views_of_another() -> None:
    workspace = WorkspaceManager("cpu", num_ubatches=2)
    [kept] = workspace.get_simultaneous(spec(100))
    kept.fill_(1)
    with workspace.use_ubatch(1):
        workspace.get_simultaneous(spec(100))
        workspace.get_simultaneous(spec(MIB))[0].fill_(2)
    assert workspace.get_simultaneous(spec(100))[0].data_ptr() == kept.data_ptr()
    assert kept.eq(1).all()


def test_only_a_slot_that_needs_it_grows() -> None:
    workspace = WorkspaceManager("cpu", num_ubatches=2)
    workspace.get_simultaneous(spec(1024))
    assert [slot.bytes for slot in workspace.report().slots] == [4096, 0]


def test_r110_an_override_counts_for_every_lookup() -> None:
    workspace = WorkspaceManager("cpu", num_ubatches=2)
    own = [*workspace.get_simultaneous(spec(64)), workspace.get_persistent("ids", (64,), FLOATS)]
    with workspace.use_ubatch(1):
        built = [
            *workspace.get_simultaneous(spec(64)),
            workspace.get_persistent("ids", (64,), FLOATS),
        ]
    assert all(disjoint(a, b) for a in own for b in built)
    assert workspace.get_persistent("ids", (64,), FLOATS) is own[1]


def test_a_slot_that_does_not_exist_is_refused() -> None:
    workspace = WorkspaceManager("cpu", num_lanes=2)
    with pytest.raises(InvalidArgument, match="num_lanes=3"), workspace.use_lane(2):
        pass
    with pytest.raises(InvalidArgument, match="num_ubatches=2"), workspace.use_ubatch(1):
        pass
    with pytest.raises(InvalidArgument):
        WorkspaceManager("cpu", num_lanes=0)


def _fill_and_check(workspace: WorkspaceManager, lane: int, value: int) -> int:
    """Wrong rounds of 100 in which scratch is filled, and read after a pause."""
    wrong = 0
    with workspace.use_lane(lane):
        for _ in range(100):
            [view] = workspace.get_simultaneous(spec(2048), owner=f"thread {value}")
            view.fill_(value)
            time.sleep(0.0002)
            wrong += int(view.ne(value).any())
    return wrong


def test_r117_streams_with_a_lane_each_never_meet() -> None:
    workspace = WorkspaceManager("cpu", num_lanes=2)
    workspace.reserve("fill", spec(2048))
    wrong: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: wrong.append(_fill_and_check(workspace, n, n)))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


# -- reservations and the lock


def test_a_reservation_is_a_floor_and_not_added() -> None:
    workspace = WorkspaceManager("cpu")
    assert workspace.reserve("a", spec(1024)) == 4096
    assert workspace.reserve("b", spec(512)) == 2048
    assert workspace.report().bytes == workspace.report().floor == 4096
    workspace.reserve("b", spec(2048))
    assert workspace.report().bytes == 8192


def test_a_reservation_raises_every_slot_or_the_lanes_that_are_named() -> None:
    workspace = WorkspaceManager("cpu", num_ubatches=2, num_lanes=2)
    workspace.reserve("all", spec(256))
    workspace.reserve("main", spec(1024), lanes=[0])
    sizes = {slot.slot: slot.bytes for slot in workspace.report().slots}
    assert sizes == {(0, 0): 4096, (0, 1): 1024, (1, 0): 4096, (1, 1): 1024}


def test_growth_drops_the_old_buffer_before_it_takes_the_new_one() -> None:
    alive: list[bool] = []
    held: list[weakref.ref[Any]] = []

    @contextmanager
    def context() -> Iterator[None]:
        gc.collect()
        alive.append(any(ref() is not None for ref in held))
        yield

    workspace = WorkspaceManager("cpu", alloc_context=context)
    workspace.reserve("a", spec(1024))
    held.append(weakref.ref(workspace._slot.buffer))
    alive.clear()
    workspace.reserve("a", spec(2048))
    assert alive
    assert not any(alive)


def test_a_growth_that_fails_can_be_asked_for_again() -> None:
    failing: list[bool] = []

    @contextmanager
    def context() -> Iterator[None]:
        if failing:
            raise MemoryError
        yield

    workspace = WorkspaceManager("cpu", alloc_context=context)
    workspace.reserve("a", spec(1024))
    failing.append(True)
    with pytest.raises(MemoryError):
        workspace.get_simultaneous(spec(2048))
    failing.clear()
    workspace.get_simultaneous(spec(8))
    assert workspace.report().bytes == 4096, "the floor holds again"


def test_r107_after_the_lock_only_the_call_that_would_grow_fails() -> None:
    workspace = WorkspaceManager("cpu")
    workspace.lock()
    need = 760_000
    with pytest.raises(WorkspaceLocked) as caught:
        workspace.get_simultaneous(spec(need, dtype=torch.uint8), owner="decode")
    assert (caught.value.name, caught.value.have) == ("decode", 0)
    assert caught.value.needed == total_bytes([spec(need, dtype=torch.uint8)])
    with pytest.raises(WorkspaceLocked, match=r"test_workspace\.py"):
        workspace.get_simultaneous(spec(1))
    workspace.unlock()
    workspace.get_simultaneous(spec(need, dtype=torch.uint8), owner="decode")
    workspace.lock()
    assert workspace.is_locked
    workspace.get_simultaneous(spec(100), owner="decode")


def test_r107_lock_names_the_kernels_without_a_reservation() -> None:
    workspace = WorkspaceManager("cpu")
    workspace.reserve("sampler", spec(1024))
    workspace.get_simultaneous(spec(64), owner="sampler")
    workspace.get_simultaneous(spec(64), owner="decode")
    assert workspace.lock() == ("decode",)


def test_r108_a_reservation_for_the_config_covers_every_request() -> None:
    """Split-KV partials: they depend on the cached length too, not on the batch alone."""

    def need(batch: int, cached: int) -> TensorSpec:
        return spec(batch, -(-cached // 4096), 16)

    workspace = WorkspaceManager("cpu")
    workspace.reserve("decode", need(8, 4096))
    workspace.lock()
    with pytest.raises(WorkspaceLocked):
        workspace.get_simultaneous(need(8, 114_688), owner="decode")
    workspace.unlock()
    workspace.reserve("decode", need(8, 114_688))
    workspace.lock()
    for batch in range(1, 9):
        for cached in (1, 4096, 4097, 114_688):
            workspace.get_simultaneous(need(batch, cached), owner="decode")


def test_no_slot_moves_after_the_lock() -> None:
    workspace = WorkspaceManager("cpu")
    workspace.reserve("a", spec(4096))
    [before] = workspace.get_simultaneous(spec(4096))
    workspace.lock()
    for size in (1, 4096, 77):
        assert workspace.get_simultaneous(spec(size))[0].data_ptr() == before.data_ptr()
    with pytest.raises(WorkspaceLocked):
        workspace.reserve("b", spec(8192))
    assert workspace.get_simultaneous(spec(4096))[0].data_ptr() == before.data_ptr()


# -- kept by key


def test_what_is_kept_is_made_once_a_slot() -> None:
    workspace = WorkspaceManager("cpu", num_lanes=2)
    made: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    first = workspace.get_persistent_resource("plan", make)
    assert workspace.get_persistent_resource("plan", make) is first
    with workspace.use_lane(1):
        assert workspace.get_persistent_resource("plan", make) is not first
    assert len(made) == 2


def test_new_keys_are_refused_after_the_lock() -> None:
    workspace = WorkspaceManager("cpu")
    kept = workspace.get_persistent("a", (4,), FLOATS)
    workspace.lock()
    assert workspace.get_persistent("a", (4,), FLOATS) is kept
    with pytest.raises(WorkspaceLocked, match="'b'"):
        workspace.get_persistent("b", (4,), FLOATS)
    with pytest.raises(WorkspaceLocked):
        workspace.get_persistent_resource("c", object)


@pytest.mark.parametrize(
    ("shape", "dtype", "zeroed"),
    [((5,), FLOATS, False), ((4,), torch.int32, False), ((4,), FLOATS, True)],
)
def test_one_key_is_one_kind_of_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, zeroed: bool
) -> None:
    workspace = WorkspaceManager("cpu")
    workspace.get_persistent("a", (4,), FLOATS)
    with pytest.raises(InvalidArgument, match="another key"):
        workspace.get_persistent("a", shape, dtype, zeroed=zeroed)


def test_r111_scratch_that_others_dirty_is_never_the_zeroed_kind() -> None:
    workspace = WorkspaceManager("cpu")
    counters = workspace.get_persistent("B", (64,), torch.int32, zeroed=True)
    for _ in range(1000):
        workspace.get_simultaneous(spec(64, dtype=torch.int32), owner="A")[0].fill_(7)
        workspace.check_zeroed("B")
        counters.add_(1).sub_(1)
    counters[3] = 1
    with pytest.raises(StateError, match="'B' has 1 element"):
        workspace.check_zeroed("B")
    with pytest.raises(InvalidArgument):
        workspace.check_zeroed("A")


def test_the_buffers_of_slots_are_told_and_go_with_the_workspace() -> None:
    workspace = WorkspaceManager("cpu", num_lanes=2)
    workspace.reserve("kernel", spec(64), lanes=[1])
    counters = weakref.ref(workspace.get_persistent("counters", (4,), torch.int32, zeroed=True))
    assert {slot: each.numel() for slot, each in workspace.buffers.items()} == {(0, 1): 256}
    workspace.close()
    assert workspace.buffers == {}
    assert counters() is None
    with pytest.raises(WorkspaceLocked):
        workspace.get_simultaneous(spec(4))


# -- sleep and wake, told by another


def test_a_manager_whose_memory_another_releases_is_told() -> None:
    workspace = WorkspaceManager("cpu")
    counters = workspace.get_persistent("counters", (4,), torch.int32, zeroed=True)
    plans: list[int] = []
    workspace.get_persistent_resource("plan", object, on_wake=lambda plan: plans.append(1))
    library = torch.ones(4)
    workspace.adopt("library", lambda: [library], zeroed=True, on_wake=lambda: plans.append(2))
    workspace.release()
    with pytest.raises(AsleepError, match="workspace"):
        workspace.get_simultaneous(spec(4))
    counters.fill_(9)
    workspace.restore()
    assert counters.eq(0).all()
    assert library.eq(0).all()
    assert plans == [1, 2]
    workspace.get_simultaneous(spec(4))
    workspace.restore()
    assert workspace.wake_count == 1, "a second restore does nothing"


def test_r118_a_plan_from_before_the_wake_is_refused() -> None:
    workspace = WorkspaceManager("cpu")
    planned = workspace.wake_count
    workspace.require_current(planned, "the decode plan")
    workspace.release()
    workspace.restore()
    with pytest.raises(StateError, match=r"the decode plan was planned .* before the last wake"):
        workspace.require_current(planned, "the decode plan")


# -- reports


def test_the_report_tells_who_has_what() -> None:
    workspace = WorkspaceManager("cpu", num_lanes=2)
    workspace.reserve("sampler", spec(1 << 18))
    workspace.get_simultaneous(spec(1 << 17), owner="decode")
    workspace.get_persistent("counters", (256,), torch.int32, zeroed=True)
    workspace.get_persistent_resource("plan", object)
    workspace.adopt("library", lambda: [torch.empty(MIB)])
    workspace.lock()
    report = workspace.report()
    assert report.bytes == 2 * MIB + 1024
    assert report.outside == 4 * MIB
    assert report.slots[0].high_water == MIB // 2
    text = str(report)
    for part in (
        "workspace on cpu: 2.00 MiB, locked",
        "lane 0: 1.00 MiB, largest request 0.50 MiB by decode",
        "lane 1: 1.00 MiB, no request yet",
        "reserved by sampler: 1.00 MiB in 2 slot(s)",
        "counters in slot (0, 0): 0.00 MiB, zeroed",
        "plan in slot (0, 0): size unknown",
        "adopted from library: 4.00 MiB, outside every pool",
        "without a reservation: decode",
    ):
        assert part in text
    values = json.loads(json.dumps(report.as_dict()))
    assert values["reservations"][0]["specs"] == [[[1 << 18], "torch.float32"]]


def test_a_request_without_a_name_is_told_by_its_place() -> None:
    workspace = WorkspaceManager("cpu")
    workspace.get_simultaneous(spec(4))
    assert "test_workspace.py" in workspace.report().slots[0].high_water_owner


# -- debug mode


@pytest.fixture
def debugged() -> WorkspaceManager:
    workspace = WorkspaceManager("cpu", num_lanes=2, debug=True)
    workspace.reserve("all", spec(1024))
    return workspace


def test_scratch_is_poisoned_before_it_is_handed_out(debugged: WorkspaceManager) -> None:
    assert debugged.get_simultaneous(spec(8))[0].isnan().all()
    assert debugged.get_simultaneous(spec(8, dtype=torch.int32))[0].eq(-1).all()


def test_a_view_that_a_later_request_took_over_is_reported(debugged: WorkspaceManager) -> None:
    [view] = debugged.get_simultaneous(spec(8), owner="first")
    part = view[2:4]
    assert view.shape == (8,)
    assert not debugged.findings
    with debugged.use_lane(1):
        debugged.get_simultaneous(spec(8), owner="elsewhere")
    part.fill_(1.0)
    assert not debugged.findings, "another lane is another slot"
    debugged.get_simultaneous(spec(8), owner="second")
    assert view.shape == (8,), "a shape reads no memory"
    with pytest.warns(UserWarning, match="first uses scratch .* after a later request by second"):
        part.add_(1.0)
    part.add_(1.0)
    assert len(debugged.findings) == 1


def test_results_are_plain_tensors_and_views_stay_checked(debugged: WorkspaceManager) -> None:
    [view] = debugged.get_simultaneous(spec(8), owner="kernel")
    view.copy_(torch.arange(8.0))
    assert type(view + 1) is Tensor
    assert type(view.view(2, 4)) is type(view)
    assert torch.equal(view.view(2, 4).sum(0), torch.tensor([4.0, 6.0, 8.0, 10.0]))


def test_an_input_that_is_itself_scratch_is_reported(debugged: WorkspaceManager) -> None:
    [logits] = debugged.get_simultaneous(spec(8), owner="model")
    with pytest.warns(UserWarning, match=r"input 1 of sampler is itself a view of slot \(0, 0\)"):
        debugged.get_simultaneous(spec(8), owner="sampler", inputs=(torch.zeros(3), logits))


def test_a_view_from_before_a_sleep_is_refused(debugged: WorkspaceManager) -> None:
    [view] = debugged.get_simultaneous(spec(8), owner="kernel")
    debugged.release()
    with pytest.raises(StateError, match="kernel was taken before a sleep"):
        view.zero_()
    debugged.restore()
    with pytest.raises(StateError, match="request it again"):
        torch.add(view, 1)
    debugged.get_simultaneous(spec(8), owner="kernel")[0].zero_()


def test_without_debug_views_are_plain_tensors() -> None:
    assert type(WorkspaceManager("cpu").get_simultaneous(spec(4))[0]) is Tensor
