"""The allocator that vLLM's pools, graph captures and sleep backends ask, over a sleep manager."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from hal.core.group import RankGroup
from hal.core.integrations.vllm.errors import as_runtime_errors
from hal.core.integrations.vllm.logging import logger
from hal.core.integrations.vllm.options import PluginOptions
from hal.core.report import SleepReport, WakeReport, is_asleep
from hal.core.sleep import SleepManager
from hal.core.tags import CUDAGRAPH, KV_CACHE, WEIGHTS, Policy
from hal.errors import HalError
from hal.native import Segment

if TYPE_CHECKING:
    from hal.platform import Platform
    from hal.pools import Pool

DEFERRABLE = frozenset({WEIGHTS, KV_CACHE})
"""The tags that vLLM may leave asleep at a wake."""
Report = SleepReport | WakeReport
R = TypeVar("R", SleepReport, WakeReport)


@dataclass(frozen=True)
class Allocation:
    """One segment, as vLLM's own allocators list theirs."""

    handle: tuple[int, int, int, int]
    """(device, size in bytes, address, serial number)."""
    tag: str
    is_asleep: bool
    cpu_backup_tensor: None = None
    """Backups are in the host arena, never in a tensor."""


class HalMemAllocator:
    """Memory by tag for one engine in this process: vLLM's `MemAllocator` protocol, and what its
    workers ask of the singleton besides.

    Making one touches no device: platform and manager open with the first pool. `on_report` gets
    the report of each transition.
    """

    default_tag = "default"

    def __init__(
        self,
        platform: Callable[[], Platform],
        options: PluginOptions,
        *,
        on_report: Callable[[HalMemAllocator, Report], object] | None = None,
    ) -> None:
        self._platform, self.options = platform, options
        self._on_report = on_report
        self._manager: SleepManager | None = None
        self._pools: dict[str, Pool] = {}
        self._open = threading.local()
        self.group: RankGroup | None = None
        """The engine's ranks, whose transitions agree; set before the first of them."""
        self.last_report: Report | None = None
        self.last_park: SleepReport | None = None

    # -- the manager

    @property
    def manager(self) -> SleepManager:
        """The sleep manager of this process's device; made when first asked for."""
        if self._manager is None:
            platform = self._platform()
            self._manager = SleepManager(
                platform,
                device=_current_device(platform),
                backup=self.options.backup(),
                deferrable=DEFERRABLE,
                group=_RanksKnownLater(lambda: self.group),
                debug=self.options.debug,
            )
        return self._manager

    @property
    def is_open(self) -> bool:
        """Whether there is a manager, and so an opened device."""
        return self._manager is not None

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """The tags that sleep now."""
        return self._manager.sleeping_tags if self._manager else frozenset()

    # -- pools

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Allocate from the pool of `tag` on this thread.

        At the end of the outermost scope, segments in which nothing lives go back to the device,
        so that vLLM's memory profile does not count what loading left behind.
        """
        name = tag or self.default_tag
        stack = self._stack()
        with self.manager.pool(name) as pool:
            self._pools[name] = pool
            stack.append(name)
            try:
                yield
            finally:
                stack.remove(name)
        if not stack:
            pool.trim()

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Yield the id of the graph pool, the same each time; captures route to it by that id."""
        if CUDAGRAPH not in self._pools:
            with self.manager.pool(CUDAGRAPH) as pool:
                self._pools[CUDAGRAPH] = pool
        stack = self._stack()
        with self.manager.graph_pool(CUDAGRAPH) as pool_id:
            stack.append(CUDAGRAPH)
            try:
                yield pool_id
            finally:
                stack.remove(CUDAGRAPH)

    def _stack(self) -> list[str]:
        stack: list[str] = self._open.__dict__.setdefault("tags", [])
        return stack

    @property
    def current_tag(self) -> str:
        """The innermost tag that is open on this thread."""
        stack = self._stack()
        return stack[-1] if stack else self.default_tag

    # -- transitions

    def sleep(self, offload_tags: Sequence[str] | str | None = None) -> SleepReport:
        """Keep these tags in host memory (None: the default tag) and give up all others.

        A tag that sleeps already keeps its policy. What raises leaves everything awake; where the
        memory that was released could not be mapped again, everything sleeps, backups whole, and
        that is what was asked for: the error is a note in the log.
        """
        kept = _as_tags(self.default_tag if offload_tags is None else offload_tags)
        policy = {t: Policy.OFFLOAD if t in kept else Policy.DISCARD for t in self._awake()}
        return self._sleep(policy)

    def discard(self, tags: Iterable[str] | str) -> SleepReport:
        """Give up contents and memory of the awake ones of these tags."""
        wanted = _as_tags(tags)
        return self._sleep({tag: Policy.DISCARD for tag in self._awake() if tag in wanted})

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport:
        """Take memory again for these tags (None: all) and every tag that is not deferrable."""
        wanted = None if tags is None else _as_tags(tags)
        asleep = self.sleeping_tags
        chosen = [tag for tag in asleep if wanted is None or tag in wanted or tag not in DEFERRABLE]
        with as_runtime_errors():
            report = self.manager.wake_up(chosen, wait_for_memory=self.options.wait_for_memory)
        return self._told(report)

    def park(self) -> None:
        """Release the driver's own state too; the next wake takes it again first."""
        # The manager refuses it with a reason where the driver cannot.
        cast("Any", self.manager).sleep(policy={}, park=True)

    def _sleep(self, policy: dict[str, Policy]) -> SleepReport:
        before = self.sleeping_tags
        try:
            with as_runtime_errors():
                report = self.manager.sleep(policy=policy)
        except HalError as error:
            if self.sleeping_tags == before:
                raise
            report = self.manager.sleep(policy={})
            error.add_note(f"{', '.join(sorted(self.sleeping_tags - before))} sleep nevertheless")
            logger().warning("the sleep ended asleep after %s: %s", type(error).__name__, error)
        return self._told(report)

    def _awake(self) -> list[str]:
        if self._manager is None:
            return []
        return [tag for tag in self._manager.tags if tag not in self.sleeping_tags]

    def _told(self, report: R) -> R:
        self.last_report = report
        logger().info("%s", report)
        if self._on_report is not None:
            self._on_report(self, report)
        return report

    # -- what vLLM, and its own tests, read

    def get_current_usage(self) -> int:
        """Bytes of all segments in the ledger of this device, awake or asleep."""
        if self._manager is None:
            return 0
        books = self._manager.device.counters()
        return int(books.mapped_bytes + books.asleep_bytes)

    def bytes_by_tag(self) -> dict[str, tuple[int, int]]:
        """(mapped, asleep) bytes of each tag."""
        books: dict[str, tuple[int, int]] = {}
        for tag, segments in self._segments():
            asleep = sum(s.size for s in segments if is_asleep(s.state))
            mapped, before = books.get(tag, (0, 0))
            total = sum(s.size for s in segments)
            books[tag] = (mapped + total - asleep, before + asleep)
        return books

    @property
    def pointer_to_data(self) -> dict[int, Allocation]:
        """Every segment by its address."""
        device = self._manager.device_index if self._manager else 0
        return {
            s.address: Allocation((device, s.size, s.address, s.serial), tag, is_asleep(s.state))
            for tag, segments in self._segments()
            for s in segments
        }

    @property
    def allocator_and_pools(self) -> dict[str, list[tuple[Any, Any]]]:
        """By tag the pool that serves it, as torch has it, and ours."""
        return {
            tag: [(getattr(pool, "torch_pool", pool), pool)] for tag, pool in self._pools.items()
        }

    def _segments(self) -> Iterator[tuple[str, list[Segment]]]:
        for tag, pool in self._pools.items():
            yield tag, pool.segments()

    # -- life

    def release_pools(self) -> None:
        """Give the pools up when the engine goes; may be called again.

        Tensors that live on keep their segments until they are freed, asleep or not.
        """
        manager, self._manager = self._manager, None
        self._pools.clear()
        if manager is None:
            return
        gc.collect()
        try:
            manager.close()
        except HalError as error:
            logger().debug("the pools outlive the engine: %s", error)

    close = release_pools


class _RanksKnownLater(RankGroup):
    """The ranks of an engine whose first pool opens before its ranks have met."""

    def __init__(self, find: Callable[[], RankGroup | None]) -> None:
        super().__init__()
        self._find = find

    def failures(self, transition: str, own: BaseException | None) -> dict[int, str]:
        """As the ranks have it; without ranks, this one's own failure is all there is."""
        group = self._find()
        return group.failures(transition, own) if group is not None else {}


def _as_tags(tags: Iterable[str] | str) -> frozenset[str]:
    return frozenset((tags,) if isinstance(tags, str) else tags)


def _current_device(platform: Platform) -> int:
    """The index of the device that the worker has made its own."""
    return 0 if platform.device_type == "cpu" else torch.accelerator.current_device_index()
