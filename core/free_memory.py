"""Free memory of a device, as far as it is known, and the wait for enough of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hal.errors import HalError, OutOfDeviceMemory
from hal.native import Device, TransferFailed, TransferReport

_POLL_SECONDS = 0.02


class FreeMemory:
    """What a wake can take of one device; `truthful`: whether the driver's answer counts."""

    def __init__(self, device: Device, *, truthful: bool) -> None:
        self._device, self._truthful = device, truthful

    def now(self) -> int | None:
        """Bytes, or None when they are unknown; a failing query must not hide the caller's
        error.
        """
        if not self._truthful:
            return None
        try:
            return self._device.memory()[0]
        except HalError:
            return None

    def wake(
        self,
        transfer: Callable[[], TransferReport],
        tags: Sequence[str],
        needed: int,
        deadline: float,
    ) -> TransferReport:
        """Wake `needed` bytes of tags; memory that is short, before or only when it is taken, is
        waited for until the deadline (of the monotonic clock).
        """
        while True:
            self._wait(tags, needed, deadline)
            try:
                return transfer()
            except TransferFailed as failure:
                error = self._told(failure.error, tags, needed)
                if not isinstance(error, OutOfDeviceMemory) or time.monotonic() >= deadline:
                    raise error from failure
            time.sleep(_POLL_SECONDS)

    def _wait(self, tags: Sequence[str], needed: int, deadline: float) -> None:
        """Refuse, before anything changes, a wake that is known not to fit even after waiting."""
        while (free := self.now()) is not None and free < needed:
            if time.monotonic() >= deadline:
                raise OutOfDeviceMemory(", ".join(tags), needed, free)
            time.sleep(_POLL_SECONDS)

    def _told(self, error: HalError, tags: Sequence[str], needed: int) -> HalError:
        """The error, with all that the wake needs."""
        if not isinstance(error, OutOfDeviceMemory):
            return error
        return OutOfDeviceMemory(", ".join(tags), needed, self.now(), "wake_up")
