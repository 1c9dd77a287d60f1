"""The device's side of a transition: the arena that holds backups, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from hal.core.backup import BackupOptions, backing_of, open_arena
from hal.core.pool_set import PoolOrders, kept_bytes
from hal.core.report import merge
from hal.core.retained import Retained
from hal.errors import BackupCorrupted, HostMemoryError
from hal.native import (
    Action,
    Arena,
    ArenaStats,
    Backing,
    Order,
    Segment,
    SegmentState,
    TransferFailed,
    TransferReport,
)
from hal.platform import Platform

POISON = 0xFF
"""What debug mode fills memory without contents with: NaN in every float type, -1 in integers."""
_NOTHING = ArenaStats(0, 0, 0, 0, False, False)


class Transfer:
    """Moves segments between device and backups, and remembers how each went to sleep.

    The arena is opened when something has to be backed up: a sleep that only discards needs none.
    """

    def __init__(
        self, platform: Platform, index: int, options: BackupOptions, *, debug: bool
    ) -> None:
        self._platform, self._index = platform, index
        self._device = platform.device(index)
        self._capabilities = platform.capabilities_of(index)
        self._options = options
        self._checks = options.verify and options.compress is not None
        self._retained = (
            Retained(platform, index, check=self._checks)
            if options.retain or self._checks
            else None
        )
        self._fill = POISON if debug else None
        self._arena: Arena | None = None
        self._orders: dict[int, Order] = {}
        self._told_fallback = False

    # -- host memory

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            self._arena = open_arena(self._platform, self._index, self._options)
        return self._arena

    def stats(self) -> ArenaStats:
        return self._arena.stats() if self._arena else _NOTHING

    def make_room(self, orders: Sequence[Order]) -> None:
        """Raise `HostMemoryError` unless the backups of these orders fit.

        Retained backups are given up where that makes them fit; nothing else is changed.
        """
        needed = self.needed(orders)
        if not needed:
            return
        try:
            self.arena.check(needed)
        except HostMemoryError:
            if not self.stats().used:
                raise
            self.trim()
            self.arena.check(self.needed(orders))

    def room(self, orders: Sequence[Order], asleep: int) -> tuple[int, str]:
        """Host bytes that backups can have, up to what the orders need, and why they do not
        suffice; `asleep`: bytes of backups that cannot be given up.
        """
        needed = sum(kept_bytes(order) for order in orders)
        spare = self.stats().used - asleep
        missing = min(self.needed(orders), max(0, needed - spare))
        try:
            if missing:
                self.arena.check(missing)
        except HostMemoryError as error:
            return error.available or 0, str(error)
        stats = self.stats()
        return max(needed, stats.held - stats.used), ""

    def needed(self, orders: Sequence[Order]) -> int:
        """Bytes of backups that these orders make beyond what is retained for them."""
        if self._retained is None:
            return sum(kept_bytes(order) for order in orders)
        return sum(self._retained.new_bytes(order) for order in orders)

    def new_memory(self, orders: Sequence[Order]) -> int:
        """Bytes of host memory that the backups of these orders take beyond what is held for any;
        files take none.
        """
        if self._in_files:
            return 0
        stats = self.stats()
        return max(0, self.needed(orders) - (stats.held - stats.used))

    @property
    def memory_budget(self) -> int | None:
        """What the budget leaves of host memory; None where it bounds none."""
        if self._options.budget is None or self._in_files:
            return None
        return max(0, self._options.budget - self.stats().used)

    @property
    def _in_files(self) -> bool:
        backing, _ = backing_of(self._options, self._capabilities)
        return backing is Backing.FILE

    def trim(self) -> int:
        if self._retained:
            self._retained.clear()
        return self._arena.trim() if self._arena else 0

    def close(self) -> None:
        if self._arena:
            self._arena.trim()
            self._arena.close()
            self._arena = None

    def _give_back(self) -> None:
        """Give unused host memory back where it is cheap to take again.

        Pinned memory is not: it is kept for the next sleep.
        """
        if not self._options.retain and not self.stats().pinned:
            self.trim()

    def _tell_fallback(self) -> None:
        if self.stats().fell_back and not self._told_fallback:
            self._told_fallback = True
            warnings.warn(
                "host memory could not be pinned, backups are in pageable memory and slower; "
                "BackupOptions(require_pinned=True) makes this an error",
                stacklevel=2,
            )

    def configure(self, options: BackupOptions) -> None:
        """Follow other options, whose `retain` is a yes or no, also in the wake of what sleeps now;
        the arena stays where it is.
        """
        self._options = options
        retain = bool(options.retain)
        if retain and self._retained is None:
            self._retained = Retained(self._platform, self._index)
        elif not retain and not self._checks:
            self._retained = None
        self._orders = {s: order._replace(retain=retain) for s, order in self._orders.items()}

    # -- transitions

    def to_sleep(self, pools: Sequence[PoolOrders]) -> TransferReport:
        """Carry the orders out; raises `TransferFailed`."""
        orders = [
            order._replace(retain=self._options.retains(pool.tag))
            for pool in pools
            for order in pool.orders
        ]
        self._orders.update({order.segment.serial: order for order in orders})
        report = self._carry_out(orders)
        self._tell_fallback()
        return report

    def _carry_out(self, orders: Sequence[Order]) -> TransferReport:
        """Sleep, and note what the backups hold afterwards, however it ended."""
        if self._retained is not None:
            orders = self._retained.find_clean(orders)
        try:
            report = self._device.sleep(self._arena, orders)
        except TransferFailed as failure:
            if self._retained is not None:
                self._retained.slept(failure.report)
            raise
        if self._retained is not None:
            self._retained.slept(report)
        return report

    def drop_backups(self, orders: Sequence[Order]) -> TransferReport:
        """Discard segments that sleep already."""
        self._orders.update({order.segment.serial: order for order in orders})
        dropping = [order._replace(action=Action.DROP_BACKUP) for order in orders]
        return self._carry_out(dropping)

    def to_wake(
        self, segments: Sequence[Segment], current: Callable[[], Mapping[int, Segment]]
    ) -> TransferReport:
        """Map and restore segments; raises `TransferFailed`, and then all of them sleep again."""
        done: list[TransferReport] = []
        woken: list[Segment] = []
        for part in self._parts(segments):
            try:
                done.append(self._wake(part))
            except TransferFailed:
                self.sleep_again(woken, current)
                raise
            woken += part
            self._check(done[-1], part, woken, current)
            self._give_back()
        return merge(done)

    def _wake(self, part: Sequence[Segment]) -> TransferReport:
        serials = {s.serial for s in part}
        if not self._checks:
            serials = {s for s in serials if s in self._orders and self._orders[s].retain}
        return self._device.wake(self._arena, part, fill=self._fill, retain=serials)

    def _check(
        self,
        report: TransferReport,
        part: Sequence[Segment],
        woken: Sequence[Segment],
        current: Callable[[], Mapping[int, Segment]],
    ) -> None:
        """Compare what was decoded with what was encoded; what is wrong sleeps again, with the
        backups as they are.
        """
        if not self._checks or self._retained is None:
            return
        orders = [self._orders[s.serial] for s in part if s.serial in self._orders]
        if wrong := self._retained.differing(orders):
            self.sleep_again(woken, current, unchanged=True)
            raise TransferFailed(
                BackupCorrupted(
                    wrong[0].address,
                    wrong[0].size,
                    "what was restored from it has another fingerprint",
                ),
                report,
            )
        done = [o._replace(action=Action.DROP_BACKUP) for o in orders if not o.retain]
        self._device.sleep(self._arena, done)

    def _parts(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """One part; where device and host memory are the same, two.

        There the backups have to go before discarded tags take their memory again, or both would
        have to fit.
        """
        if not self._capabilities.unified_memory:
            return [list(segments)]
        backed = [s for s in segments if s.state is SegmentState.ASLEEP_BACKED]
        discarded = [s for s in segments if s.state is not SegmentState.ASLEEP_BACKED]
        return [part for part in (backed, discarded) if part] or [[]]

    def sleep_again(
        self,
        segments: Sequence[Segment],
        current: Callable[[], Mapping[int, Segment]],
        *,
        unchanged: bool = False,
    ) -> None:
        """Undo the wake of segments that are still in `current()` (by serial); `unchanged`: what
        their backups hold counts, not what is in memory.

        If even that fails they stay mapped, and the next wake finds them so.
        """
        alive = current()
        orders = [
            self._orders[s.serial]._replace(segment=alive[s.serial])
            for s in segments
            if s.serial in alive
        ]
        try:
            if unchanged:
                whole = [order._replace(clean=((0, order.segment.size),)) for order in orders]
                self._device.sleep(self._arena, whole)
            else:
                self._carry_out(orders)
        except TransferFailed as failure:
            warnings.warn(
                f"the failed wake could not be undone ({failure.error}); its memory stays mapped "
                "until the next wake_up()",
                stacklevel=2,
            )

    def forget(self, segments: Sequence[Segment]) -> None:
        """The segments are awake for good."""
        for segment in segments:
            self._orders.pop(segment.serial, None)
