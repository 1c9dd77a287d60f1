"""Debug mode of a workspace: poisoned scratch, and views that are judged at each use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.core.workspace.checked import CheckedView, Lease, plain
from hal.core.workspace.report import SlotId
from hal.core.workspace.slots import Slot
from hal.errors import StateError
from hal.pools import storage_address

POISON = 0xFF
"""What scratch is filled with before it is handed out: NaN in floats, -1 in integers."""


@dataclass(frozen=True)
class _Request:
    """The last request of a slot."""

    serial: int
    owner: str
    stream: Hashable


class Watch:
    """Hands out checked views, and reports their wrong uses in `findings`, each once."""

    def __init__(self, device: torch.device, asleep: Callable[[], bool]) -> None:
        self._device, self._asleep = device, asleep
        self._last: dict[SlotId, _Request] = {}
        self._findings: dict[str, None] = {}
        self._wakes = 0

    @property
    def findings(self) -> tuple[str, ...]:
        return tuple(self._findings)

    def woke(self) -> None:
        """Refuse every view that was given out so far."""
        self._wakes += 1

    def hand_out(
        self, slot: Slot, views: Sequence[Tensor], owner: str, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The views of a request, poisoned and checked."""
        name = owner or "an unnamed kernel"
        self._check_inputs(slot, name, inputs)
        self._check_stream(slot, name)
        self._last[slot.id] = _Request(slot.requests, name, self._stream())
        for view in views:
            view.view(-1).view(torch.uint8).fill_(POISON)
        lease = Lease(self, slot.id, slot.requests, self._wakes, name)
        return [CheckedView.over(view, lease) for view in views]

    def judge(self, lease: Lease) -> None:
        """Refuse a view from before a wake; report one that a later request took over."""
        if lease.wake != self._wakes or self._asleep():
            raise StateError(
                f"a view of scratch of {lease.owner} was taken before a sleep; request it again "
                "after the wake"
            )
        last = self._last[lease.slot]
        if lease.serial != last.serial:
            self._report(
                f"{lease.owner} uses scratch of slot {lease.slot} after a later request by "
                f"{last.owner}"
            )

    def _check_inputs(self, slot: Slot, name: str, inputs: Sequence[Tensor]) -> None:
        taken = storage_address(slot.buffer) if slot.buffer is not None else None
        for index, tensor in enumerate(inputs):
            if storage_address(plain(tensor)) == taken:
                self._report(
                    f"input {index} of {name} is itself a view of slot {slot.id}, which its "
                    "request overwrites"
                )

    def _check_stream(self, slot: Slot, name: str) -> None:
        """Two streams in one slot may overlap; each needs a lane."""
        last = self._last.get(slot.id)
        if last is not None and last.stream != self._stream():
            self._report(
                f"{name} uses slot {slot.id} on another stream than {last.owner} before it; give "
                "each stream a lane with use_lane()"
            )

    def _stream(self) -> Hashable:
        if self._device.type == "cpu":
            return None
        return torch.accelerator.current_stream(self._device).stream_id

    def _report(self, text: str) -> None:
        if text not in self._findings:
            self._findings[text] = None
            warnings.warn(f"workspace: {text}", stacklevel=4)
