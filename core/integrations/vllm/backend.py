"""The sleep-mode backend `hal`: what vLLM's workers drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from hal.core.integrations.vllm.installation import allocator
from hal.core.tags import CUDAGRAPH, RUNTIME, WEIGHTS

if TYPE_CHECKING:
    from hal.core.integrations.vllm.allocator import HalMemAllocator

KEPT_AT_EVERY_LEVEL = (RUNTIME, CUDAGRAPH)


class HalBackend(SleepModeBackend):  # type: ignore[misc]
    """Sleeps and wakes by tag, as vLLM's default backend does, in transactions.

    `state()` follows only what has happened: a call that raises leaves it, and the memory, as they
    were.
    """

    def __init__(self) -> None:
        super().__init__()
        self._allocator: HalMemAllocator = allocator()

    def suspend(self, level: int = 1) -> None:
        """Keep runtime state and graphs, and at level 1 the weights; give up everything else."""
        kept = (WEIGHTS, *KEPT_AT_EVERY_LEVEL) if level == 1 else KEPT_AT_EVERY_LEVEL
        self._allocator.sleep(kept)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Wake the tags (None: all), and every tag that cannot stay asleep."""
        self._allocator.wake_up(tags)
        self._state = "SUSPENDED" if self._allocator.sleeping_tags else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give up contents and memory of awake tags."""
        self._allocator.discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """True: communicators are not in the pools."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """True: every address outlives its memory."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """True: neither graphs nor communicators are made again."""
        return True
