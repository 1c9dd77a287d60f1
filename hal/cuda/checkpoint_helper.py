"""The helper of a process that parks: makes libcuda's checkpoint calls on its owner.

Run by its path with the owner's process id; it needs the standard library alone and makes no device
context. The owner writes a JSON object a line, {"call": "lock", "milliseconds": 5000}, and reads
one for each: {"code": 0, "call": "cuCheckpointProcessLock", "text": "", "state": 1}. The first
answer, to no request, says whether libcuda could be loaded. The helper ends with its owner.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

LIBRARY = "libcuda.so.1"
CALLS = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
    "state": "cuCheckpointProcessGetState",
}
UNKNOWN_STATE = -1
PR_SET_PDEATHSIG = 1


class LockArguments(ctypes.Structure):
    """`CUcheckpointLockArgs`; the other calls' arguments are optional and not needed here."""

    _fields_ = [
        ("timeout_milliseconds", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class Driver:
    """libcuda's checkpoint functions, on one process."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._library = ctypes.CDLL(os.environ.get("HAL_LIBCUDA") or LIBRARY)

    def start(self) -> dict[str, Any]:
        """Make the driver ready for this process; that makes no context."""
        return self._answer("cuInit", self._library.cuInit(0), UNKNOWN_STATE)

    def make(self, call: str, milliseconds: int = 0) -> dict[str, Any]:
        """One call on the owner, and the state that it leaves the owner in."""
        if call == "state":
            code, state = self._state()
        else:
            arguments = ctypes.byref(LockArguments(milliseconds)) if call == "lock" else None
            code = getattr(self._library, CALLS[call])(self._owner, arguments)
            _, state = self._state()
        return self._answer(CALLS[call], code, state)

    def _state(self) -> tuple[int, int]:
        state = ctypes.c_int(UNKNOWN_STATE)
        code = self._library.cuCheckpointProcessGetState(self._owner, ctypes.byref(state))
        return code, state.value

    def _answer(self, call: str, code: int, state: int) -> dict[str, Any]:
        return {"call": call, "code": code, "text": self._text(code), "state": state}

    def _text(self, code: int) -> str:
        words = ctypes.c_char_p()
        if code == 0 or self._library.cuGetErrorString(code, ctypes.byref(words)) != 0:
            return ""
        return (words.value or b"").decode("utf-8", "replace")


def requests(owner: int) -> Iterator[dict[str, Any]]:
    """What the owner asks for, until it closes its end or is gone."""
    poll, text = select.poll(), b""
    for descriptor in (sys.stdin.fileno(), *_watch(owner)):
        poll.register(descriptor, select.POLLIN)
    while [descriptor for descriptor, _ in poll.poll()] == [sys.stdin.fileno()]:
        read = os.read(sys.stdin.fileno(), 4096)
        if not read:
            return
        *lines, text = (text + read).split(b"\n")
        yield from map(json.loads, lines)


def _watch(owner: int) -> list[int]:
    """A descriptor that becomes readable when the owner ends.

    A pipe alone does not tell: children that the owner has forked hold it open. The kernel's signal
    at a parent's death comes when the thread that started this process ends, so it serves only
    kernels that cannot watch a process.
    """
    try:
        return [os.pidfd_open(owner)]
    except ProcessLookupError:
        raise
    except OSError:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return []


def answer_all(driver: Driver, asked: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Answer requests in order, for ever."""
    while True:
        _say(driver.make(**asked.get()))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(owner: int) -> None:
    """Serve the owner until it ends, even while a driver call does not come back."""
    try:
        driver = Driver(owner)
    except OSError as error:
        _say({"call": "dlopen", "code": 1, "text": str(error), "state": UNKNOWN_STATE})
        return
    _say(driver.start())
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=answer_all, args=(driver, asked), daemon=True).start()
    for request in requests(owner):
        asked.put(request)


if __name__ == "__main__":
    main(int(sys.argv[1]))
