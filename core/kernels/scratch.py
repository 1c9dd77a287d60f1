"""Where a kernel's scratch comes from: what was reserved for it, else a buffer of its own."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.core.workspace import TensorSpec, WorkspaceManager, total_bytes
from hal.core.workspace.specs import aligned_buffer, carve

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Reserved:
    workspace: weakref.ref[WorkspaceManager]
    bytes: int


class KernelScratch:
    """The scratch of one kernel on every device; thread-safe.

    Reservations are recorded per device, so that the kernel finds them from its tensors alone.
    Without one, or for a request beyond it, a cached buffer per device serves, and one message says
    so: it grows with its largest request, no workspace counts it, and it stays during a sleep.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._reserved: dict[torch.device, _Reserved] = {}
        self._cached: dict[torch.device, Tensor] = {}
        self._told = False
        self._mutex = threading.Lock()

    def reserve(self, workspace: WorkspaceManager, *specs: TensorSpec) -> int:
        """Reserve in a workspace, whose device's requests it then serves; returns bytes."""
        size = workspace.reserve(self.owner, *specs)
        largest = workspace.reserved(self.owner)
        self._reserved[workspace.device] = _Reserved(weakref.ref(workspace), largest)
        return size

    def take(
        self,
        device: torch.device,
        *specs: TensorSpec,
        workspace: WorkspaceManager | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Uninitialised views, valid until the next request; `workspace` overrides the record."""
        size = total_bytes(specs)
        if workspace is None:
            workspace = self._serving(device, size)
        elif workspace.is_locked and size > workspace.reserved(self.owner):
            workspace = None
        if workspace is None:
            return carve(self._own(device, size), specs)
        return workspace.get_simultaneous(*specs, owner=self.owner, inputs=inputs)

    def cached_bytes(self, device: torch.device) -> int:
        """Bytes of the kernel's own buffer on a device."""
        with self._mutex:
            return self._cached[device].numel() if device in self._cached else 0

    def drop_cached(self) -> None:
        """Let the kernel's own buffers go."""
        with self._mutex:
            self._cached.clear()

    def _serving(self, device: torch.device, size: int) -> WorkspaceManager | None:
        found = self._reserved.get(device)
        return found.workspace() if found is not None and size <= found.bytes else None

    def _own(self, device: torch.device, size: int) -> Tensor:
        with self._mutex:
            buffer = self._cached.pop(device, None)
            if buffer is None or buffer.numel() < size:
                buffer = None  # goes before its successor comes
                self._tell(size)
                buffer = aligned_buffer(size, device)
            self._cached[device] = buffer
            return buffer

    def _tell(self, size: int) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "%s takes %.2f MiB of scratch of its own: nothing that large was reserved for it "
                "in a workspace, so it stays resident during a sleep",
                self.owner,
                size / (1 << 20),
            )
