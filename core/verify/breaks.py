"""Real defects that a verification must catch and name: each is a subject that is wrong in one way.

The runner is given the subject and nothing else, so it cannot know what to look for.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hal.core.kv_init import KVInitScope
from hal.core.report import WakeReport
from hal.core.sleep import SleepManager
from hal.core.verify.engine import ReferenceEngine
from hal.core.verify.layers import Batch
from hal.core.verify.subject import Setup, Subject
from hal.errors import HalError, InvalidArgument
from hal.native import SegmentState
from hal.platform import PoolNesting
from hal.pools import find_segment

_LEAK = 1 << 20
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


class _MovedTensor(ReferenceEngine):
    """Makes a table anew after each wake instead of trusting its address."""

    def restart(self) -> None:
        super().restart()
        with self.sleeper.pool("runtime"):
            moved = self.runtime.context_offsets.clone()
            self.runtime = replace(self.runtime, context_offsets=moved)


class _LeakingDevice(ReferenceEngine):
    """Takes device memory in each wake and never gives it back."""

    def restart(self) -> None:
        super().restart()
        with self.sleeper.pool("leak"):
            self._leaked = [*getattr(self, "_leaked", ()), self._piece()]

    def _piece(self) -> torch.Tensor:
        return torch.zeros(_LEAK, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        super().close()
        self._leaked = []


class _LeakingHost(ReferenceEngine):
    """Takes host memory in each wake and never gives it back: of its own, since what the process
    has free already would hide it.
    """

    def restart(self) -> None:
        super().restart()
        taken = mmap.mmap(-1, _LEAK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        taken.write(b"x" * _LEAK)
        self._leaked = [*getattr(self, "_leaked", ()), taken]


class _ResetScales(ReferenceEngine):
    """ "Repairs" the scales of an 8-bit cache after a wake, to 1.0."""

    def restart(self) -> None:
        super().restart()
        for name, tensor in self.model.named_buffers():
            if name.endswith("scale") and "codec" in name:
                tensor.fill_(1.0)


class _LostAdapters(ReferenceEngine):
    """Preserves what modules have registered, and nothing else."""

    def _preserved(self) -> dict[str, torch.Tensor]:
        lost = self.model.unregistered()
        return {name: each for name, each in super()._preserved().items() if name not in lost}


class _StaleStates(ReferenceEngine):
    """Begins recurrent states with what their pages hold: zeros, as each request leaves them, until
    the pages are discarded.
    """

    def _release(self, running: Any) -> None:
        super()._release(running)
        for index, layer in enumerate(self._cache.layers):
            if self.config.model.is_recurrent(index):
                layer[running.row].zero_()

    def _prefill_batch(self, group: Any) -> Batch:
        batch = super()._prefill_batch(group)
        states = replace(batch.states, fresh=torch.zeros_like(batch.states.fresh))
        return replace(batch, states=states)


class _KeptBackups(SleepManager):
    """Keeps backups over wakes although nobody asked for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options["backup"] = replace(options["backup"], retain=True)
        super().__init__(*arguments, **options)


class _HalfAwake(SleepManager):
    """Calls a tag awake although its wake failed."""

    def wake_up(self, tags: Any = None, *, wait_for_memory: float | None = None) -> WakeReport:
        try:
            return super().wake_up(tags, wait_for_memory=wait_for_memory)
        except HalError:
            self._tags.asleep.pop("workspace", None)
            raise


class _MovedTensorSubject(Subject):
    engine_type = _MovedTensor


class _LeakingDeviceSubject(Subject):
    engine_type = _LeakingDevice


class _LeakingHostSubject(Subject):
    engine_type = _LeakingHost


class _ResetScalesSubject(Subject):
    engine_type = _ResetScales


class _LostAdaptersSubject(Subject):
    engine_type = _LostAdapters


class _StaleStatesSubject(Subject):
    engine_type = _StaleStates


class _KeptBackupsSubject(Subject):
    manager_type = _KeptBackups


class _HalfAwakeSubject(Subject):
    manager_type = _HalfAwake


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
    cell: str | None = None
    """The cell of the matrix in which it shows; None: any case, and the base cell, does."""


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
        Break(
            "moved-tensor",
            "a runtime table is made anew after each wake",
            _MovedTensorSubject,
        ),
        Break(
            "device-leak",
            "the engine takes device memory in each wake",
            _LeakingDeviceSubject,
            cell="cycles=50",
        ),
        Break(
            "host-leak",
            "the engine takes host memory in each wake",
            _LeakingHostSubject,
            cell="cycles=50",
        ),
        Break(
            "kept-backups",
            "backups stay in host memory after the wake",
            _KeptBackupsSubject,
        ),
        Break(
            "reset-scales",
            "the scales of an 8-bit cache are 1.0 after a wake",
            _ResetScalesSubject,
            cell="kv=fp8",
        ),
        Break(
            "lost-adapters",
            "adapters are discarded with the weights and in no checkpoint",
            _LostAdaptersSubject,
            cell="model=lora,sleep=level-2",
        ),
        Break(
            "stale-states",
            "recurrent states begin with what the pages hold",
            _StaleStatesSubject,
            cell="model=hybrid",
        ),
        Break(
            "half-awake",
            "a tag counts as awake although its wake failed",
            _HalfAwakeSubject,
            cell="fault=map@wake",
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
