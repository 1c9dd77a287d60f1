"""The helper process that takes this process off the device and back, as its owner sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from hal.errors import DriverError, Unsupported
from hal.process_checkpoint import ProcessState

_STARTED_WITHIN = 60.0
"""Seconds: a driver that nobody uses yet takes a while to start on a machine of many devices."""
_ENDS_WITHIN = 5.0


class HelperLost(Exception):
    """Internal: the helper died, or did not answer in time; its last call may have happened."""


@dataclass(frozen=True)
class _Answer:
    call: str
    code: int
    text: str
    state: int

    @classmethod
    def of(cls, line: bytes) -> Self:
        return cls(**json.loads(line))


class Helper:
    """One helper process: asked one thing at a time, it answers within a time or is given up.

    It starts while its owner goes on; the first question waits for it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        # A session of its own: an interrupt typed at the terminal is for the owner.
        self._process = subprocess.Popen(  # noqa: S603 - the platform's own command line
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._text = b""
        self._started = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, call: str, timeout: float, **arguments: Any) -> ProcessState:
        """Make a driver call on this process; returns the state that it leaves.

        `timeout` is in seconds. Raises `HelperLost`, `DriverError`, `Unsupported`.
        """
        self._wait_for_start()
        self._write({"call": call, **arguments})
        answer = self._read(timeout)
        if answer.code:
            raise DriverError(answer.call, answer.code, answer.text)
        return ProcessState(answer.state)

    def _wait_for_start(self) -> None:
        if self._started:
            return
        answer = self._read(_STARTED_WITHIN)
        if answer.code:
            why = f"{answer.call} in its helper process failed with {answer.code} ({answer.text})"
            raise Unsupported("parking", "this driver", why)
        self._started = True

    def _write(self, request: dict[str, Any]) -> None:
        try:
            os.write(self._stdin, json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise HelperLost(f"the helper process {self.pid} ended ({error})") from error

    def _read(self, timeout: float) -> _Answer:
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        while b"\n" not in self._text:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1e3):
                raise HelperLost(f"the helper process {self.pid} gave no answer in {timeout:g} s")
            read = os.read(self._stdout, 4096)
            if not read:
                raise HelperLost(f"the helper process {self.pid} ended")
            self._text += read
        line, _, self._text = self._text.partition(b"\n")
        return _Answer.of(line)

    @property
    def _stdin(self) -> int:
        return _descriptor(self._process.stdin)

    @property
    def _stdout(self) -> int:
        return _descriptor(self._process.stdout)

    def close(self) -> None:
        """End the helper, by force if a driver call keeps it."""
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(_ENDS_WITHIN if self._started else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def kill(self) -> None:
        """End the helper at once: it is not to make another call."""
        self._process.kill()
        self.close()


def _descriptor(stream: Any) -> int:
    if stream is None or stream.closed:
        raise HelperLost("the helper process was closed")
    return int(stream.fileno())
