"""The worker class over the one that vLLM's platform chose: its sleep and wake are transactions,
and an engine on the host gets a sleep mode at all.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, cast

from hal.core.group import RankGroup
from hal.core.integrations.vllm import installation, scratch
from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.integrations.vllm.cpu import HostWorkerMixin
from hal.core.integrations.vllm.errors import named_errors
from hal.core.integrations.vllm.logging import logger
from hal.core.integrations.vllm.lora import preserve_adapters
from hal.errors import HalError, StateError

_SAVED = ("_sleep_saved_buffers", "_sleep_saved_parameters", "_sleep_saved_draft_buffers")
"""Where vLLM's worker keeps copies between a level-2 sleep and the wake."""


class WorkerMixin:
    """What differs from vLLM's worker: failures leave worker and memory in one state, the ranks of
    an engine agree, and scratch outside the pools moves into them.
    """

    vllm_config: Any
    parked = False

    @property
    def hal_allocator(self) -> HalMemAllocator:
        """The allocator of this process."""
        return installation.allocator()

    def init_device(self) -> None:
        """As vLLM's; then the ranks of the engine are known."""
        cast("Any", super()).init_device()
        self.hal_allocator.group = _ranks_of_engine(self.vllm_config)

    def load_model(self, *args: Any, **options: Any) -> None:
        """As vLLM's; then scratch is reserved, before profiling, warm-up and capture."""
        cast("Any", super()).load_model(*args, **options)
        preserve_adapters(self.hal_allocator, cast("Any", self).model_runner)
        if self.hal_allocator.options.scratch:
            scratch.take_over(self.hal_allocator, self)

    def sleep(self, level: int = 1) -> None:
        """Sleep or stay awake; what fails after the memory has gone is told, and does not count."""
        before = self.hal_allocator.sleeping_tags
        with named_errors():
            try:
                cast("Any", super()).sleep(level)
            except Exception as error:
                if self.hal_allocator.sleeping_tags == before:
                    self._stay_awake()
                    raise
                logger().warning("asleep, though the worker complained: %r", error)
        self._park()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake or stay asleep; copies kept for the wake are dropped only when it is done."""
        with named_errors():
            cast("Any", super()).wake_up(tags)
        self.parked = False

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give up awake tags."""
        with named_errors():
            cast("Any", super()).discard(tags)

    def synchronize_device(self) -> None:
        """As vLLM's, unless the driver's state of this process is released and nothing can run."""
        if not self.parked:
            cast("Any", super()).synchronize_device()

    def shutdown(self) -> None:
        """As vLLM's; the pools go with the worker."""
        cast("Any", super()).shutdown()
        self.hal_allocator.release_pools()

    def hal_report(self) -> dict[str, Any]:
        """The last transition's report, and the bytes of each tag; for `collective_rpc`."""
        allocator = self.hal_allocator
        last, park = allocator.last_report, allocator.last_park
        return {
            "last": last.as_dict() if last else None,
            "park": park.as_dict() if park else None,
            "tags": allocator.bytes_by_tag(),
            "sleeping": sorted(allocator.sleeping_tags),
        }

    def hal_host_bytes(self) -> dict[str, int]:
        """Bytes of host memory or disk taken for backups, and in use; for `collective_rpc`."""
        manager = self.hal_allocator.manager
        return {"held": manager.held_bytes, "used": manager.backup_bytes}

    def _park(self) -> None:
        """Park after the worker's own sleep, which asks the device for its memory at the end."""
        if not self.hal_allocator.options.park:
            return
        try:
            self.hal_allocator.park()
        except HalError as error:
            logger().warning("asleep, and not parked: %s: %s", type(error).__name__, error)
        else:
            self.parked = True

    def _stay_awake(self) -> None:
        """Drop what a sleep that did not happen has saved, which a later wake would write back."""
        for name in _SAVED:
            if getattr(self, name, None):
                setattr(self, name, {})
        restore_connector_caches()


def restore_connector_caches() -> None:
    """Give a KV connector its caches back, which the worker took from it before the sleep."""
    from vllm.distributed import kv_transfer

    if kv_transfer.has_kv_transfer_group():
        connector = kv_transfer.get_kv_transfer_group()
        if hasattr(connector, "restore_kv_caches"):
            connector.restore_kv_caches()


def _ranks_of_engine(vllm_config: Any) -> RankGroup | None:
    """The ranks that sleep and wake together; None for an engine of one, or of data-parallel
    ranks, each of which is put to sleep by itself.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size <= 1 or parallel.data_parallel_size > 1:
        return None
    from vllm.distributed.parallel_state import get_world_group

    return RankGroup(get_world_group().cpu_group)


@functools.cache
def worker_class(target: str, host: bool) -> type[Any]:
    """Our worker over the class that `target` names."""
    module, _, name = target.rpartition(".")
    base = getattr(importlib.import_module(module), name)
    mixins = (WorkerMixin, HostWorkerMixin) if host else (WorkerMixin,)
    return type("HalWorker", (*mixins, base), {"__module__": __name__, "__doc__": base.__doc__})


def __getattr__(name: str) -> Any:
    if name != "HalWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    target = os.environ.get(installation.WORKER_BASE)
    if target is None:
        raise StateError(
            f"{installation.WORKER_BASE} does not reach this process; let vLLM's executor pass "
            "the front end's environment on"
        )
    return worker_class(target, os.environ.get(installation.ACTIVE) == "cpu")
