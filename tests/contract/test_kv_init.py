"""KV initialisation on both nesting orders: what the scope guarantees, and what fails without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import support
from hal.core import BackupOptions, Policy, SleepManager
from hal.cpu.platform import CpuPlatform
from hal.errors import InvalidArgument, Unsupported
from hal.host_pool import HostPool
from hal.platform import Flag, Platform, PoolNesting
from hal.pools import probe_flatten, storage_address
from support import MIB, Target

FIFO_TARGETS = {"cpu-fifo", "xpu-emulated", "xpu"}
KV_BYTES = 5 * MIB + 300_000  # leaves a tail in its segment


def build(
    sleeper: SleepManager, nesting: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache, the state made before it and the state made after it, as engines do."""
    with sleeper.kv_init(nesting=nesting, strict=True) as kv:  # type: ignore[arg-type]
        before = torch.arange(1000)
        with kv.cache():
            cache = kv.declare(torch.full((KV_BYTES,), 7, dtype=torch.uint8))
        after = torch.arange(1000, 2000)
    return cache, before, after


@pytest.mark.parametrize("nesting", ["auto", "fallback", "flatten"])
def test_state_survives_and_the_cache_is_not_copied(sleeper: SleepManager, nesting: str) -> None:
    cache, before, after = build(sleeper, nesting)
    addresses = [tensor.data_ptr() for tensor in (cache, before, after)]
    report = sleeper.sleep(level=1)
    assert report.tag("kv_cache").policy is Policy.DISCARD
    assert report.copied_bytes < MIB, "the cache was not backed up"
    sleeper.wake_up()
    assert [tensor.data_ptr() for tensor in (cache, before, after)] == addresses
    assert torch.equal(before, torch.arange(1000))
    assert torch.equal(after, torch.arange(1000, 2000))
    assert not cache.any()


def test_the_strategy_follows_the_probed_order(sleeper: SleepManager, target: Target) -> None:
    fifo = target.name in FIFO_TARGETS
    scope = sleeper.kv_init()
    assert sleeper.capabilities.nesting_found == "probed"
    assert sleeper.capabilities.pool_nesting is (PoolNesting.FIFO if fifo else PoolNesting.LIFO)
    assert scope.strategy == ("fallback" if fifo else "nest")
    cache, before, _ = build(sleeper)
    assert sleeper.tag_of(cache) == "kv_cache"
    assert sleeper.tag_of(before) == (None if fifo else "runtime")


def test_flatten_keeps_state_in_runtime_on_both_orders(sleeper: SleepManager) -> None:
    cache, before, after = build(sleeper, "flatten")
    assert sleeper.tag_of(cache) == "kv_cache"
    assert sleeper.tag_of(before) == sleeper.tag_of(after) == "runtime"


def test_an_unknown_strategy_is_refused(sleeper: SleepManager) -> None:
    with pytest.raises(InvalidArgument, match="'auto', 'fallback' or 'flatten'"):
        sleeper.kv_init(nesting="both")  # type: ignore[arg-type]


def test_flatten_is_refused_where_its_probe_failed(platform: Platform) -> None:
    found = platform.capabilities
    assert found.flatten, "the probe of every platform here has passed"
    platform._known[0] = replace(found, flatten=Flag(False, "an allocation landed elsewhere"))
    sleeper = SleepManager(platform, backup=BackupOptions(backing="anonymous"))
    with pytest.raises(Unsupported, match=r"flatten.*an allocation landed elsewhere"):
        sleeper.kv_init(nesting="flatten")
    assert sleeper.kv_init().strategy in {"nest", "fallback"}


