"""Parking: the driver's own state of this process off the device while its tags sleep, and back.

The driver's process checkpoint copies what the process still holds on the device (context, modules,
graphs, torch's own pool) to host memory, at a rate far below the link's: it must see the residual
of a sleep alone. It acts on the whole process, so the process is what is parked, not a manager.

While parked no driver call may be made here, by nobody: it would wait for the wake, and some
drivers crash in a synchronization. So nothing below asks the driver, free memory least of all, and
a management library that is not there is a reason not to park.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from hal.core.park_helper import ParkHelper
from hal.errors import (
    AsleepError,
    BusyError,
    DriverError,
    HalError,
    HostMemoryError,
    OutOfDeviceMemory,
    ProcessLost,
    StateError,
    Unsupported,
)
from hal.helper_process import HelperLost
from hal.memory import MemoryInfo
from hal.native import host_memory
from hal.platform import Platform
from hal.process_checkpoint import ProcessCheckpoint, ProcessState

_MIB = 1 << 20
DEVICE_MARGIN = 256 * _MIB
"""Free device memory that a restore must find beyond what it takes, in bytes: one that fails is
final.
"""
HOST_MARGIN = 64 * _MIB
LOCK_SECONDS = 10.0
"""How long calls that other threads have in the driver may take to end."""
EXIT_SECONDS = 60.0
"""How long a parked process that ends waits for the room that its way back takes: what runs at its
end may call the driver, and would wait there for ever.
"""
_POLL_SECONDS = 0.02
_HELPERS = 3
"""How many helpers may be lost in one transition."""
_SLOWEST_RATE = 64 * _MIB
_NEXT = {
    (ProcessState.RUNNING, ProcessState.CHECKPOINTED): "lock",
    (ProcessState.LOCKED, ProcessState.CHECKPOINTED): "checkpoint",
    (ProcessState.CHECKPOINTED, ProcessState.RUNNING): "restore",
    (ProcessState.LOCKED, ProcessState.RUNNING): "unlock",
}
NOT_PARKED = (
    "the tags sleep and the process is not parked: wake_up() works as after any sleep, "
    "sleep(park=True) tries to park again"
)


@dataclass(frozen=True)
class Parked:
    """What parking did; sizes in bytes, times in seconds."""

    seconds: float
    needed: Mapping[int, int]
    """Device memory that the way back takes, by device: what parking freed, and at least what the
    process held.
    """
    residual: int | None
    """Device memory that the process still holds, over all devices; None when it is unknown."""

    @property
    def host_bytes(self) -> int:
        """The driver's copies, which are host memory of this process."""
        return sum(self.needed.values())


