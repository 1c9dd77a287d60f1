"""What a transition would move, and whether it fits, as values; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hal.core.pool_set import PoolOrders, orders_of
from hal.core.report import SleepPlan, TagPlan, WakePlan
from hal.core.tags import Policy
from hal.core.transfer import Transfer
from hal.native import Segment


def sleep_plan(
    pools: Sequence[PoolOrders], asleep: Sequence[Segment], transfer: Transfer
) -> SleepPlan:
    """The plan of a sleep by these orders, beside segments that sleep already."""
    needed = sum(pool.host_bytes for pool in pools)
    held = sum(segment.backup_bytes for segment in asleep)
    available, why_not = transfer.room(orders_of(pools), held)
    plans = (TagPlan(p.tag, p.policy, len(p.orders), p.bytes, p.host_bytes) for p in pools)
    return SleepPlan(tuple(plans), needed, available, not why_not, why_not)


def wake_plan(
    segments: Mapping[str, Sequence[Segment]], policies: Mapping[str, Policy], free: int | None
) -> WakePlan:
    """The plan of a wake of these tags' segments; `free`: of device memory, None if unknown."""
    plans = tuple(_tag_plan(tag, policies[tag], asleep) for tag, asleep in segments.items())
    needed = sum(plan.bytes for plan in plans)
    missing = max(0, needed - free) if free is not None else 0
    fits = None if free is None else not missing
    return WakePlan(plans, needed, free, fits, missing)


def _tag_plan(tag: str, policy: Policy, asleep: Sequence[Segment]) -> TagPlan:
    size = sum(segment.size for segment in asleep)
    host = sum(segment.backup_bytes for segment in asleep)
    return TagPlan(tag, policy, len(asleep), size, host)
