"""A worker extension of vLLM with which a test lets the device refuse memory."""

from __future__ import annotations

import errno


class Faults:
    """Mixed into the worker by `--worker-extension-cls`; called through `/collective_rpc`."""

    def take_device_memory(self) -> None:
        """From now on the device has no memory, as if another process had taken it."""
        self.hal_allocator.manager.device.fail("create", nth=2, code=errno.ENOMEM, times=-1)  # type: ignore[attr-defined]

    def give_device_memory_back(self) -> None:
        """The other process has gone."""
        self.hal_allocator.manager.device.clear_faults()  # type: ignore[attr-defined]
