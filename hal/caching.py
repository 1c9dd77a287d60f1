"""A small caching allocator: blocks within segments, best fit, reuse, coalescing, trimming.

It stands in for torch's own where torch has no pools (host memory, emulated devices), and keeps
what matters of its behaviour: a freed block is reused by the next allocation that fits, and the
tail of a segment serves small allocations.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hal.pools import Ranges, Snapshot

ALIGNMENT = 512
SEGMENT = 2 << 20


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    segment: int
    free: bool = True
    previous: _Block | None = None
    next: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class CachingAllocator:
    """Blocks over segments that `grow(size) -> address` takes and `give_back(address)` returns.

    Thread-safe. `free` may run inside a garbage collection that interrupts an allocation on the
    same thread: it then only notes the address, and the next call that holds the lock does the
    work.
    """

    def __init__(self, grow: Callable[[int], int], give_back: Callable[[int], None]) -> None:
        self._grow, self._give_back = grow, give_back
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}
        self._free: list[tuple[int, int]] = []
        self._heads: dict[int, _Block] = {}
        self._segments: dict[int, int] = {}
        self._freed: deque[int] = deque()
        self.generation = 0
        """Changes with every allocation, free and trim."""
        self._closed = False

    def close(self) -> None:
        """Keep no freed segment from now on."""
        self._closed = True
        self.trim()

    def allocate(self, size: int) -> int:
        """The address of a block of at least `size` bytes, aligned to 512."""
        size = round_up(max(size, 1), ALIGNMENT)
        with self._lock:
            self._drain()
            block = self._best_fit(size) or self._new_segment(size)
            self._take(block, size)
            self.generation += 1
            return block.address

    def free(self, address: int) -> None:
        """Give a block back to the cache; never blocks."""
        self._freed.append(address)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
                if self._closed:
                    self._give_back_empty()
            finally:
                self._lock.release()

    def trim(self) -> int:
        """Give back segments without live blocks; returns bytes."""
        with self._lock:
            self._drain()
            return self._give_back_empty()

    def contains(self, address: int) -> bool:
        """Whether an address lies in one of the allocator's segments."""
        with self._lock:
            return any(0 <= address - start < size for start, size in self._segments.items())

    def snapshot(self) -> Snapshot:
        with self._lock:
            self._drain()
            live = {segment: _live(head) for segment, head in self._heads.items()}
            return Snapshot(self.generation, live)

    def _drain(self) -> None:
        while self._freed:
            self._release(self._blocks[self._freed.popleft()])
            self.generation += 1

    def _give_back_empty(self) -> int:
        empty = [head for head in self._heads.values() if head.free and head.next is None]
        for head in empty:
            self._give_back(head.segment)
            self._free.remove(head.key)
            del self._blocks[head.address], self._heads[head.segment]
            del self._segments[head.segment]
        self.generation += bool(empty)
        return sum(head.size for head in empty)

    def _best_fit(self, size: int) -> _Block | None:
        index = bisect_left(self._free, (size, 0))
        return self._blocks[self._free[index][1]] if index < len(self._free) else None

    def _new_segment(self, size: int) -> _Block:
        size = round_up(size, SEGMENT)
        address = self._grow(size)
        block = _Block(address, size, segment=address)
        self._blocks[address] = self._heads[address] = block
        self._segments[address] = size
        insort(self._free, block.key)
        return block

    def _take(self, block: _Block, size: int) -> None:
        self._free.remove(block.key)
        block.free = False
        if block.size == size:
            return
        rest = _Block(
            block.address + size, block.size - size, block.segment, True, block, block.next
        )
        if rest.next:
            rest.next.previous = rest
        block.size, block.next = size, rest
        self._blocks[rest.address] = rest
        insort(self._free, rest.key)

    def _release(self, block: _Block) -> None:
        block.free = True
        if block.next and block.next.free:
            self._free.remove(block.next.key)
            self._absorb(block, block.next)
        if block.previous and block.previous.free:
            previous = block.previous
            self._free.remove(previous.key)
            self._absorb(previous, block)
            block = previous
        insort(self._free, block.key)

    def _absorb(self, block: _Block, following: _Block) -> None:
        block.size += following.size
        block.next = following.next
        if block.next:
            block.next.previous = block
        del self._blocks[following.address]


def _live(head: _Block) -> Ranges:
    ranges: list[tuple[int, int]] = []
    block: _Block | None = head
    while block:
        if not block.free:
            ranges.append((block.address - block.segment, block.size))
        block = block.next
    return tuple(ranges)
