"""Sleep and wake of an engine's tags on one device, as transactions."""

from __future__ import annotations

import enum
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from hal.core.backup import BackupOptions, backing_of
from hal.core.contents import Contents, Tensors, extent, named_tensors
from hal.core.hooks import Hook, Hooks
from hal.core.parking import NOT_PARKED, PROCESS
from hal.core.pool_set import (
    ManagedPool,
    PoolOrders,
    PoolSet,
    current_snapshot,
    orders_for,
    orders_of,
)
from hal.core.report import (
    NOTHING_MOVED,
    Residual,
    SleepPlan,
    SleepReport,
    TagPlan,
    WakePlan,
    WakeReport,
    is_asleep,
    merge,
    skipped_in,
    tag_reports,
    timings,
)
from hal.core.residual import driver_bytes, give_torch_cache_back, residual
from hal.core.tags import CUDAGRAPH, Policy, level_of, tag_list
from hal.core.transfer import Transfer
from hal.errors import (
    AsleepError,
    DirtyError,
    GroupError,
    HalError,
    HookError,
    InvalidArgument,
    OutOfDeviceMemory,
    StateError,
    Unsupported,
)
from hal.memory import TorchUsage
from hal.native import Backing, Segment, TransferFailed, TransferReport
from hal.platform import Platform, PoolNesting
from hal.pools import Pool, find_segment, storage_address

if TYPE_CHECKING:
    import torch

    from hal.core.group import RankGroup
    from hal.core.kv_init import KVInitScope

_POLL_SECONDS = 0.02
Report = TypeVar("Report", SleepReport, WakeReport)


class State(enum.Enum):
    """Where a manager's tags are."""

    AWAKE = "awake"
    PARTLY_AWAKE = "partly awake"
    ASLEEP = "asleep"
    PARKED = "parked"
    """Asleep with the driver's own state of the process off the device too."""


