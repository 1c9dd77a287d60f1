"""The caching allocator against a plain model: no overlap, reuse, coalescing, trimming."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.caching import ALIGNMENT, SEGMENT, CachingAllocator, round_up

MIB = 1 << 20


class Memory:
    """Address space that hands out segments and wants them back."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.segments: dict[int, int] = {}
        self._next = itertools.count(1 << 32, 1 << 30)
        self.limit = limit

    def grow(self, size: int) -> int:
        if sum(self.segments.values()) + size > self.limit:
            raise MemoryError(size)
        address = next(self._next)
        self.segments[address] = size
        return address

    def give_back(self, address: int) -> None:
        del self.segments[address]


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def allocator(memory: Memory) -> CachingAllocator:
    return CachingAllocator(memory.grow, memory.give_back)


def test_small_blocks_share_a_segment_and_its_tail(
    memory: Memory, allocator: CachingAllocator
) -> None:
    large = allocator.allocate(SEGMENT + 1000)
    small = allocator.allocate(100)
    assert small == large + round_up(SEGMENT + 1000, ALIGNMENT)
    assert list(memory.segments.values()) == [2 * SEGMENT]


def test_the_best_fitting_free_block_is_reused(allocator: CachingAllocator) -> None:
    addresses = [allocator.allocate(size) for size in (400_000, 200_000, 300_000, 100)]
    allocator.free(addresses[0])
    allocator.free(addresses[2])
    assert allocator.allocate(250_000) == addresses[2]


def test_neighbours_coalesce_and_empty_segments_go(
    memory: Memory, allocator: CachingAllocator
) -> None:
    addresses = [allocator.allocate(MIB // 2) for _ in range(4)]
    for address in (addresses[1], addresses[3], addresses[0], addresses[2]):
        allocator.free(address)
    assert allocator.allocate(SEGMENT) == addresses[0]
    allocator.free(addresses[0])
    assert allocator.trim() == SEGMENT
    assert memory.segments == {}
    assert allocator.trim() == 0


def test_a_failed_growth_changes_nothing() -> None:
    memory = Memory(limit=SEGMENT)
    allocator = CachingAllocator(memory.grow, memory.give_back)
    first = allocator.allocate(MIB)
    before = allocator.snapshot()
    with pytest.raises(MemoryError):
        allocator.allocate(2 * SEGMENT)
    assert allocator.snapshot() == before
    assert allocator.allocate(MIB) == first + MIB


def test_a_free_never_blocks_even_while_another_thread_grows(memory: Memory) -> None:
    growing, go_on = threading.Event(), threading.Event()

    def slow_grow(size: int) -> int:
        if memory.segments:
            growing.set()
            assert go_on.wait(30)
        return memory.grow(size)

    allocator = CachingAllocator(slow_grow, memory.give_back)
    address = allocator.allocate(MIB)
    thread = threading.Thread(target=allocator.allocate, args=(4 * MIB,))
    thread.start()
    assert growing.wait(30)
    allocator.free(address)
    go_on.set()
    thread.join()
    assert allocator.trim() == SEGMENT


def test_after_close_a_freed_segment_goes_at_once(
    memory: Memory, allocator: CachingAllocator
) -> None:
    address = allocator.allocate(MIB)
    allocator.close()
    assert len(memory.segments) == 1
    allocator.free(address)
    assert memory.segments == {}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(1, 5 * MIB)),
            st.tuples(st.just("free"), st.integers(0, 50)),
            st.tuples(st.just("trim"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_blocks_never_overlap_and_the_books_agree(steps: list[tuple[str, int]]) -> None:
    memory = Memory()
    allocator = CachingAllocator(memory.grow, memory.give_back)
    live: dict[int, int] = {}
    for step, value in steps:
        generation = allocator.snapshot().generation
        if step == "allocate":
            address = allocator.allocate(value)
            assert address % ALIGNMENT == 0
            live[address] = round_up(value, ALIGNMENT)
            assert allocator.snapshot().generation != generation
        elif step == "free" and live:
            address = sorted(live)[value % len(live)]
            del live[address]
            allocator.free(address)
            assert allocator.snapshot().generation != generation
        elif step == "trim":
            allocator.trim()
            assert all(allocator.snapshot().live.values()), "no segment without a live block"
        snapshot = allocator.snapshot()
        found = {
            segment + offset: size
            for segment, ranges in snapshot.live.items()
            for offset, size in ranges
        }
        assert found == live
        assert set(snapshot.live) == set(memory.segments)
        for segment, ranges in snapshot.live.items():
            ends = [0, *(offset + size for offset, size in ranges)]
            assert all(end <= start for end, (start, _) in zip(ends, ranges, strict=False))
            assert ends[-1] <= memory.segments[segment]