@pytest.mark.parametrize(
    ("lands", "why"),
    [
        ([1, 1, 0], "before the inner scope"),
        ([0, 0, 0], "within the inner scope"),
        ([0, 1, 1], "after the inner scope"),
    ],
)
def test_the_probe_of_flatten_notices_each_allocation_that_lands_elsewhere(
    monkeypatch: pytest.MonkeyPatch, lands: list[int], why: str
) -> None:
    """An allocator that gives memory to another pool than the open one."""
    platform = CpuPlatform()
    pools: list[HostPool] = []
    make, turns = platform.create_pool, iter(lands)

    def create_pool(tag: str, device: int = 0) -> HostPool:
        pools.append(make(tag, device))
        return pools[-1]

    monkeypatch.setattr(platform, "create_pool", create_pool)
    monkeypatch.setattr(platform._scopes, "target", lambda: pools[next(turns)])
    flag = probe_flatten(platform)
    assert not flag
    assert why in flag.reason


# -- what goes wrong on a FIFO platform without the fallback


def emulated_xpu(**options: Any) -> Platform:
    from emulator.platforms import EmulatedXpuPlatform

    return EmulatedXpuPlatform(PoolNesting.FIFO, **options)


def cpu_fifo(**options: Any) -> Platform:
    return CpuPlatform(PoolNesting.FIFO, **options)


@pytest.fixture(
    params=[cpu_fifo, pytest.param(emulated_xpu, marks=support.needs_level_zero())],
    ids=["cpu-fifo", "xpu-emulated"],
)
def wrong(request: pytest.FixtureRequest) -> Callable[..., SleepManager]:
    """Makes a manager on a FIFO allocator that claims to be LIFO, so that no fallback is taken."""

    def make(**options: Any) -> SleepManager:
        platform = request.param(claims=PoolNesting.LIFO, **options)
        return SleepManager(platform, backup=BackupOptions(backing="anonymous"))

    return make


def test_without_the_fallback_kv_is_backed_up_as_state(wrong: Callable[..., SleepManager]) -> None:
    sleeper = wrong()
    cache, _before, _after = build(sleeper)
    assert sleeper.tag_of(cache) == "runtime"
    report = sleeper.sleep(level=1)
    assert report.tag("runtime").copied >= KV_BYTES, "bytes that nobody needs"
    assert report.tag("kv_cache") is None or report.tag("kv_cache").copied == 0
    sleeper.wake_up()
    assert cache.any(), "the cache was kept"


def test_without_the_fallback_scopes_the_other_way_round_destroy_a_block_table(
    wrong: Callable[..., SleepManager],
) -> None:
    sleeper = wrong()
    with sleeper.pool("kv_cache"):
        cache = torch.full((KV_BYTES,), 7, dtype=torch.uint8)
        with sleeper.pool("runtime"):
            table = torch.arange(1000)
    assert sleeper.tag_of(table) == "kv_cache"
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert not table.any()
    assert not cache.any()


def test_tags_from_the_open_scope_are_the_field_failure(
    wrong: Callable[..., SleepManager],
) -> None:
    """Both tensors come from the runtime pool, and both segments are tagged `kv_cache`."""
    sleeper = wrong(tag_from_scope=True)
    cache, _before, after = build(sleeper)
    with sleeper.pool("runtime") as runtime:
        pass
    assert [runtime.holds(storage_address(t)) for t in (cache, after)] == [True, True]
    assert [sleeper.tag_of(t) for t in (cache, after)] == ["kv_cache", "kv_cache"]
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert not after.any(), "a runtime tensor died with the cache"
    assert not cache.any()


@pytest.mark.parametrize("nesting", ["fallback", "flatten"])
def test_with_either_strategy_none_of_it_happens(
    wrong: Callable[..., SleepManager], nesting: str
) -> None:
    """On the same allocators, tags from the open scope included."""
    for options in ({}, {"tag_from_scope": True}):
        sleeper = wrong(**options)
        cache, before, after = build(sleeper, nesting)
        assert sleeper.tag_of(cache) == "kv_cache"
        assert "kv_cache" not in {sleeper.tag_of(before), sleeper.tag_of(after)}
        assert sleeper.sleep(level=1).copied_bytes < MIB
        sleeper.wake_up()
        assert torch.equal(before, torch.arange(1000))
        assert torch.equal(after, torch.arange(1000, 2000))
        assert not cache.any()
