"""Plans and reports as values: what a transition would do, and what it did. All sizes are bytes,
times seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hal.core.tags import Policy
from hal.native import OrderResult, SegmentState, TransferReport

TagSerials = tuple[str, Policy, set[int]]
"""A tag, its policy, and the serials of its segments that take part in a transition."""

SCHEMA_VERSION = 1
_MIB, _GIB = 1 << 20, 1 << 30


def rate_text(size: int, seconds: float) -> str:
    """A size, its time and its rate, for people."""
    rate = f", {size / seconds / 1e9:.1f} GB/s" if size and seconds > 0 else ""
    return f"{size / _GIB:.3f} GiB in {seconds * 1e3:.1f} ms{rate}"


@dataclass(frozen=True)
class TagPlan:
    """What a transition would do to one tag."""

    tag: str
    policy: Policy
    segments: int
    bytes: int
    """Device memory released or taken."""
    host_bytes: int
    """Copied to or from the backups."""


@dataclass(frozen=True)
class SleepPlan:
    """What a sleep would release and what it would need."""

    tags: tuple[TagPlan, ...]
    host_needed: int
    host_available: int
    fits: bool
    why_not: str = ""

    @property
    def freed(self) -> int:
        return sum(tag.bytes for tag in self.tags)


@dataclass(frozen=True)
class WakePlan:
    """What a wake would take and whether it fits now; `free` is None when it is unknown."""

    tags: tuple[TagPlan, ...]
    needed: int
    free: int | None
    fits: bool | None
    missing: int


@dataclass(frozen=True)
class TagReport:
    """What a transition did to one tag; `seconds` is its share of the transition by bytes moved."""

    tag: str
    policy: Policy
    segments: int
    bytes: int
    copied: int
    filled: int
    unchanged: int
    """Of a sleep's backups: held from before, not copied."""
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes copied a second; 0 when nothing was copied."""
        return self.copied / self.seconds if self.copied and self.seconds else 0.0


@dataclass(frozen=True)
class Residual:
    """Device memory that stays while asleep, by source; None when it is unknown, with a reason."""

    source: str
    bytes: int | None
    reason: str = ""


@dataclass(frozen=True)
class _Report:
    tags: tuple[TagReport, ...]
    seconds: float
    synchronize_seconds: float
    host_seconds: float
    copy_seconds: float
    host_bytes: int
    skipped: int
    """Segments or tags that were in the asked state already."""
    schema_version: int = field(default=SCHEMA_VERSION, kw_only=True)

    @property
    def total_bytes(self) -> int:
        """Device memory released or taken in all."""
        return sum(tag.bytes for tag in self.tags)

    @property
    def copied_bytes(self) -> int:
        return sum(tag.copied for tag in self.tags)

    @property
    def unchanged_bytes(self) -> int:
        """Bytes of backups that a sleep found as they were and did not copy."""
        return sum(tag.unchanged for tag in self.tags)

    def tag(self, name: str) -> TagReport | None:
        """The entry of one tag, if it took part."""
        return next((entry for entry in self.tags if entry.tag == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": type(self).__name__, **_plain(asdict(self))}

    def _tag_text(self) -> str:
        return ", ".join(f"{t.tag} {t.policy.value} {t.bytes / _GIB:.3f} GiB" for t in self.tags)


@dataclass(frozen=True)
class SleepReport(_Report):
    """What a sleep did; `bytes` of a tag is device memory released."""

    level: int | None = None
    residual: tuple[Residual, ...] = ()
    """What stayed once the tags were away; parking takes it off the device."""
    park_seconds: float | None = None
    """How long parking took, after `seconds`; None when the process was not parked."""
    parked_residual: int | None = None
    """Device memory that the parked process still holds; None when it is unknown or not parked."""
    parked_host_bytes: int = 0
    """The driver's copies of the parked process, in host memory."""

    def __str__(self) -> str:
        what = f"level {self.level}" if self.level is not None else "policy"
        return (
            f"slept ({what}): released {rate_text(self.total_bytes, self.seconds)} "
            f"[{self._tag_text() or 'nothing to do'}]{self._parked_text()}"
        )

    def _parked_text(self) -> str:
        if self.park_seconds is None:
            return ""
        left = self.parked_residual
        rest = "" if left is None else f", {left / _MIB:.0f} MiB left on the device"
        return f"; parked in {self.park_seconds * 1e3:.0f} ms{rest}"


@dataclass(frozen=True)
class WakeReport(_Report):
    """What a wake did; `bytes` of a tag is device memory taken."""

    still_asleep: tuple[str, ...] = ()
    unpark_seconds: float | None = None
    """How long the way back of a parked process took, before `seconds`; None when it was not."""

    def __str__(self) -> str:
        rest = f"; still asleep: {', '.join(self.still_asleep)}" if self.still_asleep else ""
        if self.unpark_seconds is not None:
            rest += f"; unparked in {self.unpark_seconds * 1e3:.0f} ms"
        return (
            f"woke: took {rate_text(self.total_bytes, self.seconds)} "
            f"[{self._tag_text() or 'nothing to do'}]{rest}"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Policy) else value


NOTHING_MOVED = TransferReport((), 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, False, False)


def timings(report: TransferReport) -> dict[str, Any]:
    """The fields that a transition's report has from the device's own."""
    return {
        "seconds": report.total_seconds,
        "synchronize_seconds": report.synchronize_seconds,
        "host_seconds": report.host_seconds,
        "copy_seconds": report.copy_seconds,
        "host_bytes": report.host_bytes,
    }


def merge(reports: Sequence[TransferReport]) -> TransferReport:
    """One report for a transition that ran in several parts."""
    if not reports:
        return NOTHING_MOVED
    first, *rest = reports
    total = merge(rest)
    return TransferReport(
        first.orders + total.orders,
        first.copied + total.copied,
        first.released + total.released,
        first.mapped + total.mapped,
        first.filled + total.filled,
        first.unchanged + total.unchanged,
        first.host_bytes + total.host_bytes,
        first.synchronize_seconds + total.synchronize_seconds,
        first.host_seconds + total.host_seconds,
        first.copy_seconds + total.copy_seconds,
        first.total_seconds + total.total_seconds,
        first.ended_asleep or total.ended_asleep,
        first.rolled_back or total.rolled_back,
    )


def tag_reports(report: TransferReport, groups: Iterable[TagSerials]) -> tuple[TagReport, ...]:
    """The results of a transition by tag."""
    results = {r.segment.serial: r for r in report.orders if not r.skipped}
    moved = sum(map(_moved, results.values())) or 1
    entries = []
    for tag, policy, serials in groups:
        if own := [results[serial] for serial in serials if serial in results]:
            share = sum(map(_moved, own)) / moved
            entries.append(_tag_report(tag, policy, own, share * report.total_seconds))
    return tuple(entries)


def _moved(result: OrderResult) -> int:
    return result.copied + result.released + result.mapped


def _tag_report(tag: str, policy: Policy, results: list[OrderResult], seconds: float) -> TagReport:
    return TagReport(
        tag,
        policy,
        len(results),
        sum(result.released or result.mapped for result in results),
        sum(result.copied for result in results),
        sum(result.filled for result in results),
        sum(result.unchanged for result in results),
        seconds,
    )


def skipped_in(report: TransferReport) -> int:
    """How many segments had nothing to do."""
    return sum(result.skipped for result in report.orders)


def is_asleep(state: SegmentState) -> bool:
    return state in (SegmentState.ASLEEP_BACKED, SegmentState.ASLEEP_DISCARDED)
