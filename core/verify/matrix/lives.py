"""What happens to the engine of a cell, step by step, and the engine that it happens to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hal.core.tags import CUDAGRAPH, KV_CACHE, RUNTIME, WEIGHTS, WORKSPACE, Policy
from hal.core.verify.cases import (
    Case,
    Drain,
    Faulted,
    Part,
    Refuse,
    Refused,
    Reload,
    Sleep,
    Step,
    Submit,
    Wake,
)
from hal.core.verify.config import Architecture, KVType, ModelConfig
from hal.core.verify.connector import TAG as CONNECTOR
from hal.core.verify.matrix.table import Cell
from hal.core.verify.state import EngineConfig
from hal.errors import AsleepError, DirtyError, HostMemoryError, OutOfDeviceMemory

BURST = 256
"""Requests that run at once right after a wake."""
SERVED_CYCLES = 3
"""Cycles after which a round is served, spread over all."""
BUDGET = 4096
"""Bytes of host memory that no backup fits into."""

_SLEEPS = {
    "level-1": Sleep(1),
    "level-2": Sleep(2),
    "kv-only": Sleep(policy=((KV_CACHE, Policy.DISCARD),)),
    "weights-only": Sleep(policy=((WEIGHTS, Policy.OFFLOAD),)),
    "custom": Sleep(
        policy=(
            (WEIGHTS, Policy.OFFLOAD),
            (KV_CACHE, Policy.OFFLOAD),
            (WORKSPACE, Policy.DISCARD),
            (RUNTIME, Policy.KEEP),
        )
    ),
}
_DEFERRABLE = (WEIGHTS, KV_CACHE)
_TURNS = ("full", "weights-first", "cache-first", "weights-alone", "cache-alone")


def engine_of(cell: Cell, seed: int) -> EngineConfig:
    """A small engine with what the cell asks for."""
    model = ModelConfig(
        vocabulary=512,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=16,
        mlp=96,
        architecture=Architecture(cell["model"]),
        kv_type=KVType(cell["kv"]),
    )
    is_burst = cell["lifecycle"] == "burst"
    return EngineConfig(
        model=model,
        rows=BURST if is_burst else 32,
        prefill_rows=32 if is_burst else 8,
        blocks=1600 if is_burst else 240,
        seed=seed,
        draft_tokens=2 if cell["speculation"] == "draft" else 0,
        prefill_chunk=8 if cell["prefill"] == "chunked" else None,
        connector_blocks=16 if cell["connector"] == "own-pool" else 0,
        state_inside=cell["state"] == "inside",
    )


def requests_of(cell: Cell, requests: int) -> int:
    """How many requests a round of the cell has."""
    return max(requests, BURST) if cell["lifecycle"] == "burst" else requests


def case_of(cell: Cell) -> Case:
    """The life of the cell's engine."""
    return Case(cell.name, cell.why or cell.name, tuple(_Life(cell).steps()))


@dataclass(frozen=True)
class _Life:
    cell: Cell

    def steps(self) -> Iterator[Step]:
        cycles = int(self.cell["cycles"])
        if self.cell["lifecycle"] != "at-start":
            yield from _ROUND
        if self.cell["fault"] == "host-budget":
            yield from self._without_room()
            return
        for cycle in range(cycles):
            yield from self._cycle(cycle, serves=_serves(cycle, cycles))

    @property
    def _sleep(self) -> Sleep:
        """The sleep, with the tags whose contents have to outlive it block by block."""
        sleep = replace(_SLEEPS[self.cell["sleep"]], park=self.cell["park"] == "yes")
        if sleep.policy is None:
            every = (WEIGHTS, RUNTIME, CUDAGRAPH, CONNECTOR)
            return replace(sleep, kept=every[1:] if self._reloads else every)
        lost = {tag for tag, policy in sleep.policy if policy is Policy.DISCARD}
        with_cache = (WEIGHTS, RUNTIME, CUDAGRAPH, CONNECTOR, KV_CACHE)
        return replace(sleep, kept=tuple(tag for tag in with_cache if tag not in lost))

    @property
    def _reloads(self) -> bool:
        return self.cell["sleep"] == "level-2"

    @property
    def _asleep(self) -> tuple[str, ...]:
        """The deferrable tags that sleep."""
        sleep = self._sleep
        if sleep.policy is None:
            return _DEFERRABLE
        going = {tag for tag, policy in sleep.policy if policy is not Policy.KEEP}
        return tuple(tag for tag in _DEFERRABLE if tag in going)

    # -- one cycle

    def _cycle(self, cycle: int, *, serves: bool) -> Iterator[Step]:
        lifecycle = self.cell["lifecycle"] if cycle == 0 else "plain"
        sleep = self._sleep if serves else replace(self._sleep, kept=())
        yield self._faulted(sleep, "sleep") if cycle == 0 else sleep
        if lifecycle == "double-sleep":
            yield replace(sleep, ignored=True)
        elif lifecycle == "level-1-then-2":
            yield Sleep(2, ignored=True, warns=True)
        elif lifecycle == "request-asleep":
            yield Submit(Part.FIRST_HALF)
            yield Refuse(AsleepError)
        if cycle == 0 and self.cell["fault"] == "memory-taken":
            yield Refused(Wake(), OutOfDeviceMemory, memory_taken=True)
        yield from self._wakes(cycle, lifecycle)
        if lifecycle == "double-wake":
            yield Wake(ignored=True)
        if lifecycle in ("request-asleep", "request-half-awake"):
            yield Submit(Part.SECOND_HALF)
            yield Drain()
        elif serves:
            yield from _ROUND

    def _faulted(self, step: Sleep | Wake, where: str) -> Step:
        point, _, at = self.cell["fault"].partition("@")
        return Faulted(point, step) if at == where else step

    # -- wakes

    def _wakes(self, cycle: int, lifecycle: str) -> Iterator[Step]:
        order = self.cell["wake"]
        if order == "alternating":
            order = _TURNS[cycle % len(_TURNS)]
        reloaded = not self._reloads
        steps = tuple(self._order(order))
        for index, wake in enumerate(steps):
            yield self._faulted(wake, "wake") if cycle == 0 else wake
            if lifecycle == "request-half-awake" and index == 0:
                yield Submit(Part.FIRST_HALF)
            if wake.leaves:
                yield Refuse(AsleepError)
            elif not reloaded:
                yield Refuse(DirtyError)
            if not reloaded and WEIGHTS not in wake.leaves:
                yield Reload()
                reloaded = True

    def _order(self, order: str) -> Iterator[Wake]:
        first = {"weights": WEIGHTS, "cache": KV_CACHE}.get(order.partition("-")[0])
        if first is None:
            yield Wake()
            return
        left = tuple(tag for tag in self._asleep if tag != first)
        yield Wake((first,), leaves=left)
        if left:
            yield Wake() if order.endswith("alone") else Wake(left)

    # -- a sleep that never fits

    def _without_room(self) -> Iterator[Step]:
        yield Refused(self._sleep, HostMemoryError)
        yield from _ROUND
        yield _SLEEPS["kv-only"]
        yield Wake()
        yield from _ROUND


_ROUND: tuple[Step, ...] = (Submit(), Drain())


def _serves(cycle: int, cycles: int) -> bool:
    """Whether a round is served after a cycle: after the first, the last, and some between."""
    return cycle in (0, cycles - 1) or (cycle + 1) % max(1, cycles // SERVED_CYCLES) == 0
