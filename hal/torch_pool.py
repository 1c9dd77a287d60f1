"""Pools of an accelerator: a torch `MemPool` over the pool's own pair of entry points in libhal.

Each pool has its own pair, so whichever scope torch allocates from, a segment lands in the ledger
under its own tag. What differs between vendors is the few names of `TorchMemory`, which the
vendor's room fills in.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hal.errors import HalError, OutOfDeviceMemory, StateError, Unsupported
from hal.memory import TorchUsage
from hal.native import Device
from hal.pools import Pool, Ranges, Snapshot

EXPANDABLE = "expandable_segments"
"""The allocator setting with which torch bypasses a pool's own allocator, or refuses a pool."""

LIVE_UNLESS = "inactive"
"""The one block state of torch's snapshots that holds nothing; any other may still be read."""


@dataclass(frozen=True)
class TorchMemory:
    """A vendor's names for torch's memory pools.

    `make_pool(allocate, free, index)` returns a device's MemPool over two function addresses;
    `use(pool, index)` directs this thread's allocations to it; `snapshot()` lists every segment as
    torch's memory snapshots do; `empty_cache()` gives the caches of dropped pools back; `enter()`
    and `leave(token)` surround the outermost scope of the process; `warm_up(index)` makes the
    libraries' own scratch before a scope could catch it; `is_capturing()` tells whether this thread
    captures a graph.
    """

    make_pool: Callable[[int, int, int], Any]
    use: Callable[[Any, int], AbstractContextManager[Any]]
    snapshot: Callable[[], Sequence[Mapping[str, Any]]]
    empty_cache: Callable[[], None]
    enter: Callable[[], Any]
    leave: Callable[[Any], None]
    warm_up: Callable[[int], None]
    is_capturing: Callable[[], bool]
    no_capture: str = ""
    """Why graphs cannot be captured into a pool that sleeps; "" where they can."""


class ProcessScopes:
    """What all threads share: the count of open scopes, and the MemPools that are to go.

    Process-wide settings change around the outermost scope alone. torch aborts the process when a
    MemPool is destroyed while any scope is open, so those that nobody needs wait here.
    """

    def __init__(self, memory: TorchMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._open = 0
        self._token: Any = None
        self._dropped: deque[Any] = deque()

    def drop(self, pool: list[Any]) -> None:
        """Take the MemPool out of its holder; may run inside a garbage collection."""
        self._dropped.extend(pool)
        pool.clear()

    def destroy_dropped(self) -> None:
        """Destroy the MemPools that were dropped, unless a scope or a capture forbids it now."""
        with self._lock:
            if not self._open and not self._memory.is_capturing():
                while self._dropped:
                    self._dropped.pop()

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self._lock:
            if not self._open:
                self._token = self._memory.enter()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._memory.leave(self._token)
            self.destroy_dropped()


class TorchPool(Pool):
    """A pool of device memory; its tensors are ordinary torch tensors."""

    def __init__(
        self, device: Device, tag: str, memory: TorchMemory, scopes: ProcessScopes
    ) -> None:
        super().__init__(device, tag)
        self._memory, self._process = memory, scopes
        self._holder = [self._make()]
        weakref.finalize(self, scopes.drop, self._holder)
        self._shared = False

    @property
    def torch_pool(self) -> Any:
        """The MemPool, for torch's own calls."""
        if not self._holder:
            raise StateError(f"pool {self.tag!r} is closed")
        return self._holder[0]

    def _make(self) -> Any:
        entries = self._entries
        return self._memory.make_pool(entries.allocate, entries.free, self.device.index)

    @contextmanager
    def _capture(self) -> Iterator[tuple[int, int]]:
        if self._memory.no_capture:
            raise Unsupported(
                "a pool for captured graphs", self.device.driver, self._memory.no_capture
            )
        # A captured graph keeps the pool's id, and reads blocks that look free.
        self._shared = True
        with self._surroundings():
            yield self.torch_pool.id

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with self._surroundings(), self._memory.use(self.torch_pool, self.device.index):
            yield

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        self._memory.warm_up(self.device.index)
        with self._process.scope():
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(error) from error

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> HalError:
        """What libhal knows of the allocation that torch gave up on."""
        own = self.device.take_pool_error(self.id, tag=self.tag)
        if own is not None and not isinstance(own, OutOfDeviceMemory):
            return own
        needed = own.needed if own is not None else None
        return OutOfDeviceMemory(self.tag, needed, self._free_memory(), str(error).split(".")[0])

    def _free_memory(self) -> int | None:
        try:
            return self.device.memory()[0]
        except HalError:
            return None

    def snapshot(self) -> Snapshot:
        generation, segments = self.generation, tuple(self.segments())
        own = {segment.address for segment in segments}
        live = {
            entry["address"]: _whole(entry) if self._shared else _live(entry)
            for entry in self._memory.snapshot()
            if entry["address"] in own
        }
        return Snapshot(generation, live, segments)

    @property
    def generation(self) -> int:
        # Blocks come only from scopes and captures.
        return self._entered

    def holds(self, address: int) -> bool:
        """As torch has it, in the MemPool that serves this pool now."""
        own = self.torch_pool.id
        return any(
            entry["segment_pool_id"] == own
            and 0 <= address - entry["address"] < entry["total_size"]
            for entry in self._memory.snapshot()
        )

    def trim(self) -> int:
        """Give segments without live blocks back; returns bytes.

        torch frees the cache of a MemPool only when the MemPool goes. So where whole segments are
        free, later allocations get a new MemPool over the same entries, and the old one goes; its
        live tensors are not touched.
        """
        if self._shared or self.open_scopes or not self.snapshot().has_free_segment:
            return 0
        before = self._held_bytes()
        self._process.drop(self._holder)
        self._holder.append(self._make())
        self._process.destroy_dropped()
        self._memory.empty_cache()
        return before - self._held_bytes()

    def _held_bytes(self) -> int:
        return sum(segment.size for segment in self.segments())

    def close(self) -> None:
        super().close()
        self._process.drop(self._holder)
        self._process.destroy_dropped()
        self._memory.empty_cache()


def without_expandable(settings: str) -> str:
    """torch's allocator settings with expandable segments off: one item alone resets the others."""
    kept = [part for part in settings.split(",") if part and not part.startswith(EXPANDABLE)]
    return ",".join([*kept, f"{EXPANDABLE}:False"])


def usage_outside(memory: TorchMemory, device: Device) -> TorchUsage:
    """What torch holds on a device in segments that are not in the ledger."""
    pooled = {segment.address for segment in device.segments()}
    outside = [
        entry
        for entry in memory.snapshot()
        if entry["device"] == device.index and entry["address"] not in pooled
    ]
    allocated = sum(size for entry in outside for _, size in _live(entry))
    return TorchUsage(allocated, sum(entry["total_size"] for entry in outside) - allocated)


def _live(entry: Mapping[str, Any]) -> Ranges:
    if len(entry["blocks"]) == 1:  # most segments of large tensors: not worth a loop
        return () if entry["blocks"][0]["state"] == LIVE_UNLESS else _whole(entry)
    ranges, offset = [], 0
    for block in entry["blocks"]:
        if block["state"] != LIVE_UNLESS:
            ranges.append((offset, block["size"]))
        offset += block["size"]
    return tuple(ranges)


def _whole(entry: Mapping[str, Any]) -> Ranges:
    return ((0, entry["total_size"]),)
