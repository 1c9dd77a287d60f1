"""Which tags of a manager sleep, and by which policy, and what the next transition takes."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

from hal.core.contents import Contents
from hal.core.pool_set import ManagedPool, PoolOrders, PoolSet, current_snapshot, orders_for
from hal.core.report import is_asleep
from hal.core.tags import Policy, level_of, tag_list
from hal.errors import AsleepError, InvalidArgument
from hal.native import Segment

Actions = Mapping[ManagedPool, Policy]
"""What a sleep does to pools; it leaves those alone that are not in it."""


class TagStates:
    """Which tags of a set of pools sleep; `deferrable` names those that a wake may leave asleep,
    None: all.
    """

    def __init__(
        self, pools: PoolSet, contents: Contents, deferrable: Collection[str] | None
    ) -> None:
        self._pools, self._contents, self._deferrable = pools, contents, deferrable
        self.asleep: dict[str, Policy] = {}
        """The tags that sleep, each with the policy by which it does."""

    @property
    def awake(self) -> list[str]:
        return [tag for tag in self._pools.tags if tag not in self.asleep]

    def refuse(self, tags: Iterable[str], why: str = "") -> None:
        """Raise `AsleepError` if any of these tags sleeps."""
        if asleep := [tag for tag in tags if tag in self.asleep]:
            raise AsleepError(asleep, why)

    # -- to sleep

    def actions(self, level: int, policy: Mapping[str, Policy] | None) -> Actions:
        """What a sleep by a level, or by a policy a tag, does to each pool; a pool's own policy
        wins over the level, not over `policy`.
        """
        if policy is None:
            chosen = level_of(level)
            return {m: m.policy or chosen.policy(m.tag) for m in self._pools}
        for tag, value in policy.items():
            if not isinstance(value, Policy):
                raise InvalidArgument(f"policy of {tag!r} is {value!r}, not a Policy")
        tag_list(policy, self._pools.tags)
        return {m: policy[m.tag] for m in self._pools if m.tag in policy}

    def orders(self, actions: Actions, *, trim: bool = True) -> list[PoolOrders]:
        """The orders of what is awake and is not to be kept so; `trim` as in `orders_for`."""
        return [
            orders_for(managed, policy, self._contents, trim=trim)
            for managed, policy in actions.items()
            if policy is not Policy.KEEP and managed.tag not in self.asleep
        ]

    def ignored(self, actions: Actions, *, warn: bool) -> list[ManagedPool]:
        """The pools that sleep already: they keep their first policy, and a differing request is
        told.
        """
        asleep = [m for m in actions if m.tag in self.asleep]
        differing = sorted(
            {
                m.tag
                for m in asleep
                if actions[m] is not Policy.KEEP and actions[m] is not self.asleep[m.tag]
            }
        )
        if differing and warn:
            warnings.warn(
                f"{', '.join(differing)} sleep already and keep their policy; wake them first to "
                "put them to sleep differently",
                stacklevel=5,
            )
        return asleep

    def commit_sleep(self, pools: Sequence[PoolOrders]) -> None:
        """Note that these orders were carried out."""
        for pool in pools:
            self.asleep[pool.tag] = pool.policy
            if pool.policy is Policy.DISCARD and not pool.scratch:
                self._contents.mark_discarded(pool.tag, pool.blocks)

    # -- to wake

    def targets(self, tags: str | Iterable[str] | None) -> tuple[str, ...]:
        """The sleeping tags that a wake restores; none for an empty list."""
        if tags is None:
            return tuple(self.asleep)
        wanted = tag_list(tags, self._pools.tags)
        if not wanted:
            return ()
        deferrable = self.asleep if self._deferrable is None else self._deferrable
        return tuple(t for t in self.asleep if t in wanted or t not in deferrable)

    def segments(self, tag: str) -> list[Segment]:
        """The segments to wake; those whose last tensor was freed meanwhile are given up first."""
        pools = [managed.pool for managed in self._pools if managed.tag == tag]
        snapshots = [current_snapshot(pool, trim=True) for pool in pools]
        return [s for snapshot in snapshots for s in snapshot.segments if is_asleep(s.state)]

    def commit_wake(self, tags: Iterable[str]) -> dict[str, Policy]:
        """Note that these tags are awake; returns their policies, should they sleep again."""
        policies = {tag: self.asleep.pop(tag) for tag in tags}
        for tag in self._contents.dirty_tags & policies.keys():
            self._contents.forget_freed(tag, self._pools.blocks(tag))
        return policies
