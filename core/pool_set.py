"""The pools of one manager, and the orders that a transition gives for their segments."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from mmap import PAGESIZE

from hal.core.contents import Contents, Range
from hal.core.report import is_asleep
from hal.core.tags import SCRATCH, Policy
from hal.native import Action, Order, Segment
from hal.platform import Platform
from hal.pools import Pool, Ranges, Snapshot, find_segment


@dataclass(frozen=True)
class ManagedPool:
    """A pool with the policy that it fixes for itself, if any."""

    pool: Pool
    policy: Policy | None

    @property
    def tag(self) -> str:
        return self.pool.tag


@dataclass(frozen=True)
class PoolOrders:
    """What one pool contributes to a sleep: its policy, an order a segment, and its live blocks."""

    tag: str
    policy: Policy
    orders: tuple[Order, ...]
    blocks: tuple[Range, ...] = field(repr=False)
    scratch: bool = False
    """Its contents are made again by the engine: discarding them leaves nothing dirty."""

    @property
    def serials(self) -> set[int]:
        return {order.segment.serial for order in self.orders}

    @property
    def bytes(self) -> int:
        return sum(order.segment.size for order in self.orders)

    @property
    def host_bytes(self) -> int:
        return sum(kept_bytes(order) for order in self.orders)


def kept_bytes(order: Order) -> int:
    """Bytes of a segment that its backup holds."""
    if order.action is Action.DISCARD:
        return sum(size for _, size in order.live or ())
    return order.segment.size if order.live is None else sum(size for _, size in order.live)


class PoolSet:
    """Pools by tag, fixed policy and group, made when first asked for; another manager has another
    set.
    """

    def __init__(self, platform: Platform, device: int) -> None:
        self._platform, self._device = platform, device
        self._pools: dict[tuple[str, Policy | None, Hashable], ManagedPool] = {}

    def __iter__(self) -> Iterator[ManagedPool]:
        return iter(tuple(self._pools.values()))

    def get(self, tag: str, policy: Policy | None, group: Hashable = None) -> Pool:
        key = (tag, policy, group)
        if key not in self._pools:
            pool = self._platform.create_pool(tag, self._device)
            self._pools[key] = ManagedPool(pool, policy)
        return self._pools[key].pool

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(managed.tag for managed in self))

    def open_tags(self) -> tuple[str, ...]:
        """Tags of which a scope is open in some thread."""
        return tuple(sorted({m.tag for m in self if m.pool.open_scopes}))

    def segments(self, tag: str | None = None) -> list[Segment]:
        """The segments of a tag, or of all, ordered by address."""
        pools = [m.pool for m in self if tag is None or m.tag == tag]
        return sorted((s for p in pools for s in p.segments()), key=lambda s: s.address)

    def asleep_segments(self, tag: str | None = None) -> list[Segment]:
        """The segments of a tag, or of all, that sleep."""
        return [segment for segment in self.segments(tag) if is_asleep(segment.state)]

    def by_serial(self) -> dict[int, Segment]:
        return {segment.serial: segment for segment in self.segments()}

    def blocks(self, tag: str) -> list[Range]:
        """(address, size) of the live blocks of a tag."""
        return [block for m in self if m.tag == tag for block in _blocks(m.pool.snapshot())]

    def tag_at(self, address: int) -> str | None:
        """The tag whose segment holds an address."""
        for managed in self:
            if find_segment(managed.pool.segments(), address):
                return managed.tag
        return None

    def close(self) -> None:
        for key in list(self._pools):
            self._pools.pop(key).pool.close()


def orders_for(
    managed: ManagedPool, policy: Policy, contents: Contents, *, trim: bool = True
) -> PoolOrders:
    """The orders that put one pool to sleep, from a snapshot that no allocation has overtaken.

    Segments without a live block take no part: they are given up first, or only passed over without
    `trim`. A preserved tensor in a discarded segment is kept as a range of its order.
    """
    snapshot = current_snapshot(managed.pool, trim=trim)
    segments = [s for s in snapshot.segments if trim or snapshot.live.get(s.address) != ()]
    orders = tuple(_order(segment, snapshot, policy, contents) for segment in segments)
    scratch = managed.tag in SCRATCH or managed.policy is Policy.DISCARD
    return PoolOrders(managed.tag, policy, orders, tuple(_blocks(snapshot)), scratch)


def current_snapshot(pool: Pool, *, trim: bool) -> Snapshot:
    """A snapshot that no allocation has overtaken, of a pool whose free segments are given up."""
    while True:
        snapshot = pool.snapshot()
        if trim and snapshot.has_free_segment and pool.trim():
            continue
        if pool.generation == snapshot.generation:
            return snapshot


def _order(segment: Segment, snapshot: Snapshot, policy: Policy, contents: Contents) -> Order:
    live = snapshot.live.get(segment.address)
    if policy is Policy.OFFLOAD:
        return Order(segment, Action.OFFLOAD, live if live is None else _rounded(live))
    whole = ((0, segment.size),)
    kept = contents.preserved_in(segment.address, segment.size, whole if live is None else live)
    if not kept:
        return Order(segment, Action.DISCARD)
    return Order(segment, Action.DISCARD, _rounded(kept))


def _rounded(ranges: Ranges) -> Ranges:
    """Sorted ranges rounded out to the pages that backups are made of; those that meet are one."""
    pages: list[Range] = []
    for offset, size in ranges:
        begin = offset // PAGESIZE * PAGESIZE
        end = -(-(offset + size) // PAGESIZE) * PAGESIZE
        if pages and begin <= sum(pages[-1]):
            begin = pages.pop()[0]
        pages.append((begin, end - begin))
    return tuple(pages)


def _blocks(snapshot: Snapshot) -> list[Range]:
    return [
        (address + offset, size)
        for address, ranges in snapshot.live.items()
        for offset, size in ranges
    ]


def orders_of(pools: Sequence[PoolOrders]) -> list[Order]:
    return [order for pool in pools for order in pool.orders]
