"""The workspace of one device: shared scratch a slot, keyed resources, and who asked for what."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Self, TypeVar, cast

import torch
from torch import Tensor

from hal.core.tags import WORKSPACE, Policy
from hal.core.workspace.debug import Watch
from hal.core.workspace.report import Reservation, SlotId, WorkspaceReport
from hal.core.workspace.slots import Adopted, Kept, Slot, key_text
from hal.core.workspace.specs import SpecLike, aligned_buffer, as_specs, carve, total_bytes
from hal.errors import AsleepError, InvalidArgument, StateError, WorkspaceLocked
from hal.pools import Pool, torch_device

if TYPE_CHECKING:
    from hal.core.sleep import SleepManager

T = TypeVar("T")
AllocContext = Callable[[], AbstractContextManager[object]]


class _Chosen(threading.local):
    """The slot that this thread works in."""

    ubatch = 0
    lane = 0


class WorkspaceManager:
    """Shared scratch of one device, a buffer per (ubatch, lane); thread-safe.

    `alloc_context` makes the context in which scratch is allocated, such as the pool of the
    `workspace` tag. Scratch is unzeroed, and a request's views are valid until the next request in
    the same slot. `debug` poisons what is handed out and checks views at each use: one that an
    earlier request gave out is reported in `findings`, one from before a sleep is refused.
    """

    def __init__(
        self,
        device: torch.device | str,
        num_ubatches: int = 1,
        num_lanes: int = 1,
        alloc_context: AllocContext = nullcontext,
        *,
        debug: bool = False,
    ) -> None:
        if num_ubatches < 1 or num_lanes < 1:
            raise InvalidArgument(
                f"{num_ubatches} ubatches and {num_lanes} lanes; at least one of each is needed"
            )
        self.device = torch.empty(0, device=device).device  # with its index, as tensors name it
        self.num_ubatches, self.num_lanes = num_ubatches, num_lanes
        self._alloc_context = alloc_context
        self._slots = {
            (ubatch, lane): Slot((ubatch, lane))
            for ubatch in range(num_ubatches)
            for lane in range(num_lanes)
        }
        self._reservations: dict[str, Reservation] = {}
        self._unreserved: dict[str, None] = {}
        self._adopted: list[Adopted] = []
        self._watch = Watch(self.device, lambda: self.is_asleep) if debug else None
        self._chosen = _Chosen()
        self._mutex = threading.RLock()
        self._locked = self._released = False
        self._wakes = 0
        self._sleeper: SleepManager | None = None

    @classmethod
    def of(
        cls,
        sleeper: SleepManager,
        num_ubatches: int = 1,
        num_lanes: int = 1,
        *,
        debug: bool = False,
    ) -> Self:
        """A workspace in the `workspace` tag of a sleep manager, which it follows into each sleep
        and out of it.
        """
        device = torch_device(sleeper.platform, sleeper.device_index)
        made = cls(
            device,
            num_ubatches,
            num_lanes,
            lambda: sleeper.pool(WORKSPACE),
            debug=debug or sleeper.debug,
        )
        made._sleeper = sleeper
        sleeper.after_wake(made._woke, name="workspace", tag=WORKSPACE)
        return made

    # -- slots

    @contextmanager
    def use_ubatch(self, ubatch: int) -> Iterator[None]:
        """Work in the slots of one micro-batch on this thread."""
        with self._choose("ubatch", ubatch, self.num_ubatches):
            yield

    @contextmanager
    def use_lane(self, lane: int) -> Iterator[None]:
        """Work in the slots of one lane on this thread; streams that overlap need a lane each."""
        with self._choose("lane", lane, self.num_lanes):
            yield

    @contextmanager
    def _choose(self, what: str, index: int, count: int) -> Iterator[None]:
        if not 0 <= index < count:
            raise InvalidArgument(
                f"{what} {index} is asked for and the workspace has {count}; make it with "
                f"num_{what}{'e' if what == 'ubatch' else ''}s={index + 1} or more"
            )
        before = getattr(self._chosen, what)
        setattr(self._chosen, what, index)
        try:
            yield
        finally:
            setattr(self._chosen, what, before)

    @property
    def _slot(self) -> Slot:
        """The one way from this thread's choice to a slot, for shared and for kept scratch."""
        return self._slots[self._chosen.ubatch, self._chosen.lane]

    # -- shared scratch

    def reserve(self, owner: str, *specs: SpecLike, lanes: Iterable[int] | None = None) -> int:
        """Put a floor under the shared slots (of `lanes`; None: of all) and return its bytes.

        A floor is never added to another: owners share a slot. An owner that reserves again raises
        its floor. Raises `WorkspaceLocked` after `lock()` if a slot would have to grow.
        """
        wanted = as_specs(specs)
        size = total_bytes(wanted)
        with self._mutex:
            chosen = set(range(self.num_lanes) if lanes is None else lanes)
            slots = [slot for slot in self._slots.values() if slot.id[1] in chosen]
            for slot in slots:
                self._fit(slot, size, owner, owner)
            earlier = self._reservations.get(owner)
            if earlier is None or earlier.bytes <= size:
                ids = tuple(slot.id for slot in slots)
                self._reservations[owner] = Reservation(owner, wanted, size, ids)
            self._unreserved.pop(owner, None)
        return size

    def reserved(self, owner: str) -> int:
        """Bytes that an owner has reserved; 0 when it has not."""
        found = self._reservations.get(owner)
        return found.bytes if found else 0

    def get_simultaneous(
        self, *specs: SpecLike, owner: str = "", inputs: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Uninitialised views of this thread's slot, one a spec, valid until its next request.

        They begin at multiples of 256 bytes and do not overlap. `inputs` are tensors that the
        caller still reads: debug mode reports those that lie in the slot. Raises `WorkspaceLocked`
        when the slot would have to grow after `lock()`, `AsleepError` while the scratch is asleep.
        """
        wanted = as_specs(specs)
        size = total_bytes(wanted)
        with self._mutex:
            slot = self._slot
            self._fit(slot, size, owner or "scratch", owner)
            self._note_request(slot, size, owner)
            buffer = slot.buffer if slot.buffer is not None else self._take(0)
            views = carve(buffer, wanted)
            return self._watch.hand_out(slot, views, owner, inputs) if self._watch else views

    def _note_request(self, slot: Slot, size: int, owner: str) -> None:
        slot.requests += 1
        if size > slot.high_water:
            slot.high_water, slot.high_water_owner = size, owner or _caller()
        if owner and owner not in self._reservations:
            self._unreserved[owner] = None

    def _fit(self, slot: Slot, size: int, name: str, owner: str) -> None:
        """Grow a slot that is smaller than `size`; its old buffer goes before the new one comes."""
        self._require_awake()
        if size <= slot.bytes:
            return
        if self._locked:
            raise WorkspaceLocked(name, size, slot.bytes, owner or _caller())
        slot.buffer = None
        self._give_back()
        slot.buffer = self._take(max(size, self._floor(slot)))

    def _floor(self, slot: Slot) -> int:
        floors = (entry.bytes for entry in self._reservations.values() if slot.id in entry.slots)
        return max(floors, default=0)

    def _take(self, size: int) -> Tensor:
        with self._alloc_context():
            return aligned_buffer(size, self.device)

    def _give_back(self) -> None:
        """Return dropped buffers to the device; a pool keeps their segments until it is trimmed,
        and cannot be trimmed inside its own scope.
        """
        with self._alloc_context() as place:
            pass
        if isinstance(place, Pool):
            place.trim()
        elif self.device.type != "cpu":
            torch.accelerator.empty_cache()

    @property
    def buffers(self) -> dict[SlotId, Tensor]:
        """The shared memory of each slot that has any, uint8; until `lock()` it may move."""
        slots = self._slots.values()
        return {slot.id: slot.buffer for slot in slots if slot.buffer is not None}

    # -- kept by key

    def get_persistent(
        self, key: Hashable, shape: Sequence[int], dtype: torch.dtype, *, zeroed: bool = False
    ) -> Tensor:
        """The tensor kept under `key` in this thread's slot, made at the first request.

        `zeroed` is for counters and semaphores that a kernel needs at zero: memory of their own,
        zero when made and zero again after each wake. Others hold scratch, which a sleep discards.
        Raises `WorkspaceLocked` for a new key after `lock()`, `InvalidArgument` for another shape,
        dtype or kind than it was made with.
        """
        [spec] = as_specs([(shape, dtype)])
        fill = torch.zeros if zeroed else torch.empty
        kept = self._keep(
            (Tensor, key),
            spec.bytes,
            lambda: Kept(fill(spec.shape, dtype=dtype, device=self.device), zeroed),
        )
        tensor = cast("Tensor", kept.value)
        if (tuple(tensor.shape), tensor.dtype, kept.zeroed) != (spec.shape, dtype, zeroed):
            raise InvalidArgument(
                f"scratch {key!r} is kept as {tensor.dtype} {list(tensor.shape)}"
                f"{', zeroed' if kept.zeroed else ''}, and {dtype} {list(spec.shape)}"
                f"{', zeroed' if zeroed else ''} is asked for; use another key"
            )
        return tensor

    def get_persistent_resource(
        self,
        key: Hashable,
        factory: Callable[[], T],
        *,
        on_wake: Callable[[T], object] | None = None,
    ) -> T:
        """The object kept under `key` in this thread's slot; `factory` makes it at first.

        What the factory allocates is scratch: a sleep discards it. `on_wake` gets the object after
        each wake, to plan again what it had planned. Raises `WorkspaceLocked` for a new key after
        `lock()`.
        """
        kept = self._keep(key, 0, lambda: Kept(factory(), on_wake=on_wake))
        return cast("T", kept.value)

    def _keep(self, key: Hashable, size: int, make: Callable[[], Kept]) -> Kept:
        with self._mutex:
            slot = self._slot
            if key not in slot.kept:
                self._require_awake()
                if self._locked:
                    raise WorkspaceLocked(key_text(key), size, 0, _caller())
                with self._alloc_context():
                    slot.kept[key] = make()
            return slot.kept[key]

    def adopt(
        self,
        owner: str,
        find: Callable[[], Iterable[Tensor]],
        *,
        zeroed: bool = False,
        on_wake: Callable[[], object] | None = None,
    ) -> None:
        """Account for scratch that a library took by itself; `find` returns its tensors now.

        After each wake it is zeroed, if `zeroed`, and `on_wake` is called.
        """
        with self._mutex:
            self._adopted.append(Adopted(owner, find, zeroed, on_wake))

    def check_zeroed(self, key: Hashable) -> None:
        """Raise `StateError` unless the zeroed tensor of `key` is zero; it waits for the device."""
        kept = self._slot.kept.get((Tensor, key))
        if kept is None or not kept.zeroed:
            raise InvalidArgument(f"{key!r} is no zeroed scratch of slot {self._slot.id}")
        if dirty := int(torch.count_nonzero(cast("Tensor", kept.value))):
            raise StateError(
                f"zeroed scratch {key!r} has {dirty} elements that are not zero; the kernel that "
                "uses it must leave it zero"
            )

    # -- lock

    def lock(self) -> tuple[str, ...]:
        """Refuse growth and new keys from now on; returns the owners that asked for scratch in the
        warm-up and reserved none, whose largest need nobody knows.
        """
        with self._mutex:
            self._locked = True
            return tuple(self._unreserved)

    def unlock(self) -> None:
        """Allow growth again, as when an engine changes its sizes."""
        with self._mutex:
            self._locked = False

    @property
    def is_locked(self) -> bool:
        return self._locked

    # -- sleep and wake

    @property
    def wake_count(self) -> int:
        """How many wakes there were; what was planned in scratch before the last is gone."""
        return self._wakes

    def require_current(self, wake_count: int, what: str) -> None:
        """Raise `StateError` for something that was planned in scratch before the last wake."""
        if wake_count != self._wakes:
            raise StateError(
                f"{what} was planned in scratch before the last wake, which lost it; plan again"
            )

    def release(self) -> None:
        """Give the memory of all scratch up until `restore()`; its addresses stay.

        Made with `of()`, it puts the `workspace` tag to sleep. Else it only notes that whoever
        gave `alloc_context` has released the memory.
        """
        if self._sleeper is not None and WORKSPACE in self._sleeper.tags:
            self._sleeper.sleep(policy={WORKSPACE: Policy.DISCARD})
        else:
            self._released = True

    def restore(self) -> None:
        """Take the memory again, at the same addresses: scratch undefined, zeroed kinds zero."""
        if self._sleeper is not None and WORKSPACE in self._sleeper.tags:
            self._sleeper.wake_up(WORKSPACE)
        elif self._released:
            self._woke()

    def _woke(self) -> None:
        # Takes no lock of its own: it runs under the sleep manager's, which growth takes inside
        # the workspace's.
        self._released = False
        self._wakes += 1
        if self._watch:
            self._watch.woke()
        for slot in self._slots.values():
            for kept in tuple(slot.kept.values()):
                kept.restore()
        for entry in tuple(self._adopted):
            entry.restore()

    @property
    def is_asleep(self) -> bool:
        """Whether the scratch has no memory now."""
        asleep = self._sleeper is not None and WORKSPACE in self._sleeper.sleeping_tags
        return asleep or self._released

    def _require_awake(self) -> None:
        if self.is_asleep:
            raise AsleepError([WORKSPACE], "its scratch has no memory")

    def close(self) -> None:
        """Let all scratch go, awake or asleep, as with its engine; later requests raise
        `WorkspaceLocked`.
        """
        with self._mutex:
            self._locked = True
            self._adopted.clear()
            for slot in self._slots.values():
                slot.buffer = None
                slot.kept.clear()

    # -- reports

    @property
    def findings(self) -> tuple[str, ...]:
        """The wrong uses of views that debug mode has seen, each once."""
        return self._watch.findings if self._watch else ()

    def report(self) -> WorkspaceReport:
        """Who reserved what, where the high water is, and what scratch lies outside."""
        with self._mutex:
            slots = self._slots.values()
            return WorkspaceReport(
                str(self.device),
                self._locked,
                max((entry.bytes for entry in self._reservations.values()), default=0),
                tuple(slot.report() for slot in slots),
                tuple(self._reservations.values()),
                tuple(kept for slot in slots for kept in slot.kept_reports()),
                tuple(entry.report(self._tag_of) for entry in self._adopted),
                tuple(self._unreserved),
            )

    def _tag_of(self, tensor: Tensor) -> str | None:
        return self._sleeper.tag_of(tensor) if self._sleeper is not None else None


def _caller() -> str:
    """The innermost frame outside this package, as file:line in function."""
    frame = inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").startswith("hal.core.workspace"):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
