"""A sleep mode for vLLM's engine on the host, which by itself has none.

Weights, KV cache, runtime state (input buffers and block tables included) and sampling scratch are
made in pools of host memory, whose backups go to a file. While asleep the process keeps the
addresses and no pages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

from hal.core.integrations.vllm import installation
from hal.core.integrations.vllm.logging import logger
from hal.core.tags import RUNTIME, WORKSPACE
from hal.errors import StateError


class HostWorkerMixin:
    """Opens the pools that vLLM's host worker leaves out, and does what its sleep only warns of."""

    vllm_config: Any
    model_runner: Any
    sleep_mode_backend: Any

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        """The pool of `tag`, which the rest of vLLM's worker enters by itself."""
        return installation.allocator().use_memory_pool(tag)

    def init_device(self) -> None:
        """As vLLM's, with a workspace; input buffers and block tables go into the runtime pool."""
        from vllm.v1.worker import gpu_worker, workspace

        if installation.allocator().get_current_usage():
            raise StateError(
                "another engine of this process still holds pool memory; delete it first"
            )
        PREPACKING.switch_off()
        lanes = getattr(gpu_worker, "_num_workspace_lanes", lambda *_: 1)
        workspace.init_workspace_manager(
            torch_cpu(),
            1,
            lanes(self.vllm_config, cast("Any", self).use_v2_model_runner),
            alloc_context=lambda: self._maybe_get_memory_pool_context(WORKSPACE),
        )
        with self._maybe_get_memory_pool_context(RUNTIME):
            cast("Any", super()).init_device()

    def load_model(self, *args: Any, **options: Any) -> None:
        """As vLLM's; says which weights a kernel has packed all the same."""
        cast("Any", super()).load_model(*args, **options)
        PREPACKING.tell()

    def shutdown(self) -> None:
        """As vLLM's; the next engine of this process may prepack again."""
        cast("Any", super()).shutdown()
        PREPACKING.switch_on()

    def sleep(self, level: int = 1) -> None:
        """Sleep through the backend; at level 2 buffers are saved, as on a device."""
        if level == 2:
            mine = cast("Any", self)
            mine._sleep_saved_buffers = _copies(self.model_runner.model)  # noqa: SLF001
            mine._sleep_saved_draft_buffers = _copies(mine.get_draft_model())  # noqa: SLF001
        self.sleep_mode_backend.suspend(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """As vLLM's worker of a device; its host worker only warns."""
        _device_worker().wake_up(self, tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """As vLLM's worker of a device; its host worker refuses."""
        _device_worker().discard(self, tags)


def _device_worker() -> Any:
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def torch_cpu() -> Any:
    """torch's name for the host."""
    import torch

    return torch.device("cpu")


def _copies(model: Any) -> dict[str, Any]:
    """Copies of a model's buffers outside the pools."""
    return {} if model is None else {n: b.detach().clone() for n, b in model.named_buffers()}


class Prepacking:
    """oneDNN's habit of moving linear weights into memory of its own, which no pool sees.

    It is off from before a model is loaded until its engine is gone, since a reload would pack,
    too. Quantized kernels cannot do without: what they pack is counted and told.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self.untracked = 0
        """Bytes that kernels have packed since it was switched off."""

    def switch_off(self) -> None:
        """Let linear layers work on torch's own tensors."""
        from vllm import _custom_ops as ops

        if not hasattr(ops, "_supports_onednn"):
            logger().info("this vLLM has no switch for oneDNN's prepacking; its copies stay")
        changes = {"_supports_onednn": False, "create_onednn_scaled_mm": self._pack}
        for name, value in changes.items():
            if hasattr(ops, name) and name not in self._before:
                self._before[name] = getattr(ops, name)
                setattr(ops, name, value)

    def switch_on(self) -> None:
        """As vLLM has it."""
        from vllm import _custom_ops as ops

        while self._before:
            setattr(ops, *self._before.popitem())
        self.untracked = 0

    def tell(self) -> None:
        """Log what stays resident during a sleep."""
        if self.untracked:
            logger().warning(
                "%.1f MiB of quantized weights are in oneDNN's own memory: untracked, they stay "
                "resident during a sleep",
                self.untracked / (1 << 20),
            )

    def _pack(self, weight: Any, *args: Any, **options: Any) -> Any:
        self.untracked += weight.nbytes
        return self._before["create_onednn_scaled_mm"](weight, *args, **options)


PREPACKING = Prepacking()