class ProcessParking:
    """The parking of this process: there is one, whichever manager asks.

    `lock_seconds` bounds the wait for other threads' device calls, `answer_seconds` each call of
    the helper, to which the time to copy is added.
    """

    def __init__(self, *, lock_seconds: float = LOCK_SECONDS, answer_seconds: float = 60.0) -> None:
        self._lock_seconds, self._answer_seconds = lock_seconds, answer_seconds
        self._lock = threading.RLock()
        self._helper: ParkHelper | None = None
        self._checkpoint: ProcessCheckpoint | None = None
        self._parked: Parked | None = None
        self._lost: str = ""

    @property
    def parked(self) -> Parked | None:
        """What parking did, while the process is parked."""
        return self._parked

    @property
    def helper_pid(self) -> int | None:
        """The helper's process id, while there is one."""
        return self._helper.pid if self._helper and self._helper.is_alive else None

    def refuse_parked(self, tags: tuple[str, ...] = ()) -> None:
        """Raise `AsleepError` while the process is parked."""
        if self._parked:
            raise AsleepError(tags, "the process is parked: no device call can be made")

    # -- before

    def prepare(self, platform: Platform, releasing: int, staying: str) -> None:
        """Raise `Unsupported` where this process cannot be parked, `StateError` when more than
        `releasing` bytes of pools are awake (`staying` names tags); else let a helper start.

        To be called before anything is touched.
        """
        with self._lock:
            _refuse_awake_pools(platform, releasing, staying)
            checkpoint = platform.process_checkpoint()
            if why_not := checkpoint.why_not_now():
                raise Unsupported("parking", platform.name, why_not)
            for index, info in checkpoint.memory().items():
                if info.free is None or info.total is None:
                    raise Unsupported(
                        "parking",
                        platform.name,
                        f"free memory of device {index} is not known without its driver, and the "
                        f"way back has to check it ({info.reason})",
                    )
            self._checkpoint = checkpoint
            self._living_helper()

    def residual(self, releasing: int = 0) -> int:
        """Bytes that the driver would copy if `releasing` more bytes were asleep: what this process
        holds, or where that is unknown, what all processes do.
        """
        if self._checkpoint is None:
            raise StateError("residual() comes after prepare()")
        return max(0, sum(map(_held_at_most, self._checkpoint.memory().values())) - releasing)

    @staticmethod
    def check_host(needed: int, budget_left: int | None) -> None:
        """Raise `HostMemoryError` unless the driver's copies of `needed` bytes fit in the host's
        memory, the control group's limit and what is left of the budget.
        """
        host = host_memory()
        available = host.available if budget_left is None else min(host.available, budget_left)
        if needed + HOST_MARGIN > available:
            limit = host.total if budget_left is None else None
            raise HostMemoryError(
                needed + HOST_MARGIN,
                available,
                limit,
                "for the driver's copies of a parked process",
            )

    # -- there and back

    def park(self) -> Parked:
        """Take this process off the device; returns what that did.

        Raises `BusyError` when other threads' calls do not end, and the driver's error when it
        refuses: then the process runs on. After `ProcessLost` it never does.
        """
        with self._lock:
            if self._checkpoint is None:
                raise StateError("park() comes after prepare()")
            self._drive(ProcessState.RUNNING, 0)  # a helper that cannot help is told now
            start, before = time.perf_counter(), self._checkpoint.memory()
            copying = sum(map(_held_at_most, before.values()))
            self._parked = Parked(0.0, {i: _held_at_most(m) for i, m in before.items()}, None)
            try:
                self._drive(ProcessState.CHECKPOINTED, copying)
            except HalError as error:
                self._stay_awake(error, copying)
                raise self._typed(error) from error
            seconds = time.perf_counter() - start
            self._parked = _parked(seconds, before, self._checkpoint.memory())
            _unpark_at_exit()
            return self._parked

    def _stay_awake(self, error: HalError, copying: int) -> None:
        """After a failure on the way out: back to running, or, if even that fails, still parked."""
        try:
            self._drive(ProcessState.RUNNING, copying)
        except ProcessLost:
            raise
        except HalError as second:
            error.add_note(f"and it may still be parked ({second}): call wake_up()")
            raise error from second
        self._parked = None

    def _typed(self, error: HalError) -> HalError:
        busy = self._checkpoint.busy_code if self._checkpoint else None
        if isinstance(error, DriverError) and error.code == busy:
            error = BusyError(
                f"device calls of other threads did not end within {self._lock_seconds:g} s, so "
                "the process could not be parked; let them end and call again"
            )
        return error

    def unpark(self, then: Mapping[int, int], deadline: float) -> float:
        """Bring this process back; returns seconds, 0.0 when it was not parked.

        `then` is device memory in bytes, by device, that the caller will take next: both have to be
        free, with a margin, or `OutOfDeviceMemory` is raised at `deadline` (of the monotonic clock)
        and the process is still parked. `ProcessLost` when the driver cannot restore it.
        """
        with self._lock:
            if self._parked is None:
                return 0.0
            if self._lost:
                raise ProcessLost(self._lost)
            self._wait_for_room(self._parked, then, deadline)
            start = time.perf_counter()
            self._drive(ProcessState.RUNNING, self._parked.host_bytes)
            self._parked = None
            return time.perf_counter() - start

    def _wait_for_room(self, parked: Parked, then: Mapping[int, int], deadline: float) -> None:
        while missing := self._missing(parked, then):
            if time.monotonic() >= deadline:
                raise missing
            time.sleep(_POLL_SECONDS)

    def _missing(self, parked: Parked, then: Mapping[int, int]) -> HalError | None:
        """The error of a restore now, as far as memory can tell; None when it can be made."""
        memory = self._checkpoint.memory() if self._checkpoint else {}
        for index, taken in parked.needed.items():
            needed = taken + then.get(index, 0) + DEVICE_MARGIN
            info = memory[index]
            if info.free is None:
                return BusyError(
                    f"free memory of device {index} is not known ({info.reason}), and a restore "
                    "without enough of it is final; it is still parked, call again"
                )
            if info.free < needed:
                return OutOfDeviceMemory("the parked process", needed, info.free, "wake_up")
        return None

    # -- the helper

    def _drive(self, goal: ProcessState, copying: int) -> None:
        """Bring the process to a state, whatever state it is in and however many helpers die.

        A driver call goes on without the helper that made it, so a new helper looks where the
        process is and goes on from there.
        """
        timeout = self._answer_seconds + copying / _SLOWEST_RATE
        failure = None
        for _ in range(_HELPERS):
            try:
                self._step_to(goal, self._living_helper(), timeout)
            except HelperLost as lost:
                failure = lost
            else:
                return
        raise BusyError(
            f"{_HELPERS} helper processes were lost on the way to {goal.name.lower()}: {failure}; "
            "call again"
        ) from failure

    def _living_helper(self) -> ParkHelper:
        if self._helper is None or not self._helper.is_alive:
            if self._checkpoint is None:
                raise StateError("a helper comes after prepare()")
            self.close()
            self._helper = ParkHelper(self._checkpoint.command())
        return self._helper

    def _step_to(self, goal: ProcessState, helper: ParkHelper, timeout: float) -> None:
        state = helper.call("state", timeout)
        while state is not goal:
            if state is ProcessState.FAILED:
                raise self._lose("the driver says that its checkpoint failed")
            call = _NEXT[state, goal]
            try:
                state = self._ask(helper, call, timeout)
            except DriverError as error:
                if call == "restore":
                    raise self._lose(str(error)) from error
                raise

    def _ask(self, helper: ParkHelper, call: str, timeout: float) -> ProcessState:
        if call != "lock":
            return helper.call(call, timeout)
        patience = self._lock_seconds
        return helper.call(call, timeout + patience, milliseconds=round(patience * 1e3))

    def _lose(self, why: str) -> ProcessLost:
        self._lost = (
            f"the driver cannot restore this parked process ({why}); its device memory is gone: "
            "end it and start a new one"
        )
        return ProcessLost(self._lost)

    def close(self) -> None:
        """End the helper."""
        with self._lock:
            if self._helper:
                self._helper.close()
                self._helper = None


