"""What is known of a device's memory, and how well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TorchUsage:
    """What torch's own allocator holds on a device outside the pools, in bytes."""

    allocated: int
    cached: int


@dataclass(frozen=True)
class MemoryInfo:
    """Memory of one device, in bytes; an unknown figure is None with a reason, never 0.

    `process_used` counts this process alone; `source` names who answered; `exact` is False when a
    figure is missing or known to be approximate or stale, and `reason` says why.
    """

    total: int | None
    free: int | None
    process_used: int | None
    source: str
    exact: bool
    reason: str = ""
    reserved: int | None = None
    """What the driver keeps for itself, used by no process; None when the source does not say."""
    tracked: int | None = None
    """What this library has mapped on the device in this process, whatever the source says."""

    @property
    def process_at_least(self) -> int | None:
        """What this process certainly holds: `process_used`, else what this library has mapped."""
        return self.tracked if self.process_used is None else self.process_used

    def free_since(self, before: MemoryInfo) -> int | None:
        """By how much `free` grew since `before`, through whichever process: information, no proof.

        None when a figure is missing or two sources answered, whose figures do not compare.
        """
        if self.source != before.source or self.free is None or before.free is None:
            return None
        return self.free - before.free
