"""Pools: where the allocations of one tag come from, and the scopes that choose a pool.

The tag belongs to the pool, not to the moment: each pool has its own allocation entry in libhal, so
a segment can never carry another pool's tag, whatever scope is open when memory is asked for.
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal.errors import StateError, Unsupported
from hal.native import Device, Segment
from hal.platform import Flag, PoolNesting

if TYPE_CHECKING:
    import torch

    from hal.platform import Platform

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Snapshot:
    """The segments of a pool and their live blocks: segment address -> (offset, size) in bytes.

    `generation` is the pool's when it was taken: when the pool's has changed, the snapshot may lack
    a block.
    """

    generation: int
    live: Mapping[int, Ranges]
    segments: tuple[Segment, ...] = ()

    @property
    def has_free_segment(self) -> bool:
        """Whether a segment could be given back to the device."""
        return () in self.live.values()


class Pool(abc.ABC):
    """A pool of one tag on one device; thread-safe."""

    def __init__(self, device: Device, tag: str) -> None:
        self.device, self.tag = device, tag
        self._entries = device.create_pool(tag)
        self._give_up = weakref.finalize(self, _destroy, device, self._entries.id)
        self._scopes = self._entered = 0
        self._lock = threading.Lock()

    @property
    def id(self) -> int:
        """The pool's number in the ledger, unique in the process."""
        return self._entries.id

    @property
    def open_scopes(self) -> int:
        """How many scopes of this pool are open, in all threads."""
        return self._scopes

    @contextmanager
    def use(self) -> Iterator[Pool]:
        """Allocate from this pool on this thread; scopes nest in the platform's order."""
        with self._counted(), self._scope():
            yield self

    @contextmanager
    def capture(self) -> Iterator[tuple[int, int]]:
        """Yield the id to capture graphs into this pool with; `Unsupported` where that cannot be.

        From then on the pool is copied whole and never trimmed: a captured graph reads blocks that
        look free.
        """
        with self._counted(), self._capture() as pool_id:
            yield pool_id

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._scopes += 1
            self._entered += 1
        try:
            yield
        finally:
            with self._lock:
                self._scopes -= 1

    def _capture(self) -> AbstractContextManager[tuple[int, int]]:
        """The platform's own way to capture into this pool."""
        raise Unsupported(
            "a pool for captured graphs", self.device.driver, "its tensors are in host memory"
        )

    @abc.abstractmethod
    def _scope(self) -> AbstractContextManager[object]:
        """The platform's own way to direct allocations here."""

    @property
    @abc.abstractmethod
    def generation(self) -> int:
        """Changes with everything that can add a block; cheap to read."""

    @abc.abstractmethod
    def snapshot(self) -> Snapshot:
        """The segments, and the blocks that hold something now."""

    @abc.abstractmethod
    def trim(self) -> int:
        """Give segments without live blocks back to the device; returns bytes."""

    def segments(self) -> list[Segment]:
        """The pool's segments in the ledger, ordered by address."""
        return self.device.segments(self.id)

    def owns(self, address: int) -> bool:
        """Whether a device address lies in one of the pool's segments."""
        return any(segment.address <= address < segment.end for segment in self.segments())

    def holds(self, address: int) -> bool:
        """Whether the allocator has the address in a block of this pool, whatever its segment's
        tag.
        """
        return self.owns(address)

    def close(self) -> None:
        """Give the pool up; segments that tensors still hold live on until the last free."""
        if self._scopes:
            raise StateError(f"pool {self.tag!r} has open scopes; leave them before close()")
        self.trim()
        self._give_up()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag!r} #{self.id} on {self.device.driver}>"


def _destroy(device: Device, pool: int) -> None:
    if device.is_open:
        device.destroy_pool(pool)


def storage_address(tensor: torch.Tensor) -> int:
    """The device address at which a tensor's storage begins; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


def find_segment(segments: Sequence[Segment], address: int) -> Segment | None:
    """The segment of a list ordered by address that holds `address`."""
    from bisect import bisect_right

    index = bisect_right(segments, address, key=lambda segment: segment.address) - 1
    return segments[index] if index >= 0 and address < segments[index].end else None


def probe_nesting(platform: Platform, device: int = 0) -> PoolNesting:
    """Open two nested pools, allocate once and look which of them got it."""

    outer, inner = (platform.create_pool(f"probe-{name}", device) for name in ("outer", "inner"))
    try:
        with outer.use(), inner.use():
            address = _allocate_once(torch_device(platform, device))
        if inner.owns(address):
            return PoolNesting.LIFO
        if outer.owns(address):
            return PoolNesting.FIFO
        raise StateError(
            f"an allocation inside two pools of {platform.name} landed in neither; this torch "
            "build does not direct allocations to pools"
        )
    finally:
        outer.close()
        inner.close()


def probe_flatten(platform: Platform, device: int = 0) -> Flag:
    """Allocate before, within and after an inner scope for which the outer one is left, and look
    whether each allocation landed in the pool that was open.
    """
    outer, inner = (platform.create_pool(f"probe-{name}", device) for name in ("outer", "inner"))
    place = torch_device(platform, device)
    try:
        for pool, when in ((outer, "before"), (inner, "within"), (outer, "after")):
            with pool.use():
                address = _allocate_once(place)
            if not pool.owns(address):
                return Flag(False, f"an allocation {when} the inner scope landed in another pool")
        return Flag(True)
    finally:
        outer.close()
        inner.close()


def torch_device(platform: Platform, index: int) -> torch.device:
    """torch's name for a platform's device."""
    import torch

    if platform.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(platform.device_type, index)


def _allocate_once(device: torch.device) -> int:
    """Where one allocation landed; it is free again on return."""
    import torch

    return storage_address(torch.empty(1 << 20, dtype=torch.uint8, device=device))
