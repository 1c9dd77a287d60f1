"""The driver's checkpoint of a process: what `hal.core.parking` needs of a platform that has it."""

from __future__ import annotations

import abc
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hal.memory import MemoryInfo


class ProcessState(enum.IntEnum):
    """Where a process is on its way off the device and back, as its driver says."""

    RUNNING = 0
    LOCKED = 1
    """Device calls wait; everything is still on the device."""
    CHECKPOINTED = 2
    FAILED = 3
    """The driver cannot bring it back."""


class ProcessCheckpoint(abc.ABC):
    """Takes the driver's own state of this process off its devices, through a helper process.

    A process that is checkpointed cannot call its driver, so another one does it. No method here
    calls the driver: they may be used while the process is checkpointed.
    """

    busy_code: int
    """The driver's code of a lock that timed out."""

    @abc.abstractmethod
    def command(self) -> Sequence[str]:
        """The helper's command line, without the id of the process to act on, its last argument.

        It answers the lines of `hal/cuda/checkpoint_helper.py`'s protocol.
        """

    @abc.abstractmethod
    def why_not_now(self) -> str | None:
        """What of this process the driver cannot checkpoint, as far as it can be known in advance,
        and what to do about it; None when nothing is known.
        """

    @abc.abstractmethod
    def memory(self) -> Mapping[int, MemoryInfo]:
        """Memory of every device that this process has open, by its index; raises nothing."""
