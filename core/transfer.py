"""The device's side of a transition: the arena that holds backups, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from hal.core.backup import BackupOptions, open_arena
from hal.core.report import merge
from hal.errors import HostMemoryError
from hal.native import (
    Action,
    Arena,
    ArenaStats,
    Device,
    Order,
    Segment,
    SegmentState,
    TransferFailed,
    TransferReport,
)
from hal.platform import Capabilities

POISON = 0xFF
"""What debug mode fills memory without contents with: NaN in every float type, -1 in integers."""
_NOTHING = ArenaStats(0, 0, 0, 0, False, False)


class Transfer:
    """Moves segments between device and backups, and remembers how each went to sleep.

    The arena is opened when something has to be backed up: a sleep that only discards needs none.
    """

    def __init__(
        self, device: Device, capabilities: Capabilities, options: BackupOptions, *, debug: bool
    ) -> None:
        self._device, self._capabilities, self._options = device, capabilities, options
        self._fill = POISON if debug else None
        self._arena: Arena | None = None
        self._orders: dict[int, Order] = {}
        self._told_fallback = False

    # -- host memory

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            self._arena = open_arena(self._device, self._capabilities, self._options)
        return self._arena

    def stats(self) -> ArenaStats:
        return self._arena.stats() if self._arena else _NOTHING

    def check_room(self, needed: int) -> None:
        """Raise `HostMemoryError` unless backups of `needed` bytes fit; changes nothing."""
        if needed:
            self.arena.check(needed)

    def room(self, needed: int) -> tuple[int, str]:
        """Host bytes that backups can have, up to `needed`, and why they do not suffice."""
        try:
            self.check_room(needed)
        except HostMemoryError as error:
            return error.available or 0, str(error)
        stats = self.stats()
        return max(needed, stats.held - stats.used), ""

    def trim(self) -> int:
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
        """Follow other options from the next transition on; the arena stays where it is."""
        self._options = options

    # -- transitions

    def to_sleep(self, orders: Sequence[Order]) -> TransferReport:
        """Carry the orders out; raises `TransferFailed`."""
        self._orders.update({order.segment.serial: order for order in orders})
        report = self._device.sleep(self._arena, orders)
        self._tell_fallback()
        return report

    def drop_backups(self, orders: Sequence[Order]) -> TransferReport:
        """Discard segments that sleep already."""
        self._orders.update({order.segment.serial: order for order in orders})
        dropping = [order._replace(action=Action.DROP_BACKUP) for order in orders]
        return self._device.sleep(self._arena, dropping)

    def to_wake(
        self, segments: Sequence[Segment], current: Callable[[], Mapping[int, Segment]]
    ) -> TransferReport:
        """Map and restore segments; raises `TransferFailed`, and then all of them sleep again."""
        done: list[TransferReport] = []
        woken: list[Segment] = []
        for part in self._parts(segments):
            try:
                done.append(
                    self._device.wake(
                        self._arena, part, fill=self._fill, retain=self._options.retain
                    )
                )
            except TransferFailed:
                self.sleep_again(woken, current)
                raise
            woken += part
            self._give_back()
        return merge(done)

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
        self, segments: Sequence[Segment], current: Callable[[], Mapping[int, Segment]]
    ) -> None:
        """Undo the wake of segments that are still in `current()` (by serial).

        If even that fails they stay mapped, and the next wake finds them so.
        """
        alive = current()
        orders = [
            self._orders[s.serial]._replace(segment=alive[s.serial])
            for s in segments
            if s.serial in alive
        ]
        try:
            self._device.sleep(self._arena, orders)
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
