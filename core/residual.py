"""What a process still holds on a device while its tags sleep, by source."""

from __future__ import annotations

import torch

from hal.core.pool_set import PoolSet
from hal.core.report import Residual, is_asleep
from hal.memory import TorchUsage
from hal.platform import Platform


def give_torch_cache_back(platform: Platform) -> None:
    """Return what torch caches outside the pools: an engine asleep has no use for it."""
    if platform.device_type != "cpu":
        torch.accelerator.empty_cache()


def residual(
    platform: Platform,
    index: int,
    pools: PoolSet,
    *,
    usage: TorchUsage | None,
    graphs: int = 0,
) -> tuple[Residual, ...]:
    """Awake tags, other pools, torch's allocations and cache outside the pools, and the rest.

    `usage` is torch's, and `graphs` what captures have added to the driver's own memory, in bytes.
    """
    own = sum(s.size for s in pools.segments() if not is_asleep(s.state))
    mapped = platform.device(index).counters().mapped_bytes
    entries = [Residual("awake tags", own), Residual("other pools", mapped - own)]
    if usage:
        entries += [
            Residual("torch's own allocations outside the pools", usage.allocated),
            Residual("torch's cache outside the pools", usage.cached),
        ]
    if graphs:
        entries.append(Residual("captured graphs", graphs, "the driver's part, since capture"))
    info = platform.get_memory_info(index)
    known = sum(entry.bytes or 0 for entry in entries)
    rest = None if info.process_used is None else max(0, info.process_used - known)
    return (*entries, Residual("context, modules and libraries", rest, info.reason))


def driver_bytes(platform: Platform, index: int) -> int | None:
    """What this process holds on the device beyond all pools and torch; None when unknown."""
    used = platform.get_memory_info(index).process_used
    if used is None:
        return None
    usage = platform.torch_usage(index)
    outside = usage.allocated + usage.cached if usage else 0
    mapped: int = platform.device(index).counters().mapped_bytes
    return max(0, used - outside - mapped)
