"""The allocator's contract with vLLM, on the host in both nesting orders and on emulated devices;
needs no vLLM.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hal.core import SleepManager
from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.integrations.vllm.dcp_merge import BoundedMerge
from hal.core.integrations.vllm.lora import preserve_adapters
from hal.core.integrations.vllm.options import PluginOptions
from hal.core.integrations.vllm.scratch import DecodeScratch, SortInto
from hal.errors import InvalidArgument, OutOfDeviceMemory, StateError
from hal.platform import Platform
from support import MIB, TARGETS, Target

PLATFORMS = ("cpu", "cpu-fifo", "cuda-emulated", "rocm-emulated", "xpu-emulated")
SIZE = 4 * MIB


@pytest.fixture(
    params=[pytest.param(t, id=t.name, marks=t.marks) for t in TARGETS if t.name in PLATFORMS]
)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen


@pytest.fixture
def platform(target: Target) -> Iterator[Platform]:
    made = target.make()
    yield made
    made.device().clear_faults()


@pytest.fixture
def allocator(platform: Platform) -> Iterator[HalMemAllocator]:
    made = HalMemAllocator(lambda: platform, PluginOptions(backing="anonymous"))
    yield made
    if made.is_open:
        made.manager.device.clear_faults()
        made.wake_up()
    made.release_pools()


def filled(allocator: HalMemAllocator, tag: str, value: int) -> torch.Tensor:
    with allocator.use_memory_pool(tag):
        return torch.full((SIZE,), value, dtype=torch.uint8)


def test_making_one_opens_no_device() -> None:
    def no_platform() -> Platform:
        raise AssertionError("the platform was asked for")

    made = HalMemAllocator(no_platform, PluginOptions())
    assert not made.is_open
    assert made.get_current_usage() == 0
    assert made.pointer_to_data == {}
    assert made.sleeping_tags == frozenset()
    made.release_pools()


def test_a_pools_tag_is_on_every_segment_and_in_the_usage(allocator: HalMemAllocator) -> None:
    assert allocator.current_tag == "default"
    with allocator.use_memory_pool("weights"):
        assert allocator.current_tag == "weights"
        kept = torch.empty(SIZE, dtype=torch.uint8)
    with allocator.use_memory_pool():
        assert allocator.current_tag == "default"
        plain = torch.empty(SIZE, dtype=torch.uint8)
    data = allocator.pointer_to_data
    assert data[kept.data_ptr()].tag == "weights"
    assert data[plain.data_ptr()].tag == "default"
    assert data[kept.data_ptr()].handle[1:3] == (SIZE, kept.data_ptr())
    assert allocator.get_current_usage() == sum(entry.handle[1] for entry in data.values())
    assert set(allocator.allocator_and_pools) == {"weights", "default"}


def test_what_loading_leaves_behind_goes_back_at_the_end_of_the_scope(
    allocator: HalMemAllocator,
) -> None:
    with allocator.use_memory_pool("weights"):
        transient = torch.empty(8 * SIZE, dtype=torch.uint8)
        kept = torch.empty(SIZE, dtype=torch.uint8)
        del transient
    assert allocator.get_current_usage() == kept.nbytes


def test_kept_tags_return_and_the_others_come_back_empty(allocator: HalMemAllocator) -> None:
    weights, cache = filled(allocator, "weights", 3), filled(allocator, "kv_cache", 5)
    addresses, used = (weights.data_ptr(), cache.data_ptr()), allocator.get_current_usage()
    allocator.sleep(("weights",))
    assert allocator.sleeping_tags == {"weights", "kv_cache"}
    assert all(entry.is_asleep for entry in allocator.pointer_to_data.values())
    assert allocator.get_current_usage() == used
    allocator.wake_up()
    assert (weights.data_ptr(), cache.data_ptr()) == addresses
    assert bool((weights == 3).all())
    assert not cache.any()


def test_a_wake_defers_only_what_may_be_deferred(allocator: HalMemAllocator) -> None:
    held = [filled(allocator, tag, 1) for tag in ("weights", "kv_cache", "runtime", "workspace")]
    allocator.sleep(("weights", "runtime"))
    allocator.wake_up(["kv_cache"])
    assert allocator.sleeping_tags == {"weights"}
    allocator.wake_up(["weights"])
    assert allocator.sleeping_tags == frozenset()
    assert bool(held[2].all())


def test_a_tag_that_vllm_knows_and_nobody_used_is_no_error(allocator: HalMemAllocator) -> None:
    weights = filled(allocator, "weights", 1)
    allocator.discard(("kv_cache",))
    allocator.sleep(("weights", "runtime", "cudagraph"))
    allocator.wake_up(["kv_cache"])
    assert allocator.sleeping_tags == {"weights"}
    allocator.wake_up(["weights", "kv_cache"])
    assert bool(weights.all())


def test_a_discarded_tag_keeps_that_policy_in_the_sleep_that_follows(
    allocator: HalMemAllocator,
) -> None:
    weights, cache = filled(allocator, "weights", 3), filled(allocator, "kv_cache", 5)
    allocator.discard("kv_cache")
    assert allocator.sleeping_tags == {"kv_cache"}
    allocator.sleep(("weights", "kv_cache"))
    allocator.wake_up()
    assert bool((weights == 3).all())
    assert not cache.any()


def test_r13_a_wake_that_fails_can_be_made_again(
    allocator: HalMemAllocator, target: Target
) -> None:
    weights, cache = filled(allocator, "weights", 3), filled(allocator, "kv_cache", 5)
    allocator.sleep(("weights", "kv_cache"))
    allocator.manager.device.fail("create", nth=2, code=target.out_of_memory)
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.wake_up()
    assert isinstance(caught.value, RuntimeError)  # as vLLM's own allocators raise
    elsewhere = pickle.loads(pickle.dumps(caught.value))
    assert type(elsewhere) is OutOfDeviceMemory
    assert (str(elsewhere), elsewhere.tag) == (str(caught.value), caught.value.tag)
    assert allocator.sleeping_tags == {"weights", "kv_cache"}
    allocator.manager.device.clear_faults()
    allocator.wake_up()
    assert bool((weights == 3).all())
    assert bool((cache == 5).all())


def test_nested_pools_go_to_the_inner_one_or_are_refused(
    allocator: HalMemAllocator, platform: Platform
) -> None:
    """vLLM nests the cache in the runtime pool, except where the outer pool would win."""
    if platform.capabilities.pool_nesting.value == "fifo":
        with (
            allocator.use_memory_pool("runtime"),
            pytest.raises(StateError, match="outermost"),
            allocator.use_memory_pool("kv_cache"),
        ):
            pass
        assert allocator.current_tag == "default"
        return
    with allocator.use_memory_pool("runtime"):
        table = torch.empty(SIZE, dtype=torch.uint8)
        with allocator.use_memory_pool("kv_cache"):
            cache = torch.empty(SIZE, dtype=torch.uint8)
    assert allocator.manager.tag_of(table) == "runtime"
    assert allocator.manager.tag_of(cache) == "kv_cache"


def test_pools_that_are_released_twice_leave_nothing(allocator: HalMemAllocator) -> None:
    weights = filled(allocator, "weights", 1)
    device = allocator.manager.device
    del weights
    allocator.release_pools()
    allocator.release_pools()
    assert not allocator.is_open
    assert allocator.get_current_usage() == 0
    assert device.counters().segments == 0


def test_tensors_outlive_the_pools_asleep_or_not(allocator: HalMemAllocator) -> None:
    weights = filled(allocator, "weights", 1)
    device = allocator.manager.device
    allocator.sleep(("weights",))
    allocator.release_pools()
    assert device.counters().asleep_bytes == SIZE
    del weights
    assert device.counters().asleep_bytes == 0


class Adapted(torch.nn.Module):
    """A layer with adapter slots, as vLLM's: plain attributes, no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((SIZE,), 2.0), requires_grad=False)
        self.lora_a_stacked = (torch.full((1000,), 3.0), torch.full((10,), 4.0))
        self.punica_wrapper = SimpleNamespace(indices=torch.full((20,), 5.0), name="metadata")