def _refuse_awake_pools(platform: Platform, releasing: int, staying: str) -> None:
    devices = platform.open_devices().values()
    awake = sum(device.counters().mapped_bytes for device in devices) - releasing
    if awake > 0:
        raise StateError(
            f"{awake} bytes of pools would stay awake ({staying or 'of other managers'}), and the "
            "driver would copy them slowly; park with every tag of the process asleep"
        )


def _held_at_most(info: MemoryInfo) -> int:
    """Bytes that this process holds on a device; where it is not told apart, what all hold."""
    if info.process_used is not None:
        return info.process_used
    return max(0, (info.total or 0) - (info.free or 0) - (info.reserved or 0))


def _parked(
    seconds: float, before: Mapping[int, MemoryInfo], after: Mapping[int, MemoryInfo]
) -> Parked:
    needed, residual = {}, 0
    unknown = False
    for index, then in before.items():
        now = after[index]
        freed = max(0, (now.free or 0) - (then.free or 0))
        needed[index] = max(freed, then.process_used or 0)
        left = _left(then, now, freed)
        unknown |= left is None
        residual += left or 0
    return Parked(seconds, needed, None if unknown else residual)


def _left(before: MemoryInfo, after: MemoryInfo, freed: int) -> int | None:
    """What a parked process still holds: as told, or what it held less what parking freed."""
    if after.process_used is not None:
        return after.process_used
    return None if before.process_used is None else max(0, before.process_used - freed)


PROCESS = ProcessParking()
"""The parking of this process."""

_registered: list[bool] = []


def _unpark_at_exit() -> None:
    """Have the process brought back before it ends: what runs then may call the driver."""
    if not _registered:
        _registered.append(True)
        atexit.register(_leave)


def _leave() -> None:
    try:
        PROCESS.unpark({}, time.monotonic() + EXIT_SECONDS)
    except HalError as error:
        warnings.warn(f"the process ends parked: {error}", stacklevel=1)
    PROCESS.close()
