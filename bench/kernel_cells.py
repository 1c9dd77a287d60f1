"""What the measurements of kernels have in common: a clock, cells with their peers, a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

FLUSH = 4 << 30
"""Bytes written between calls: the cache's contents go, and the device is busy for a
millisecond, in which the host gets ahead, so that a call's kernels follow one another."""


@dataclass(frozen=True)
class Peer:
    """What another library takes for the same work."""

    name: str
    microseconds: float | None
    """None where it does not run here."""
    measured: bool
    """In this run; else reported for an H200."""
    why_not: str = ""


@dataclass(frozen=True)
class Cell:
    """One kernel at one size."""

    kernel: str
    what: str
    sizes: dict[str, Any]
    microseconds: float
    host_microseconds: float
    """What the call keeps the host busy for."""
    bytes: int
    """What has to be moved at least."""
    copy_rate: float
    """Bytes a second of a copy that was measured in this run."""
    peers: tuple[Peer, ...] = ()
    exact: bool | None = None
    """Whether the result is the reference's; None where it was not compared."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def floor_microseconds(self) -> float:
        return self.bytes / self.copy_rate * 1e6

    @property
    def share(self) -> float:
        """Of the memory's speed."""
        return self.floor_microseconds / self.microseconds

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.microseconds / 1e3

    def as_dict(self) -> dict[str, Any]:
        ratios = {
            peer.name: peer.microseconds / self.microseconds
            for peer in self.peers
            if peer.microseconds is not None
        }
        found = {"share": self.share, "gigabytes_per_second": self.gigabytes_per_second}
        return asdict(self) | found | {"times_faster": ratios}


def measured_peer(name: str, measure: Callable[[], float]) -> Peer:
    """A peer that is installed; one that fails is told, and stops nothing."""
    try:
        return Peer(name, measure() * 1e6, measured=True)
    except Exception as problem:  # noqa: BLE001 - whatever another library raises
        return Peer(name, None, measured=True, why_not=f"{type(problem).__name__}: {problem}")


class Clock:
    """Times calls on a device: medians, with a cold cache and the host ahead."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device, self._rounds = device, rounds
        self._flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
        self.copy_rate = self._measure_copy()

    def _measure_copy(self) -> float:
        """Bytes a second that a copy reads and writes."""
        source = torch.empty(2 << 30, dtype=torch.uint8, device=self._device).zero_()
        target = torch.empty_like(source)
        seconds = self.seconds([lambda: target.copy_(source)] * self._rounds)[0]
        return 2 * source.nbytes / seconds

    def seconds(self, calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
        """(on the device, on the host): medians over calls, each made once."""
        spans, host = [], []
        for call in calls:
            start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            self._flush.zero_()
            start.record()
            begun = time.perf_counter()
            call()
            host.append(time.perf_counter() - begun)
            end.record()
            spans.append((start, end))
        torch.accelerator.synchronize()
        device = [start.elapsed_time(end) / 1e3 for start, end in spans]
        return statistics.median(device), statistics.median(host)


def table_of(cells: Iterable[Cell], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ("kernel", "what", "sizes", "µs", "host µs", "GB/s", "of copy", "peers", "exact")
    for name in columns:
        left = name in {"kernel", "what", "sizes", "peers"}
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for cell in cells:
        sizes = " ".join(
            f"{name}={value:,}" if isinstance(value, int) else f"{name}={value}"
            for name, value in cell.sizes.items()
            if value is not None
        )
        notes = " ".join(f"{name}={value}" for name, value in cell.notes.items())
        table.add_row(
            cell.kernel,
            cell.what,
            sizes,
            f"{cell.microseconds:.1f}",
            f"{cell.host_microseconds:.0f}",
            f"{cell.gigabytes_per_second:,.0f}",
            f"{cell.share:.2f}",
            "; ".join(_peer_text(cell, peer) for peer in cell.peers) or notes,
            {True: "yes", False: "NO", None: ""}[cell.exact],
        )
    return table


def _peer_text(cell: Cell, peer: Peer) -> str:
    if peer.microseconds is None:
        return f"{peer.name} does not run"
    mark = "" if peer.measured else "*"
    ratio = peer.microseconds / cell.microseconds
    return f"{peer.name}{mark} {peer.microseconds:.0f} (×{ratio:.2f})"
