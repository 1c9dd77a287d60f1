"""Real defects that a verification must catch and name: each is a subject that is wrong in one way.

The runner is given the subject and nothing else, so it cannot know what to look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hal.core.kv_init import KVInitScope
from hal.core.report import WakeReport
from hal.core.sleep import SleepManager
from hal.core.verify.engine import ReferenceEngine
from hal.core.verify.subject import Setup, Subject
from hal.errors import InvalidArgument
from hal.native import SegmentState
from hal.platform import PoolNesting
from hal.pools import find_segment

_EXPONENT_BIT = 30
"""The highest exponent bit of a float32: flipped, a weight becomes huge or tiny."""


class _IndexInCachePool(ReferenceEngine):
    """Makes one of its index tables while the KV pool is open."""

    def _initialise_kv(self, kv: KVInitScope) -> None:
        super()._initialise_kv(kv)
        with kv.cache():
            offsets = torch.arange(self.config.context, device=self.device)
        self.runtime = replace(self.runtime, context_offsets=offsets)


class _StaleIndex(ReferenceEngine):
    """Goes on trusting its prefix index after the cache's contents are gone."""

    def restart(self) -> None:
        """Do nothing."""


class _FlippingManager(SleepManager):
    """Loses one bit of a weight's backup on the way to the first wake."""

    flipped = False

    def wake_up(self, tags: Any = None, *, wait_for_memory: float | None = None) -> WakeReport:
        if not self.flipped:
            self._flip()
        return super().wake_up(tags, wait_for_memory=wait_for_memory)

    def _flip(self) -> None:
        backed = [s for s in self.device.segments() if s.state is SegmentState.ASLEEP_BACKED]
        weights = [address for address, _ in self.live_blocks("weights")]
        for address in weights:
            if segment := find_segment(backed, address):
                bit = (address - segment.address) * 8 + _EXPONENT_BIT
                self.device.flip_backup_bit(segment.address, bit)
                self.flipped = True
                return


class _RuntimeInCacheSubject(Subject):
    engine_type = _IndexInCachePool


class _StaleIndexSubject(Subject):
    engine_type = _StaleIndex


class _FlippedBitSubject(Subject):
    manager_type = _FlippingManager


class _SkippedRestoreSubject(Subject):
    """The first wake leaves out the copy of one segment and says nothing."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.device.fail("restore", nth=1, code=0)

    def close(self) -> None:
        self.device.clear_faults()
        super().close()


@dataclass(frozen=True)
class Break:
    """A defect: the subject that has it, and what it needs instead of the platform's own."""

    name: str
    description: str
    subject: type[Subject] = Subject
    host_options: dict[str, Any] | None = None
    """Options of the host platform that reproduce the defect; None: any platform shows it."""
    backing: str | None = None
    """The kind of backing that shows the defect; None: any."""


_ASSUMED = {"nesting": PoolNesting.FIFO, "claims": PoolNesting.LIFO}
"""The outermost pool gets every allocation, and nobody has looked."""

BREAKS = {
    entry.name: entry
    for entry in (
        Break(
            "runtime-in-kv",
            "a runtime index table is allocated while the KV pool is open",
            _RuntimeInCacheSubject,
        ),
        Break(
            "tag-from-scope",
            "segments are tagged by the open scope, on an outermost-first allocator",
            host_options=_ASSUMED | {"tag_from_scope": True},
        ),
        Break(
            "fifo-no-fallback",
            "nested KV-init scopes on an outermost-first allocator",
            host_options=_ASSUMED,
        ),
        Break(
            "skip-restore",
            "the first wake does not restore one segment",
            _SkippedRestoreSubject,
        ),
        Break(
            "bit-flip",
            "one bit of a weight's backup in memory is flipped",
            _FlippedBitSubject,
            backing="anonymous",
        ),
        Break(
            "bit-flip-file",
            "one bit of a weight's backup in a file is flipped",
            _FlippedBitSubject,
            backing="file",
        ),
        Break(
            "stale-index",
            "the engine's prefix index outlives the KV cache's contents",
            _StaleIndexSubject,
        ),
    )
}


def choose_break(name: str) -> Break:
    """The break of that name; `InvalidArgument` with the names when there is none."""
    if name not in BREAKS:
        raise InvalidArgument(f"unknown break {name!r}; breaks: {', '.join(BREAKS)}, or help")
    return BREAKS[name]


def lines() -> Iterator[str]:
    """The breaks for people, one a line."""
    width = max(map(len, BREAKS))
    return (f"{entry.name:<{width}}  {entry.description}" for entry in BREAKS.values())
