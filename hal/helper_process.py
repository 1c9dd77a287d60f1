"""A child process that is asked in JSON lines, and given up when it does not answer in time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

_ENDS_WITHIN = 5.0
"""Seconds for one that has answered before; one that may still be starting is not waited for."""


class HelperLost(Exception):
    """Internal: the helper ended or gave no answer in time; what it was asked may have happened."""


class HelperProcess:
    """One child process of this one: asked one thing at a time, it answers within a time, or is
    ended as lost.

    `command` is its command line without its last argument, the id of this process. It starts while
    its owner goes on; the first question waits for it.
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
        self._answered = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a request; `HelperLost` without one in `timeout` seconds."""
        try:
            os.write(_descriptor(self._process.stdin), json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._lost(f"ended ({error})") from error
        return self.answer(timeout)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer, of a helper that gives one unasked; `HelperLost` as in `ask`."""
        deadline = time.monotonic() + timeout
        # Nothing is read ahead into a buffer that a poll of the descriptor would not see.
        stdout = _descriptor(self._process.stdout)
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        while b"\n" not in self._text:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1e3):
                raise self._lost(f"gave no answer in {timeout:g} s")
            read = os.read(stdout, 4096)
            if not read:
                raise self._lost("ended")
            self._text += read
        self._answered = True
        line, _, self._text = self._text.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _lost(self, how: str) -> HelperLost:
        """End the helper, which is not to do anything more; returns the error."""
        self._process.kill()
        self.close()
        return HelperLost(f"the helper process {self.pid} {how}")

    def close(self) -> None:
        """End the helper, by force if what it was asked to do keeps it."""
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(_ENDS_WITHIN if self._answered else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def _descriptor(stream: Any) -> int:
    if stream is None or stream.closed:
        raise HelperLost("the helper process was closed")
    return int(stream.fileno())
