"""Backups that outlive a wake: which of them still hold what the device has, by fingerprints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hal.core.kernels.fingerprint import (
    DIGEST_BYTES,
    Range,
    blocks_of,
    fingerprint,
    warm_up,
    why_not,
)
from hal.core.pool_set import kept_bytes
from hal.native import Action, Device, Order, Segment, SegmentState, TransferReport
from hal.platform import Platform
from hal.pools import Ranges

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    """The fingerprints of a segment's live blocks when its backup was made."""

    live: Ranges
    digests: bytes


class Retained:
    """What the retained backups of one device hold, by the serials of their segments."""

    def __init__(self, platform: Platform, device: int, *, check: bool = False) -> None:
        """`check`: take the fingerprints of all tags, to compare them after their wake."""
        self._check = check
        self._platform, self._index = platform, device
        self._device: Device = platform.device(device)
        self._known: dict[int, _Known] = {}
        self._taken: dict[int, _Known] = {}
        self._why_not = why_not(platform, device)
        if self._why_not:
            _log.warning("nothing is known to be unchanged, all is copied: %s", self._why_not)
        else:
            warm_up(platform, device)

    def new_bytes(self, order: Order) -> int:
        """Bytes of host memory that an order needs beyond what it holds already."""
        known = self._known.get(order.segment.serial)
        held = known is not None and order.segment.backup_bytes and known.live == _live(order)
        return 0 if held else kept_bytes(order)

    def find_clean(self, orders: Sequence[Order]) -> list[Order]:
        """The orders, with the ranges of each that its retained backup holds as they are now.

        Waits for everything that was queued on the device. What the fingerprints say is kept until
        `slept` tells how the sleep went.
        """
        self._taken = {}
        backed = [o for o in orders if o.action is Action.OFFLOAD or o.live]
        wanted = [order for order in backed if order.retain or self._check]
        if self._why_not or not wanted:
            return list(orders)
        self._device.synchronize()
        try:
            self._taken = self._fingerprints(wanted)
        except torch.OutOfMemoryError as error:
            _log.warning("nothing is known to be unchanged, all is copied: %s", error)
        return [self._with_clean(order) for order in orders]

    def _fingerprints(self, orders: Sequence[Order]) -> dict[int, _Known]:
        blocks = [_blocks(order) for order in orders]
        flat = [block for group in blocks for block in group]
        digests = fingerprint(self._platform, self._index, flat)
        taken, first = {}, 0
        for order, group in zip(orders, blocks, strict=True):
            last = first + DIGEST_BYTES * len(group)
            taken[order.segment.serial] = _Known(_live(order), digests[first:last])
            first = last
        return taken

    def _with_clean(self, order: Order) -> Order:
        serial = order.segment.serial
        now, before = self._taken.get(serial), self._known.get(serial)
        if now is None or before is None or now.live != before.live:
            return order
        if now.digests == before.digests:
            return order._replace(clean=now.live)
        start = order.segment.address
        same = [
            (address - start, size)
            for index, (address, size) in enumerate(_blocks(order))
            if _digest(now, index) == _digest(before, index)
        ]
        return order._replace(clean=tuple(same))

    def slept(self, report: TransferReport) -> None:
        """Keep the fingerprints of what has a whole backup now, and drop those of all else."""
        for result in report.orders:
            serial = result.segment.serial
            self._known.pop(serial, None)
            if result.state is SegmentState.ASLEEP_BACKED and serial in self._taken:
                self._known[serial] = self._taken[serial]
        self._taken = {}

    def clear(self) -> None:
        self._known.clear()

    def differing(self, orders: Sequence[Order]) -> list[Segment]:
        """The mapped segments that do not hold what was fingerprinted at their sleep."""
        known = [order for order in orders if order.segment.serial in self._known]
        now = self._fingerprints(known)
        return [
            order.segment
            for order in known
            if now[order.segment.serial] != self._known[order.segment.serial]
        ]


def _live(order: Order) -> Ranges:
    return ((0, order.segment.size),) if order.live is None else order.live


def _blocks(order: Order) -> list[Range]:
    start = order.segment.address
    return blocks_of([(start + offset, size) for offset, size in _live(order)])


def _digest(known: _Known, index: int) -> bytes:
    return known.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]
