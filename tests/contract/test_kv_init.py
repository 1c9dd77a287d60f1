"""KV initialisation on both nesting orders: what the scope guarantees, and what fails without."""

from __future__ import annotations

import pytest
import torch

from hal.core import BackupOptions, Policy, SleepManager
from hal.cpu.platform import CpuPlatform
from hal.errors import InvalidArgument
from hal.platform import PoolNesting
from support import MIB, Target

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
    fifo = target.name.endswith("fifo")
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


def wrong(*, tag_from_scope: bool = False) -> SleepManager:
    """A manager on a FIFO allocator that claims to be LIFO, so that no fallback is taken."""
    platform = CpuPlatform(PoolNesting.FIFO, claims=PoolNesting.LIFO, tag_from_scope=tag_from_scope)
    return SleepManager(platform, backup=BackupOptions(backing="anonymous"))


def test_without_the_fallback_kv_is_backed_up_as_state() -> None:
    sleeper = wrong()
    cache, _before, _after = build(sleeper)
    assert sleeper.tag_of(cache) == "runtime"
    assert sleeper.sleep(level=1).tag("runtime").copied >= KV_BYTES
    sleeper.wake_up()


def test_without_the_fallback_scopes_the_other_way_round_destroy_a_block_table() -> None:
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


def test_tags_from_the_open_scope_let_a_runtime_tensor_die_with_the_cache() -> None:
    sleeper = wrong(tag_from_scope=True)
    cache, _before, after = build(sleeper)
    assert sleeper.tag_of(after) == "kv_cache", "it sits in the tail of the cache's segment"
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert not after.any()
    assert not cache.any()
