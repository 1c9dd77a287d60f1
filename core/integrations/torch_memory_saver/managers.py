"""The sleep managers behind a saver, one a device and way of keeping contents, moved as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from hal.core.backup import BackupOptions, default_directory
from hal.core.integrations.torch_memory_saver.keeping import Keeping, Settings, keeping_of
from hal.core.report import SleepReport, WakeReport
from hal.core.sleep import SleepManager
from hal.core.tags import Policy
from hal.errors import HalError
from hal.platform import Capabilities, Platform

Report = TypeVar("Report", SleepReport, WakeReport)


@dataclass(frozen=True)
class Managed:
    """A manager and how all of its pools keep their contents."""

    sleeper: SleepManager
    keeping: Keeping

    @property
    def policy(self) -> Policy:
        """What a pause does to its pools."""
        return self.keeping.policy

    def awake(self, tag: str | None) -> list[str]:
        asleep = self.sleeper.sleeping_tags
        return [t for t in self.sleeper.tags if t not in asleep and tag in (None, t)]

    def asleep(self, tag: str | None) -> list[str]:
        return [t for t in sorted(self.sleeper.sleeping_tags) if tag in (None, t)]

    def pause(self, tags: Sequence[str]) -> SleepReport:
        return self.sleeper.sleep(policy=dict.fromkeys(tags, self.policy))

    def resume(self, tags: Sequence[str]) -> WakeReport:
        report = self.sleeper.wake_up(tags)
        if not self.sleeper.backup.retain:
            self.sleeper.trim_host()
        return report


class Managers:
    """Pauses and resumes tags in all managers of a saver, or in none of them."""

    def __init__(self, platform: Platform, settings: Settings) -> None:
        self.platform = platform
        self.disk_directory = settings.disk_directory
        self._default_backend = settings.backend
        self._retain, self._margin = settings.retain, 0
        self._managed: dict[tuple[int, Keeping], Managed] = {}
        self._lock = threading.RLock()

    # -- regions

    @property
    def device(self) -> int:
        """The device that torch allocates on now."""
        on_host = self.platform.device_type == "cpu"
        return 0 if on_host else torch.accelerator.current_device_index()

    @property
    def capabilities(self) -> Capabilities:
        """What that device can do."""
        return self.platform.capabilities_of(self.device)

    def of(self, *, cpu: bool, disk: bool, backend: str | None) -> Managed:
        """The manager of regions on the current device with these options."""
        keeping = keeping_of(
            self.capabilities,
            cpu=cpu,
            disk_directory=self._made_directory() if disk else None,
            backend=backend or self._default_backend,
        )
        key = (self.device, keeping)
        with self._lock:
            if key not in self._managed:
                self._managed[key] = self._make(*key)
            return self._managed[key]

    def _made_directory(self) -> str:
        directory = Path(self.disk_directory or default_directory())
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory)

    def _make(self, device: int, keeping: Keeping) -> Managed:
        self.platform.device(device).set_margin(self._margin)
        backup = BackupOptions(backing=keeping.backing, retain=self._retain)
        sleeper = SleepManager(self.platform, device=device, backup=backup, deferrable=None)
        return Managed(sleeper, keeping)

    def holding(self, tensor: torch.Tensor) -> tuple[SleepManager, str] | None:
        """The manager in one of whose pools a tensor lies, and the pool's tag."""
        with self._lock:
            sleepers = [managed.sleeper for managed in self._managed.values()]
        tags = ((sleeper, sleeper.tag_of(tensor)) for sleeper in sleepers)
        return next(((sleeper, tag) for sleeper, tag in tags if tag is not None), None)

    # -- transitions

    def pause(self, tag: str | None) -> tuple[SleepReport, ...]:
        """Put a tag, or all, to sleep; those that sleep already, and a tag without a pool, are
        passed over.
        """
        return self._each(tag, Managed.awake, Managed.pause, Managed.resume)

    def resume(self, tag: str | None) -> tuple[WakeReport, ...]:
        """Wake a tag, or all; those that are awake, and a tag without a pool, are passed over."""
        return self._each(tag, Managed.asleep, Managed.resume, Managed.pause)

    def _each(
        self,
        tag: str | None,
        wanted: Callable[[Managed, str | None], list[str]],
        act: Callable[[Managed, Sequence[str]], Report],
        undo: Callable[[Managed, Sequence[str]], object],
    ) -> tuple[Report, ...]:
        reports: list[Report] = []
        done: list[tuple[Managed, list[str]]] = []
        with self._lock:
            for managed in self._in_order():
                if not (tags := wanted(managed, tag)):
                    continue
                try:
                    reports.append(act(managed, tags))
                except HalError as error:
                    _undo(error, done, undo)
                    raise
                done.append((managed, tags))
        return tuple(reports)

    def _in_order(self) -> list[Managed]:
        """What is kept goes first: a failure there finds nothing given up yet."""
        return sorted(self._managed.values(), key=lambda m: m.policy is Policy.DISCARD)

    # -- settings

    @property
    def retain(self) -> bool:
        """Whether backups stay after a resume."""
        return self._retain

    @retain.setter
    def retain(self, value: bool) -> None:
        with self._lock:
            self._retain = value
            for managed in self._managed.values():
                managed.sleeper.retain_backups(value)

    @property
    def margin(self) -> int:
        """Bytes of each device that allocations in regions leave free."""
        return self._margin

    @margin.setter
    def margin(self, size: int) -> None:
        with self._lock:
            self._margin = size
            for device in {device for device, _ in self._managed}:
                self.platform.device(device).set_margin(size)


def _undo(
    error: HalError,
    done: Sequence[tuple[Managed, list[str]]],
    undo: Callable[[Managed, Sequence[str]], object],
) -> None:
    """Take back what other managers have done; what cannot be is told in the error's notes."""
    for managed, tags in reversed(done):
        try:
            undo(managed, tags)
        except HalError as failure:
            error.add_note(f"{', '.join(tags)} could not be put back as they were: {failure}")