class SleepManager:
    """Puts the tags of one engine on one device to sleep and wakes them at the same addresses.

    `deferrable` names the tags that a wake may leave asleep, None meaning every tag; any wake
    restores every other tag. `debug` fills memory without contents with 0xFF at a wake. `group`
    makes the transitions of several ranks agree. Every method is thread-safe; a failed transition
    raises a typed error with state before = state after, unless the error's text says that it ended
    asleep.
    """

    def __init__(
        self,
        platform: Platform,
        *,
        device: int | None = None,
        backup: BackupOptions | None = None,
        deferrable: Iterable[str] | None = ("weights", "kv_cache"),
        group: RankGroup | None = None,
        debug: bool = False,
    ) -> None:
        self.platform = platform
        self.device_index = device or 0
        self.device = platform.device(self.device_index)
        self.capabilities = platform.capabilities_of(self.device_index)
        if not self.capabilities.virtual_memory:
            raise Unsupported("sleep", platform.name, self.capabilities.virtual_memory.reason)
        self.backup = backup or BackupOptions()
        named = (deferrable,) if isinstance(deferrable, str) else deferrable
        self.deferrable = None if named is None else frozenset(named)
        self.debug = debug
        self.last_error: BaseException | None = None
        self._group = group
        self._pools = PoolSet(platform, self.device_index)
        self._contents = Contents()
        self._hooks = Hooks()
        self._transfer = Transfer(platform, self.device_index, self.backup, debug=debug)
        self._sleeping: dict[str, Policy] = {}
        self._asleep_bytes: dict[str, int] = {}
        self._graph_bytes = 0
        self._wakes = 0
        self._lock = threading.RLock()
        self._transition: str | None = None
        self._scopes = threading.local()

    # -- pools

    @contextmanager
    def pool(self, tag: str, policy: Policy | None = None) -> Iterator[Pool]:
        """Allocate from the pool of `tag` on this thread; `policy` fixes what every sleep does to
        this pool.

        Raises `AsleepError` while the tag sleeps, and `StateError` inside another scope where the
        platform would give the allocation to the outer one.
        """
        if not tag or not isinstance(tag, str):
            raise InvalidArgument(f"a tag is a name, not {tag!r}")
        stack: list[Pool] = self._scopes.__dict__.setdefault("open", [])
        with ExitStack() as scope:
            with self._lock:  # until the scope counts as open, no sleep may begin
                self._refuse_asleep(tag)
                pool = self._pools.get(tag, policy)
                self._refuse_nesting(pool, stack)
                scope.enter_context(pool.use())
            stack.append(pool)
            scope.callback(stack.remove, pool)
            yield pool

    @contextmanager
    def graph_pool(
        self, tag: str = CUDAGRAPH, policy: Policy | None = None, *, group: Hashable = None
    ) -> Iterator[tuple[int, int]]:
        """Yield the id with which graphs are captured into the pool of `tag`, to sleep with it.

        `policy` is as in `pool`. Graphs of one pool use its memory again for one another; those
        that must not are given different `group`s, each of which has a pool of its own. Raises
        `Unsupported` where a graph's pool cannot sleep, `AsleepError` while the tag does.
        """
        if not self.capabilities.graph_pools:
            raise Unsupported(
                "a pool for captured graphs",
                self.platform.name,
                self.capabilities.graph_pools.reason,
            )
        with self._lock:
            self._refuse_asleep(tag)
            pool = self._pools.get(tag, policy, group)
        before = driver_bytes(self.platform, self.device_index)
        with pool.capture() as pool_id:
            yield pool_id
        after = driver_bytes(self.platform, self.device_index)
        if before is not None and after is not None:
            self._graph_bytes += max(0, after - before)

    def ipc_handle(self, tensor: torch.Tensor) -> bytes:
        """A handle with which another process maps the tensor; `Unsupported` for pool memory.

        Interprocess handles of the old kind do not work on virtual-memory mappings: some drivers
        refuse them, some hand out one that faults when it is used. So no driver is asked.
        """
        raise Unsupported(
            "an interprocess handle",
            self.platform.name,
            f"the tensor is in pool {self.tag_of(tensor)!r}, whose memory is mapped for this "
            "process alone; allocate what others map outside the pools, and turn custom "
            "all-reduce kernels off",
        )

    def _refuse_parked(self) -> None:
        PROCESS.refuse_parked(tuple(self._sleeping))

    def _refuse_asleep(self, tag: str) -> None:
        self._refuse_parked()
        if tag in self._sleeping:
            raise AsleepError([tag], "its pool cannot allocate")

    def _refuse_nesting(self, pool: Pool, stack: Sequence[Pool]) -> None:
        if stack and stack[0] is not pool and self.capabilities.pool_nesting is PoolNesting.FIFO:
            raise StateError(
                f"{self.platform.name} gives an allocation to the outermost pool, so a "
                f"{pool.tag!r} scope inside a {stack[0].tag!r} scope would allocate under the "
                "wrong tag; leave the outer scope first, or use kv_init(), which does"
            )

    def kv_init(
        self,
        *,
        nesting: Literal["auto", "fallback", "flatten"] = "auto",
        strict: bool = False,
    ) -> KVInitScope:
        """The scope around KV initialisation: see `KVInitScope`."""
        from hal.core.kv_init import KVInitScope

        self._refuse_parked()
        return KVInitScope(self, nesting=nesting, strict=strict)

    # -- state

    @property
    def state(self) -> State:
        with self._lock:
            if PROCESS.parked:
                return State.PARKED
            if not self._sleeping:
                return State.AWAKE
            return State.PARTLY_AWAKE if self._awake_tags() else State.ASLEEP

    def _awake_tags(self) -> list[str]:
        return [tag for tag in self._pools.tags if tag not in self._sleeping]

    @property
    def is_sleeping(self) -> bool:
        """Whether any tag sleeps; reading it has no side effect."""
        return bool(self._sleeping)

    @property
    def sleeping_tags(self) -> frozenset[str]:
        return frozenset(self._sleeping)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that have a pool."""
        return self._pools.tags

    @property
    def wake_count(self) -> int:
        """How many wakes there were; what was registered before the last may be stale."""
        return self._wakes

    @property
    def dirty(self) -> tuple[str, ...]:
        """Names of what was discarded and not loaded again."""
        with self._lock:
            return self._contents.dirty()

    @property
    def backup_bytes(self) -> int:
        """Bytes of host memory or disk that hold backups now."""
        return self._transfer.stats().used

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory or disk taken for backups, in use or kept for the next sleep."""
        return self._transfer.stats().held

    def require_awake(self, *tags: str) -> None:
        """Raise `AsleepError` or `DirtyError` unless the tags (none given: all) may be used."""
        with self._lock:
            self._refuse_parked()
            wanted = tag_list(tags, self._pools.tags) if tags else self._pools.tags
            if asleep := [tag for tag in wanted if tag in self._sleeping]:
                raise AsleepError(asleep)
            if dirty := self._contents.dirty(wanted):
                raise DirtyError(dirty)

    # -- contents

    def track(self, source: Tensors, prefix: str = "") -> None:
        """Name tensors (a module's parameters and buffers, or a mapping) for dirty lists and
        audits.
        """
        with self._lock:
            self._contents.track(source, prefix)

    def preserve(self, tensors: Tensors) -> None:
        """Keep these tensors when their tag is discarded (buffers, scales, routing maps)."""
        with self._lock:
            self._contents.preserve(tensors)

    def mark_loaded(self, source: str | Tensors) -> None:
        """Note that a tag, or these tensors, hold their contents again."""
        with self._lock:
            if isinstance(source, str):
                tag_list(source, self._pools.tags)
            self._contents.mark_loaded(source)

    def tag_of(self, tensor: torch.Tensor) -> str | None:
        """The tag of the segment in which a tensor's storage lies; None when it is in no pool of
        this manager.
        """
        address = storage_address(tensor)
        return self._pools.tag_at(address) if address else None

    def outside(self, source: Tensors) -> tuple[str, ...]:
        """Names of the tensors whose storage lies in no pool: they stay where they are over a
        sleep.
        """
        named = named_tensors(source)
        return tuple(n for n, t in named.items() if t.numel() and self.tag_of(t) is None)

    def live_blocks(self, tag: str) -> list[tuple[int, int]]:
        """(address, size) in bytes of the blocks of a tag that hold something."""
        self._refuse_parked()
        return self._pools.blocks(tag)

    def before_sleep(self, hook: Hook, name: str | None = None) -> None:
        """Run `hook` before each sleep, in reverse order of registration; one that raises cancels
        the sleep.
        """
        self._hooks.add_before_sleep(hook, name)

    def after_wake(self, hook: Hook, name: str | None = None, tag: str | None = None) -> None:
        """Run `hook` after each wake (of `tag`, if given), and after a sleep that did not happen.

        One that raises leaves the woken tags asleep.
        """
        self._hooks.add_after_wake(hook, name, tag)

    def read_backup(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a tensor's bytes from its backup to `out`, a contiguous host tensor of its size.

        The tensor has to be contiguous. It may sleep, or be awake with a backup that
        `BackupOptions.retain` has kept. Raises `StateError` where there is no backup of it.
        """
        address, size = extent(tensor)
        with self._lock:
            segment = find_segment(self._pools.segments(), address)
            if segment is None:
                raise StateError("the tensor is in no pool of this manager: it has no backup")
            self.device.read_backup(segment, address - segment.address, size, out.data_ptr())

    # -- plans

    def plan_sleep(
        self, level: int = 1, *, policy: Mapping[str, Policy] | None = None
    ) -> SleepPlan:
        """What `sleep` with these arguments would release and need; changes nothing."""
        with self._lock:
            self._refuse_parked()
            pools = self._sleep_orders(self._resolve(level, policy), trim=False)
            needed = sum(pool.host_bytes for pool in pools)
            asleep = sum(s.backup_bytes for s in self._pools.segments() if is_asleep(s.state))
            available, why_not = self._transfer.room(orders_of(pools), asleep)
            plans = (TagPlan(p.tag, p.policy, len(p.orders), p.bytes, p.host_bytes) for p in pools)
            return SleepPlan(tuple(plans), needed, available, not why_not, why_not)

    def plan_wake_up(self, tags: str | Iterable[str] | None = None) -> WakePlan:
        """What `wake_up` with these arguments would take and whether it fits; changes nothing."""
        with self._lock:
            self._refuse_parked()
            targets = self._wake_targets(tags)
            plans = [self._wake_tag_plan(tag) for tag in targets]
            needed = sum(plan.bytes for plan in plans)
            free = self._free_memory()
            missing = max(0, needed - free) if free is not None else 0
            fits = None if free is None else not missing
            return WakePlan(tuple(plans), needed, free, fits, missing)

    def _wake_tag_plan(self, tag: str) -> TagPlan:
        asleep = [s for s in self._pools.segments(tag) if is_asleep(s.state)]
        size = sum(segment.size for segment in asleep)
        host = sum(segment.backup_bytes for segment in asleep)
        return TagPlan(tag, self._sleeping[tag], len(asleep), size, host)

    def _free_memory(self) -> int | None:
        """Free device memory, or None when it is unknown; a failing query must not hide the
        caller's error.
        """
        if not self.capabilities.free_is_truthful:
            return None
        try:
            return self.device.memory()[0]
        except HalError:
            return None

    # -- sleep

    def sleep(
        self,
        level: int = 1,
        *,
        policy: Mapping[str, Policy] | None = None,
        park: bool = False,
    ) -> SleepReport:
        """Put tags to sleep by a level, or by a policy a tag (a tag that it does not name is kept).

        Tags already asleep keep their first policy. Raises `HostMemoryError`, `StateError` inside
        an open scope, `UnknownTagError`, `HookError`, and the driver's typed errors; then
        everything is awake as before.

        `park` then takes the driver's own state of this process off the device, which needs every
        tag asleep: until `wake_up()` returns nothing in this process may call the driver. Raises
        `Unsupported`, `StateError` and `HostMemoryError` before anything changed. A process that
        could not be parked after its tags went to sleep is told by a note of the error and stays
        asleep, or, with a group, is awake again.
        """
        with self._in_transition("sleep"):
            chosen = None if policy is not None else level
            actions = self._resolve(level, policy)
            if PROCESS.parked:
                return self._parked_report(self._nothing_slept(len(actions) or 1, chosen))
            before = self.sleeping_tags
            return self._as_one_group(
                "sleep",
                lambda: (self._sleep_and_park if park else self._sleep)(actions, chosen),
                lambda: self._unpark_and_wake(tuple(self.sleeping_tags - before), 0.0),
            )

    def discard(self, tags: str | Iterable[str]) -> SleepReport:
        """Give up contents and memory of these tags, and the backups of those that sleep."""
        with self._in_transition("discard"):
            self._refuse_parked()
            wanted = tag_list(tags, self._pools.tags)
            actions = {m: Policy.DISCARD for m in self._pools if m.tag in wanted}
            return self._sleep(actions, None, drop_backups=True)

    def _resolve(
        self, level: int, policy: Mapping[str, Policy] | None
    ) -> dict[ManagedPool, Policy]:
        """What a sleep does to each pool; a pool's own policy wins over the level, not over
        `policy`.
        """
        if policy is None:
            chosen = level_of(level)
            return {m: m.policy or chosen.policy(m.tag) for m in self._pools}
        for tag, value in policy.items():
            if not isinstance(value, Policy):
                raise InvalidArgument(f"policy of {tag!r} is {value!r}, not a Policy")
        tag_list(policy, self._pools.tags)
        return {m: policy[m.tag] for m in self._pools if m.tag in policy}

    def _sleep_orders(
        self, actions: Mapping[ManagedPool, Policy], *, trim: bool = True
    ) -> list[PoolOrders]:
        return [
            orders_for(managed, policy, self._contents, trim=trim)
            for managed, policy in actions.items()
            if policy is not Policy.KEEP and managed.tag not in self._sleeping
        ]

    def _sleep(
        self,
        actions: Mapping[ManagedPool, Policy],
        level: int | None,
        *,
        drop_backups: bool = False,
    ) -> SleepReport:
        if open_tags := self._pools.open_tags():
            raise StateError(
                f"a scope of {', '.join(open_tags)} is open; leave it before a sleep, or what it "
                "allocates would have no memory"
            )
        ignored = self._ignored(actions, warn=not drop_backups)
        dropped = self._drop_backups(ignored) if drop_backups else None
        pools = self._sleep_orders(actions)
        if not pools:
            now = self.platform.torch_usage(self.device_index)
            return self._sleep_report([], dropped, now, level, len(ignored) or 1)
        self._transfer.make_room(orders_of(pools))
        if self._run_before_hooks():
            pools = self._plan_again(actions)
        give_torch_cache_back(self.platform)
        with ThreadPoolExecutor(max_workers=1) as beside:  # while the device copies
            usage = beside.submit(self.platform.torch_usage, self.device_index)
            report = self._transfer_to_sleep(pools)
        done = merge([r for r in (dropped, report) if r])
        return self._sleep_report(pools, done, usage.result(), level, len(ignored))

    def _ignored(self, actions: Mapping[ManagedPool, Policy], *, warn: bool) -> list[ManagedPool]:
        """The pools that sleep already: they keep their first policy, and a differing request is
        told.
        """
        asleep = [m for m in actions if m.tag in self._sleeping]
        differing = sorted(
            {
                m.tag
                for m in asleep
                if actions[m] is not Policy.KEEP and actions[m] is not self._sleeping[m.tag]
            }
        )
        if differing and warn:
            warnings.warn(
                f"{', '.join(differing)} sleep already and keep their policy; wake them first to "
                "put them to sleep differently",
                stacklevel=5,
            )
        return asleep

    def _drop_backups(self, pools: Sequence[ManagedPool]) -> TransferReport | None:
        """Give backups up, but for those that hold a preserved tensor."""
        given_up = [orders_for(managed, Policy.DISCARD, self._contents) for managed in pools]
        orders = [order for order in orders_of(given_up) if not order.live]
        if not orders:
            return None
        report = self._transfer.drop_backups(orders)
        self._commit_sleep(given_up)
        return report

    def _run_before_hooks(self) -> bool:
        """Whether there were any, so that memory may have changed since the plan."""
        try:
            return self._hooks.run_before_sleep()
        except HookError:
            self._undo_before_hooks()
            raise

    def _plan_again(self, actions: Mapping[ManagedPool, Policy]) -> list[PoolOrders]:
        """The orders after hooks, which may have made or freed what is to be backed up."""
        pools = self._sleep_orders(actions)
        try:
            self._transfer.make_room(orders_of(pools))
        except HalError:
            self._undo_before_hooks()
            raise
        return pools

    def _undo_before_hooks(self) -> None:
        """Tell the engine that it stays awake, without hiding the error that made it so."""
        try:
            self._hooks.run_after_wake(frozenset(self._awake_tags()))
        except HookError as error:
            warnings.warn(f"after the failed sleep: {error}", stacklevel=2)

    def _transfer_to_sleep(self, pools: Sequence[PoolOrders]) -> TransferReport:
        try:
            report = self._transfer.to_sleep(pools)
        except TransferFailed as failure:
            if failure.report.ended_asleep:
                self._commit_sleep(pools)
                failure.error.add_note(
                    "what was released could not be mapped again: it ended asleep, backups whole"
                )
            else:
                self._undo_before_hooks()
            raise failure.error from failure
        self._commit_sleep(pools)
        tracked = sum(pool.bytes for pool in pools)
        if tracked and not report.released and not skipped_in(report):
            raise StateError(
                f"the sleep released 0 of {tracked} tracked bytes; the memory is still mapped"
            )
        return report

    def _commit_sleep(self, pools: Sequence[PoolOrders]) -> None:
        for pool in pools:
            self._sleeping[pool.tag] = pool.policy
            if pool.policy is Policy.DISCARD and not pool.scratch:
                self._contents.mark_discarded(pool.tag, pool.blocks)

    def _residual(self, usage: TorchUsage | None) -> tuple[Residual, ...]:
        return residual(
            self.platform,
            self.device_index,
            self._pools,
            usage=usage,
            graphs=self._graph_bytes,
        )

    def _sleep_report(
        self,
        pools: Sequence[PoolOrders],
        report: TransferReport | None,
        usage: TorchUsage | None,
        level: int | None,
        skipped: int,
    ) -> SleepReport:
        done = report or NOTHING_MOVED
        groups = ((pool.tag, pool.policy, pool.serials) for pool in pools)
        return SleepReport(
            **timings(done),
            tags=tag_reports(done, groups),
            skipped=skipped + skipped_in(done),
            level=level,
            residual=self._residual(usage),
        )

    # -- parking

    def _sleep_and_park(
        self, actions: Mapping[ManagedPool, Policy], level: int | None
    ) -> SleepReport:
        before = self.sleeping_tags
        self._check_park(actions)
        report = self._sleep(actions, level)
        try:
            self._park()
        except HalError as error:
            if PROCESS.parked is None and self._group is not None:  # as the other ranks will be
                self._wake(tuple(self.sleeping_tags - before), 0.0)
            elif PROCESS.parked is None:
                error.add_note(NOT_PARKED)
            raise
        return self._parked_report(report)

    def _check_park(self, actions: Mapping[ManagedPool, Policy]) -> None:
        """Refuse, before anything changes, what is known not to lead to a parked process."""
        if not self.capabilities.park:
            raise Unsupported("parking", self.platform.name, self.capabilities.park.reason)
        give_torch_cache_back(self.platform)  # pools that nobody needs go with it
        going = [m for m, policy in actions.items() if policy is not Policy.KEEP]
        segments = [s for managed in going for s in managed.pool.segments()]
        releasing = sum(s.size for s in segments if not is_asleep(s.state))
        kept = set(self._awake_tags()) - {managed.tag for managed in going}
        PROCESS.prepare(self.platform, releasing, ", ".join(sorted(kept)))
        copies = self._transfer.needed(orders_of(self._sleep_orders(actions, trim=False)))
        stats = self._transfer.stats()
        fresh = 0 if self._backs_up_to_file else max(0, copies - (stats.held - stats.used))
        PROCESS.check_host(PROCESS.residual(releasing) + fresh, self._budget_left)

    @property
    def _backs_up_to_file(self) -> bool:
        backing, _ = backing_of(self.backup, self.capabilities)
        return backing is Backing.FILE

    @property
    def _budget_left(self) -> int | None:
        """What the host budget leaves for the driver's copies; None without one for memory."""
        if self.backup.budget is None or self._backs_up_to_file:
            return None
        return max(0, self.backup.budget - self._transfer.stats().used)

    def _park(self) -> None:
        """Park; what the wake will take is noted now, since nothing can be asked while parked."""
        give_torch_cache_back(self.platform)
        self._asleep_bytes = {
            tag: sum(s.size for s in self._pools.segments(tag) if is_asleep(s.state))
            for tag in self._sleeping
        }
        PROCESS.check_host(PROCESS.residual(), self._budget_left)
        PROCESS.park()

    @staticmethod
    def _nothing_slept(skipped: int, level: int | None) -> SleepReport:
        return SleepReport(**timings(NOTHING_MOVED), tags=(), skipped=skipped, level=level)

    def _parked_report(self, report: SleepReport) -> SleepReport:
        parked = PROCESS.parked
        if parked is None:
            return report
        return replace(
            report,
            park_seconds=parked.seconds,
            parked_residual=parked.residual,
            parked_host_bytes=parked.host_bytes,
        )

    def _unpark_and_wake(self, targets: tuple[str, ...], wait_for_memory: float) -> WakeReport:
        if not PROCESS.parked:
            return self._wake(targets, wait_for_memory)
        deadline = time.monotonic() + wait_for_memory
        needed = sum(self._asleep_bytes.get(tag, 0) for tag in targets)
        seconds = PROCESS.unpark({self.device_index: needed}, deadline)
        try:
            report = self._wake(targets, max(0.0, deadline - time.monotonic()))
        except HalError as error:
            error.add_note(NOT_PARKED)
            raise
        return replace(report, unpark_seconds=seconds)

    # -- wake

    def wake_up(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        wait_for_memory: float | None = None,
    ) -> WakeReport:
        """Wake all tags, or the given ones with every tag that is not deferrable.

        `wait_for_memory`: seconds to wait for enough free device memory. Raises
        `OutOfDeviceMemory`, `HookError`, `BackupCorrupted`, `UnknownTagError` and the driver's
        typed errors; then it is asleep as before, backups whole. A parked process comes back first:
        when that lacks memory it stays parked, when the rest fails it is asleep and not parked, and
        `ProcessLost` is the one end without a way back.
        """
        with self._in_transition("wake_up"):
            targets = self._wake_targets(tags)
            if PROCESS.parked and tags is not None and not targets:
                return self._wake_report(NOTHING_MOVED, [], skipped=1)
            policies = {m: self._sleeping[m.tag] for m in self._pools if m.tag in targets}
            again = self._sleep_and_park if PROCESS.parked else self._sleep
            return self._as_one_group(
                "wake_up",
                lambda: self._unpark_and_wake(targets, wait_for_memory or 0.0),
                lambda: again(policies, None),
            )

    def _wake(self, targets: tuple[str, ...], wait_for_memory: float) -> WakeReport:
        if not targets:
            return self._wake_report(NOTHING_MOVED, [], skipped=1)
        by_tag = {tag: self._asleep_segments(tag) for tag in targets}
        segments = [segment for group in by_tag.values() for segment in group]
        deadline = time.monotonic() + wait_for_memory
        report = self._transfer_when_it_fits(targets, segments, deadline)
        groups = [(t, self._sleeping[t], {s.serial for s in by_tag[t]}) for t in targets]
        self._finish_wake(targets, segments)
        return self._wake_report(report, groups, skipped=skipped_in(report))

    def _wake_report(
        self, done: TransferReport, groups: Iterable[tuple[str, Policy, set[int]]], *, skipped: int
    ) -> WakeReport:
        return WakeReport(
            **timings(done),
            tags=tag_reports(done, groups),
            skipped=skipped,
            still_asleep=tuple(sorted(self._sleeping)),
        )

    def _by_serial(self) -> dict[int, Segment]:
        return {segment.serial: segment for segment in self._pools.segments()}

    def _as_one_group(
        self, name: str, act: Callable[[], Report], undo: Callable[[], object]
    ) -> Report:
        """Do a transition on every rank of the group or on none of them."""
        if self._group is None:
            return act()
        failure: HalError | None = None
        try:
            report = act()
        except HalError as error:
            failure = error
        failed = self._group.failures(name, failure)
        if failure is not None:
            raise failure
        if failed:
            undo()
            raise GroupError(name, failed)
        return report

    def _wake_targets(self, tags: str | Iterable[str] | None) -> tuple[str, ...]:
        """The sleeping tags that a wake restores; none for an empty list."""
        if tags is None:
            return tuple(self._sleeping)
        wanted = tag_list(tags, self._pools.tags)
        if not wanted:
            return ()
        deferrable = self._sleeping if self.deferrable is None else self.deferrable
        return tuple(t for t in self._sleeping if t in wanted or t not in deferrable)

    def _asleep_segments(self, tag: str) -> list[Segment]:
        """The segments to wake; those whose last tensor was freed meanwhile are given up first."""
        pools = [managed.pool for managed in self._pools if managed.tag == tag]
        snapshots = [current_snapshot(pool, trim=True) for pool in pools]
        return [s for snapshot in snapshots for s in snapshot.segments if is_asleep(s.state)]

    def _transfer_when_it_fits(
        self, tags: Sequence[str], segments: Sequence[Segment], deadline: float
    ) -> TransferReport:
        """Wake the segments; memory that is short, before or only when it is taken, is waited for
        until the deadline.
        """
        while True:
            self._wait_for_room(tags, segments, deadline)
            try:
                return self._transfer.to_wake(segments, self._by_serial)
            except TransferFailed as failure:
                error = self._wake_error(failure.error, tags, segments)
                if not isinstance(error, OutOfDeviceMemory) or time.monotonic() >= deadline:
                    raise error from failure
            time.sleep(_POLL_SECONDS)

    def _wait_for_room(
        self, tags: Sequence[str], segments: Sequence[Segment], deadline: float
    ) -> None:
        """Refuse, before anything changes, a wake that is known not to fit even after waiting."""
        needed = sum(segment.size for segment in segments)
        while (free := self._free_memory()) is not None and free < needed:
            if time.monotonic() >= deadline:
                raise OutOfDeviceMemory(", ".join(tags), needed, free)
            time.sleep(_POLL_SECONDS)

    def _wake_error(
        self, error: HalError, tags: Sequence[str], segments: Sequence[Segment]
    ) -> HalError:
        if not isinstance(error, OutOfDeviceMemory):
            return error
        needed = sum(segment.size for segment in segments)
        return OutOfDeviceMemory(", ".join(tags), needed, self._free_memory(), "wake_up")

    def _finish_wake(self, tags: Sequence[str], segments: Sequence[Segment]) -> None:
        """Run the after-wake hooks and commit; a hook that raises puts what woke back to sleep."""
        self._wakes += 1
        policies = {tag: self._sleeping.pop(tag) for tag in tags}
        for tag in self._contents.dirty_tags & set(tags):
            self._contents.forget_freed(tag, self._pools.blocks(tag))
        try:
            self._hooks.run_after_wake(frozenset(tags))
        except HookError:
            self._sleeping.update(policies)
            self._transfer.sleep_again(segments, self._by_serial)
            raise
        self._transfer.forget(segments)

    # -- host memory

    def prepare(self, size: int) -> None:
        """Take host memory for backups of `size` bytes now instead of at the next sleep."""
        with self._lock:
            self._refuse_parked()
            self._transfer.arena.prepare(size)

    def retain_backups(self, retain: bool) -> None:
        """Keep backups over the next wakes, or no longer: `BackupOptions.retain` from now on."""
        with self._lock:
            self.backup = replace(self.backup, retain=retain)
            self._transfer.configure(self.backup)

    def trim_host(self) -> int:
        """Give host memory that holds no backup back to the system; returns bytes."""
        with self._lock:
            self._refuse_parked()
            return self._transfer.trim()

    # -- life

    @contextmanager
    def _in_transition(self, name: str) -> Iterator[None]:
        with self._lock:
            if self._transition:
                raise StateError(
                    f"{name}() was called from a hook of {self._transition}(); return first"
                )
            self._transition = name
            try:
                yield
                self.last_error = None
            except BaseException as error:
                self.last_error = error
                raise
            finally:
                self._transition = None

    def close(self) -> None:
        """Give the pools and the host memory back; `StateError` while tensors sleep, since they
        would be lost.
        """
        with self._lock:
            self._refuse_parked()
            live = [tag for tag in self._sleeping if self._pools.blocks(tag)]
            if live:
                raise StateError(
                    f"{', '.join(live)} still sleep with live tensors; wake_up() or free them "
                    "before close()"
                )
            self._pools.close()
            self._sleeping.clear()
            self._transfer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
