"""What stays on the device while an engine sleeps, told apart by source."""

from __future__ import annotations

import mmap

import torch

from hal.core import SleepManager
from support import MIB, Target, pattern

TRACKED = {"awake tags", "other pools"}
CACHED = "torch's cache outside the pools"
"""What an allocation may come from: it counts in neither figure."""


def residual(sleeper: SleepManager) -> tuple[dict[str, int], int]:
    """Tracked bytes by source and the sum of the rest, as a sleep reports them; wakes again."""
    report = sleeper.sleep(level=1)
    sleeper.wake_up()
    sizes = {entry.source: entry.bytes or 0 for entry in report.residual if entry.source != CACHED}
    tracked = {source: size for source, size in sizes.items() if source in TRACKED}
    return tracked, sum(sizes.values()) - sum(tracked.values())


def test_r58_tracked_and_untracked_bytes_are_told_apart(
    sleeper: SleepManager, target: Target
) -> None:
    target.require("host tensors")
    with sleeper.pool("weights"):
        weights = torch.empty(4 * MIB, dtype=torch.uint8)
    weights.copy_(pattern(4 * MIB))
    with sleeper.platform.create_pool("elsewhere").use():
        elsewhere = torch.ones(12 * MIB, dtype=torch.uint8)
    tracked, before = residual(sleeper)
    assert tracked == {"awake tags": 0, "other pools": elsewhere.nbytes}
    with mmap.mmap(-1, 64 * MIB) as outside:
        outside.write(b"x" * len(outside))
        tracked, after = residual(sleeper)
    assert tracked == {"awake tags": 0, "other pools": elsewhere.nbytes}
    assert 0.9 * 64 * MIB < after - before < 1.5 * 64 * MIB
