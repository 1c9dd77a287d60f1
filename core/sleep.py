"""Sleep and wake of an engine's tags on one device, as transactions."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from hal.core.backup import BackupOptions
from hal.core.contents import Contents, Tensors, extent, named_tensors
from hal.core.free_memory import FreeMemory
from hal.core.group import RankGroup, as_one
from hal.core.hooks import Hook, Hooks
from hal.core.manager_parking import ManagerParking
from hal.core.parking import NOT_PARKED
from hal.core.plans import sleep_plan, wake_plan
from hal.core.pool_set import (
    PoolOrders,
    PoolSet,
    orders_of,
)
from hal.core.report import (
    NOTHING_MOVED,
    Residual,
    SleepPlan,
    SleepReport,
    TagSerials,
    WakePlan,
    WakeReport,
    merge,
    skipped_in,
    tag_reports,
    timings,
)
from hal.core.residual import driver_bytes, give_torch_cache_back, residual
from hal.core.tag_states import Actions, TagStates
from hal.core.tags import CUDAGRAPH, Policy, tag_list
from hal.core.transfer import Transfer
from hal.core.transition import Transition
from hal.errors import (
    DirtyError,
    HalError,
    InvalidArgument,
    StateError,
    Unsupported,
)
from hal.memory import TorchUsage
from hal.native import TransferReport
from hal.platform import Platform, PoolNesting
from hal.pools import Pool, find_segment, storage_address

if TYPE_CHECKING:
    import torch

    from hal.core.kv_init import KVInitScope


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
        self._tags = TagStates(self._pools, self._contents, self.deferrable)
        self._free_memory = FreeMemory(
            self.device, truthful=bool(self.capabilities.free_is_truthful)
        )
        self._transition = Transition(
            self._pools,
            self._contents,
            self._tags,
            self._transfer,
            self._hooks,
            self._free_memory,
        )
        self._parking = ManagerParking(platform, self.device_index, self._pools, self._transfer)
        self._graph_bytes = 0
        self._lock = threading.RLock()
        self._running = ""
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
        self._parking.refuse(self._tags.asleep)

    def _refuse_asleep(self, tag: str) -> None:
        self._refuse_parked()
        self._tags.refuse([tag], "its pool cannot allocate")

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
            if self._parking.is_parked:
                return State.PARKED
            if not self.is_sleeping:
                return State.AWAKE
            return State.PARTLY_AWAKE if self._tags.awake else State.ASLEEP

    @property
    def is_sleeping(self) -> bool:
        """Whether any tag sleeps; reading it has no side effect."""
        return bool(self._tags.asleep)

    @property
    def sleeping_tags(self) -> frozenset[str]:
        return frozenset(self._tags.asleep)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that have a pool."""
        return self._pools.tags

    @property
    def wake_count(self) -> int:
        """How many wakes there were; what was registered before the last may be stale."""
        return self._transition.wakes

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
            self._tags.refuse(wanted)
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
            pools = self._tags.orders(self._tags.actions(level, policy), trim=False)
            return sleep_plan(pools, self._pools.asleep_segments(), self._transfer)

    def plan_wake_up(self, tags: str | Iterable[str] | None = None) -> WakePlan:
        """What `wake_up` with these arguments would take and whether it fits; changes nothing."""
        with self._lock:
            self._refuse_parked()
            asleep = {tag: self._pools.asleep_segments(tag) for tag in self._tags.targets(tags)}
            return wake_plan(asleep, self._tags.asleep, self._free_memory.now())

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
            actions = self._tags.actions(level, policy)
            if self._parking.is_parked:
                nothing = self._sleep_report([], None, chosen, len(actions) or 1, ())
                return self._parking.with_parking(nothing)
            before = self.sleeping_tags
            return as_one(
                self._group,
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

    def _sleep(
        self,
        actions: Actions,
        level: int | None,
        *,
        drop_backups: bool = False,
    ) -> SleepReport:
        if open_tags := self._pools.open_tags():
            raise StateError(
                f"a scope of {', '.join(open_tags)} is open; leave it before a sleep, or what it "
                "allocates would have no memory"
            )
        ignored = self._tags.ignored(actions, warn=not drop_backups)
        dropped = self._transition.drop_backups(ignored) if drop_backups else None
        pools = self._transition.prepare_sleep(actions)
        if not pools:
            left = self._residual(self.platform.torch_usage(self.device_index))
            return self._sleep_report([], dropped, level, len(ignored) or 1, left)
        give_torch_cache_back(self.platform)
        with ThreadPoolExecutor(max_workers=1) as beside:  # while the device copies
            usage = beside.submit(self.platform.torch_usage, self.device_index)
            report = self._transition.sleep(pools)
        done = merge([r for r in (dropped, report) if r])
        return self._sleep_report(pools, done, level, len(ignored), self._residual(usage.result()))

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
        level: int | None,
        skipped: int,
        left: tuple[Residual, ...],
    ) -> SleepReport:
        done = report or NOTHING_MOVED
        groups = ((pool.tag, pool.policy, pool.serials) for pool in pools)
        return SleepReport(
            **timings(done),
            tags=tag_reports(done, groups),
            skipped=skipped + skipped_in(done),
            level=level,
            residual=left,
        )

    # -- parking

    def _sleep_and_park(self, actions: Actions, level: int | None) -> SleepReport:
        before = self.sleeping_tags
        self._check_park(actions)
        report = self._sleep(actions, level)
        try:
            self._parking.park(self._tags.asleep)
        except HalError as error:
            if not self._parking.is_parked and self._group is not None:  # as the others will be
                self._wake(tuple(self.sleeping_tags - before), 0.0)
            elif not self._parking.is_parked:
                error.add_note(NOT_PARKED)
            raise
        return self._parking.with_parking(report)

    def _check_park(self, actions: Actions) -> None:
        """Refuse, before anything changes, what is known not to lead to a parked process."""
        going = [m for m, policy in actions.items() if policy is not Policy.KEEP]
        releasing = self._parking.prepare(going, self._tags.awake)
        orders = orders_of(self._tags.orders(actions, trim=False))
        self._parking.check_host(releasing, orders)

    def _unpark_and_wake(self, targets: tuple[str, ...], wait_for_memory: float) -> WakeReport:
        if not self._parking.is_parked:
            return self._wake(targets, wait_for_memory)
        deadline = time.monotonic() + wait_for_memory
        seconds = self._parking.unpark(targets, deadline)
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
            targets = self._tags.targets(tags)
            if self._parking.is_parked and tags is not None and not targets:
                return self._wake_report(NOTHING_MOVED, [], skipped=1)
            asleep = self._tags.asleep
            policies = {m: asleep[m.tag] for m in self._pools if m.tag in targets}
            again = self._sleep_and_park if self._parking.is_parked else self._sleep
            return as_one(
                self._group,
                "wake_up",
                lambda: self._unpark_and_wake(targets, wait_for_memory or 0.0),
                lambda: again(policies, None),
            )

    def _wake(self, targets: tuple[str, ...], wait_for_memory: float) -> WakeReport:
        if not targets:
            return self._wake_report(NOTHING_MOVED, [], skipped=1)
        deadline = time.monotonic() + wait_for_memory
        report, groups = self._transition.wake(targets, deadline)
        return self._wake_report(report, groups, skipped=skipped_in(report))

    def _wake_report(
        self, done: TransferReport, groups: Iterable[TagSerials], *, skipped: int
    ) -> WakeReport:
        return WakeReport(
            **timings(done),
            tags=tag_reports(done, groups),
            skipped=skipped,
            still_asleep=tuple(sorted(self.sleeping_tags)),
        )

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
            if self._running:
                raise StateError(
                    f"{name}() was called from a hook of {self._running}(); return first"
                )
            self._running = name
            try:
                yield
                self.last_error = None
            except BaseException as error:
                self.last_error = error
                raise
            finally:
                self._running = ""

    def close(self) -> None:
        """Give the pools and the host memory back; `StateError` while tensors sleep, since they
        would be lost.
        """
        with self._lock:
            self._refuse_parked()
            live = [tag for tag in self._tags.asleep if self._pools.blocks(tag)]
            if live:
                raise StateError(
                    f"{', '.join(live)} still sleep with live tensors; wake_up() or free them "
                    "before close()"
                )
            self._pools.close()
            self._tags.asleep.clear()
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