def test_adapters_in_the_weights_pool_survive_level_2(allocator: HalMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        model = torch.nn.Sequential(Adapted())
    preserve_adapters(allocator, SimpleNamespace(lora_config=object(), model=model))
    allocator.sleep(())
    allocator.wake_up()
    layer = model[0]
    assert not layer.weight.any()
    assert [int(t.unique()) for t in layer.lora_a_stacked] == [3, 4]
    assert int(layer.punica_wrapper.indices.unique()) == 5


# -- options


def test_options_survive_the_environment() -> None:
    chosen = PluginOptions.from_config(
        {"retain": False, "budget": 5 << 30, "wait_for_memory": 1.5, "backing": "file:/x"}, {}
    )
    assert chosen == PluginOptions(
        retain=False, budget=5 << 30, wait_for_memory=1.5, backing="file:/x"
    )
    assert PluginOptions.from_environment(chosen.to_environment()) == chosen


def test_a_config_is_over_the_environment() -> None:
    environment = {"HAL_RETAIN": "0", "HAL_PARK": "1"}
    chosen = PluginOptions.from_config({"retain": True}, environment)
    assert (chosen.retain, chosen.park) == (True, True)


@pytest.mark.parametrize("given", [{"retian": True}, {"park": "perhaps"}])
def test_a_mistake_in_the_options_is_named(given: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=r"retian|PARK"):
        PluginOptions.from_config(given, {})


# -- scratch


def workspace_only(allocator: HalMemAllocator) -> int:
    assert set(allocator.bytes_by_tag()) == {"workspace"}
    return allocator.bytes_by_tag()["workspace"][0]


def test_the_hosts_sort_writes_into_scratch_with_the_same_result() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    buffers: list[torch.Tensor] = []

    def ask(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        buffers[:] = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
        return buffers

    expected = logits.sort(dim=-1, descending=False)
    with SortInto(ask):
        values, order = logits.sort(dim=-1, descending=False)
    assert [values.data_ptr(), order.data_ptr()] == [b.data_ptr() for b in buffers]
    assert torch.equal(values, expected.values)
    assert torch.equal(order, expected.indices)


def test_decode_scratch_is_shared_and_an_outgrown_buffer_keeps_its_address(
    allocator: HalMemAllocator,
) -> None:
    scratch = DecodeScratch(allocator, torch.device("cpu"))
    small = scratch.take(SIZE)
    assert scratch.take(SIZE // 2).data_ptr() == small.data_ptr()
    assert scratch.take(2 * SIZE).numel() >= 2 * SIZE
    assert workspace_only(allocator) == 3 * SIZE
    allocator.sleep(())
    allocator.wake_up()
    assert not small.any()


@pytest.mark.parametrize("rows", [1, 1024, 1500])
@pytest.mark.parametrize("offsets", [False, True])
def test_the_bounded_merge_gives_what_all_rows_at_once_give(
    allocator: HalMemAllocator, rows: int, offsets: bool
) -> None:
    dcp, k, width = 2, 4, 32
    source = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, width, generator=source)
    local = torch.stack([torch.randperm(width, generator=source)[:k] for _ in range(rows)])
    starts = torch.arange(rows) % 3 if offsets else None
    expected = local.clone().to(torch.int32)
    pack_and_select(logits, expected, k, dcp, starts)
    merge = BoundedMerge(
        allocator,
        torch.device("cpu"),
        dcp=dcp,
        k=k,
        kernels=(pack, select),
        gather=other_rank_is_shifted,
    )
    found = local.clone().to(torch.int32)
    merge(logits, found, k, 0, dcp, 1, starts)
    assert torch.equal(found, expected)
    assert workspace_only(allocator) >= (1 + 2 * dcp) * 8 * 1024 * k


def pack(
    logits: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    rank: int,
    world: int,
    _interleave: int,
    starts: torch.Tensor | None,
) -> None:
    """Candidates (score, global index) of a rank, as vLLM's kernel packs them."""
    shifted = indices.long() if starts is None else indices.long() + starts[:, None]
    out[..., 0] = logits.gather(1, shifted % logits.shape[1])
    out[..., 1] = (indices * world + rank).float()


def select(gathered: torch.Tensor, k: int, *, out: torch.Tensor) -> None:
    best = gathered[..., 0].topk(k, dim=1).indices
    out.copy_(gathered[..., 1].gather(1, best).to(out.dtype))


def other_rank_is_shifted(out: torch.Tensor, own: torch.Tensor) -> None:
    """A gather over two ranks, the other of which has other scores and indices."""
    out[0] = own
    out[1, ..., 0] = own[..., 0] * 0.5 + 0.1
    out[1, ..., 1] = own[..., 1] + 1


def pack_and_select(
    logits: torch.Tensor,
    indices: torch.Tensor,
    k: int,
    dcp: int,
    starts: torch.Tensor | None,
) -> None:
    rows = indices.shape[0]
    packed = torch.empty(rows, k, 2)
    pack(logits, indices, packed, 0, dcp, 1, starts)
    gathered = torch.empty(dcp, rows, k, 2)
    other_rank_is_shifted(gathered, packed)
    select(gathered.transpose(0, 1).reshape(rows, dcp * k, 2), k, out=indices)


def test_ranks_that_are_not_known_yet_do_not_stop_a_sleep(allocator: HalMemAllocator) -> None:
    filled(allocator, "weights", 1)
    assert isinstance(allocator.manager, SleepManager)
    told: list[str] = []

    class Ranks:
        def failures(self, transition: str, own: BaseException | None) -> dict[int, str]:
            told.append(transition)
            return {}

    allocator.sleep(())
    allocator.group = Ranks()  # type: ignore[assignment]
    allocator.wake_up()
    assert told == ["wake_up"]
