"""The helper process that takes this process off the device and back, as its owner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal.errors import DriverError, Unsupported
from hal.helper_process import HelperProcess
from hal.process_checkpoint import ProcessState

_STARTED_WITHIN = 60.0
"""Seconds: a driver that nobody uses yet takes a while to start on a machine of many devices."""


@dataclass(frozen=True)
class _Answer:
    call: str
    code: int
    text: str
    state: int


class ParkHelper(HelperProcess):
    """A helper that makes the driver's checkpoint calls on this process; `command` is that of a
    `ProcessCheckpoint`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command)
        self._started = False

    def call(self, name: str, timeout: float, **arguments: Any) -> ProcessState:
        """Make a driver call; returns the state that it leaves this process in.

        `timeout` is in seconds. Raises `HelperLost`, `DriverError`, `Unsupported`.
        """
        self._wait_for_start()
        answer = _Answer(**self.ask({"call": name, **arguments}, timeout))
        if answer.code:
            raise DriverError(answer.call, answer.code, answer.text)
        return ProcessState(answer.state)

    def _wait_for_start(self) -> None:
        if self._started:
            return
        answer = _Answer(**self.answer(_STARTED_WITHIN))
        if answer.code:
            why = f"{answer.call} in its helper process failed with {answer.code} ({answer.text})"
            raise Unsupported("parking", "this driver", why)
        self._started = True
