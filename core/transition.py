"""A sleep or a wake of one manager's tags with its hooks around it: committed whole, or undone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from hal.core.contents import Contents
from hal.core.free_memory import FreeMemory
from hal.core.hooks import Hooks
from hal.core.pool_set import ManagedPool, PoolOrders, PoolSet, orders_for, orders_of
from hal.core.report import TagSerials, skipped_in
from hal.core.tag_states import Actions, TagStates
from hal.core.tags import Policy
from hal.core.transfer import Transfer
from hal.errors import HalError, HookError, StateError
from hal.native import Segment, TransferFailed, TransferReport


class Transition:
    """Carries the transitions of one manager out."""

    def __init__(
        self,
        pools: PoolSet,
        contents: Contents,
        tags: TagStates,
        transfer: Transfer,
        hooks: Hooks,
        free_memory: FreeMemory,
    ) -> None:
        self._pools, self._contents, self._tags = pools, contents, tags
        self._transfer, self._hooks, self._free_memory = transfer, hooks, free_memory
        self.wakes = 0
        """How many there were, also those that an after-wake hook has undone."""

    # -- to sleep

    def prepare_sleep(self, actions: Actions) -> list[PoolOrders]:
        """The orders of a sleep whose backups fit and whose hooks have run; none, and no hook,
        where nothing is to go to sleep.
        """
        pools = self._tags.orders(actions)
        if not pools:
            return []
        self._transfer.make_room(orders_of(pools))
        if self._run_before_hooks():
            pools = self._plan_again(actions)
        return pools

    def _run_before_hooks(self) -> bool:
        """Whether there were any, so that memory may have changed since the plan."""
        try:
            return self._hooks.run_before_sleep()
        except HookError:
            self._undo_before_hooks()
            raise

    def _plan_again(self, actions: Actions) -> list[PoolOrders]:
        """The orders after hooks, which may have made or freed what is to be backed up."""
        pools = self._tags.orders(actions)
        try:
            self._transfer.make_room(orders_of(pools))
        except HalError:
            self._undo_before_hooks()
            raise
        return pools

    def _undo_before_hooks(self) -> None:
        """Tell the engine that it stays awake, without hiding the error that made it so."""
        try:
            self._hooks.run_after_wake(frozenset(self._tags.awake))
        except HookError as error:
            warnings.warn(f"after the failed sleep: {error}", stacklevel=2)

    def sleep(self, pools: Sequence[PoolOrders]) -> TransferReport:
        """Carry prepared orders out; on an error everything is awake again, unless its note says
        that it ended asleep.
        """
        try:
            report = self._transfer.to_sleep(pools)
        except TransferFailed as failure:
            if failure.report.ended_asleep:
                self._tags.commit_sleep(pools)
                failure.error.add_note(
                    "what was released could not be mapped again: it ended asleep, backups whole"
                )
            else:
                self._undo_before_hooks()
            raise failure.error from failure
        self._tags.commit_sleep(pools)
        tracked = sum(pool.bytes for pool in pools)
        if tracked and not report.released and not skipped_in(report):
            raise StateError(
                f"the sleep released 0 of {tracked} tracked bytes; the memory is still mapped"
            )
        return report

    def drop_backups(self, pools: Sequence[ManagedPool]) -> TransferReport | None:
        """Give the backups of sleeping pools up, but for those that hold a preserved tensor; None
        where there are none.
        """
        given_up = [orders_for(managed, Policy.DISCARD, self._contents) for managed in pools]
        orders = [order for order in orders_of(given_up) if not order.live]
        if not orders:
            return None
        report = self._transfer.drop_backups(orders)
        self._tags.commit_sleep(given_up)
        return report

    # -- to wake

    def wake(self, tags: Sequence[str], deadline: float) -> tuple[TransferReport, list[TagSerials]]:
        """Wake these tags once they fit, or raise at the deadline; on an error they sleep as
        before.
        """
        by_tag = {tag: self._tags.segments(tag) for tag in tags}
        segments = [segment for group in by_tag.values() for segment in group]
        report = self._free_memory.wake(
            lambda: self._transfer.to_wake(segments, self._pools.by_serial),
            tags,
            sum(segment.size for segment in segments),
            deadline,
        )
        policies = self._finish_wake(tags, segments)
        return report, [(t, policies[t], {s.serial for s in by_tag[t]}) for t in tags]

    def _finish_wake(self, tags: Sequence[str], segments: Sequence[Segment]) -> dict[str, Policy]:
        """Run the after-wake hooks and commit; a hook that raises puts what woke back to sleep.

        Returns the policies by which the tags slept.
        """
        self.wakes += 1
        policies = self._tags.commit_wake(tags)
        try:
            self._hooks.run_after_wake(frozenset(tags))
        except HookError:
            self._tags.asleep.update(policies)
            self._transfer.sleep_again(segments, self._pools.by_serial)
            raise
        self._transfer.forget(segments)
        return policies
