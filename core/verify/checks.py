"""The gates that look at memory: placement, addresses, contents and the device's books."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hal.core.report import SleepReport
from hal.core.tags import SCRATCH
from hal.core.verify.engine import Registered
from hal.core.verify.report import Finding, Gate
from hal.core.verify.subject import Subject
from hal.pools import find_segment, storage_address

_BOOKS = ("segments", "mapped_bytes", "handles", "mappings", "reservations", "reserved_bytes")
_HOST = "host bytes"

Block = tuple[str, int, int]
"""The tag, address and size in bytes of one live block."""


@dataclass(frozen=True)
class Baseline:
    """What must be the same whenever everything is awake: addresses by tensor, and the books.

    `most_backups` bounds the host bytes of backups whose size depends on what they hold.
    """

    addresses: Mapping[str, int]
    books: Mapping[str, int]
    most_backups: int | None = None

    @classmethod
    def of(cls, subject: Subject) -> Baseline:
        registered = subject.engine.registered()
        return cls(
            {name: entry.tensor.data_ptr() for name, entry in registered.items()}, books(subject)
        )

    def with_backups(self, subject: Subject) -> Baseline:
        """The same once backups are kept: as many as now, or encoded at most what they encode."""
        if not subject.compresses:
            return replace(self, books={**self.books, _HOST: subject.sleeper.backup_bytes})
        others = {name: value for name, value in self.books.items() if name != _HOST}
        return replace(self, books=others, most_backups=self.books["mapped_bytes"])


def books(subject: Subject) -> dict[str, int]:
    """The device's counters of what is held, and the host bytes that hold backups."""
    counters = subject.device.counters().as_dict()
    return {name: counters[name] for name in _BOOKS} | {_HOST: subject.sleeper.backup_bytes}


def check_books(subject: Subject, baseline: Baseline) -> Iterator[Finding]:
    """Everything is awake: the books must be those of the start."""
    now = books(subject)
    for name, start in baseline.books.items():
        if now[name] != start:
            text = f"{name}: {now[name]:,} after the wake, {start:,} at the start"
            yield Finding(Gate.BOOKS, text)
    most = baseline.most_backups
    if most is not None and now[_HOST] > most:
        yield Finding(Gate.BOOKS, f"{_HOST}: {now[_HOST]:,} of backups, {most:,} that they encode")


def check_asleep(subject: Subject) -> Iterator[Finding]:
    """Everything sleeps: nothing of this engine may be mapped."""
    mapped = subject.device.counters().mapped_bytes - subject.others_mapped
    if mapped:
        yield Finding(Gate.BOOKS, f"{mapped:,} bytes are still mapped although every tag sleeps")


def check_released(subject: Subject, before: int, report: SleepReport) -> Iterator[Finding]:
    """Some tags sleep: what is mapped is what was, less what the sleep says that it released."""
    now = subject.device.counters().mapped_bytes
    if now != before - report.total_bytes:
        text = (
            f"{now:,} bytes are mapped after a sleep that released {report.total_bytes:,} of "
            f"{before:,}"
        )
        yield Finding(Gate.BOOKS, text)


def check_given_back(subject: Subject) -> Iterator[Finding]:
    """The subject is closed: the device must hold what it held before."""
    kept = subject.device.counters().mapped_bytes - subject.others_mapped
    if kept:
        yield Finding(Gate.BOOKS, f"{kept:,} bytes stayed mapped after the engine was closed")


def check_placement(subject: Subject) -> Iterator[Finding]:
    """Each registered tensor is in the pool that it belongs to."""
    for name, entry in subject.engine.registered().items():
        found = subject.sleeper.tag_of(entry.tensor)
        if found != entry.tag:
            text = f"{name} belongs to {_pool(entry.tag)} and lies in {_pool(found)}"
            yield _finding(Gate.PLACEMENT, subject, name, entry, text)


def _pool(tag: str | None) -> str:
    return f"the {tag} pool" if tag else "ordinary memory"


def check_audit(subject: Subject) -> Iterator[Finding]:
    """KV-init allocated nothing but KV payload in the KV pool."""
    for entry in subject.engine.kv_findings:
        yield Finding(Gate.AUDIT, f"in the KV pool and not KV payload: {entry}", tag="kv_cache")


def check_addresses(subject: Subject, baseline: Baseline) -> Iterator[Finding]:
    """Each registered tensor is where it was."""
    for name, entry in subject.engine.registered().items():
        now, start = entry.tensor.data_ptr(), baseline.addresses[name]
        if now != start:
            text = f"{name} is at {now:#x} and was at {start:#x}"
            yield _finding(Gate.ADDRESS, subject, name, entry, text)


def digests(subject: Subject, lost: frozenset[str] = SCRATCH) -> dict[str, str]:
    """A digest of each registered tensor whose contents outlive a sleep that gives up `lost`."""
    registered = subject.engine.registered().items()
    return {name: digest(e.tensor) for name, e in registered if e.tag not in lost}


def block_digests(subject: Subject, tags: Iterable[str]) -> dict[Block, str]:
    """A digest of every live block of these tags, whether a registered tensor is in it or not."""
    known = [tag for tag in tags if tag in subject.sleeper.tags]
    blocks = [(tag, *block) for tag in known for block in subject.sleeper.live_blocks(tag)]
    return {block: _block_digest(subject, block) for block in blocks}


def check_blocks(subject: Subject, before: Mapping[Block, str]) -> Iterator[Finding]:
    """Each of these blocks is still there and holds the bytes that it slept with."""
    live = {tag: dict(subject.sleeper.live_blocks(tag)) for tag in {tag for tag, _, _ in before}}
    for block, digest_before in before.items():
        tag, address, size = block
        if live[tag].get(address) != size:
            continue  # freed by the engine meanwhile
        if _block_digest(subject, block) != digest_before:
            text = f"a block of {size:,} bytes of {tag} does not hold the bytes that it slept with"
            yield Finding(Gate.CONTENTS, text, tag=tag, segment=address)


def _block_digest(subject: Subject, block: Block) -> str:
    _, address, size = block
    host = ctypes.create_string_buffer(size)
    subject.device.synchronize()
    subject.device.copy_to_host(ctypes.addressof(host), address, size)
    subject.device.synchronize()
    return hashlib.blake2b(host, digest_size=16).hexdigest()


def check_contents(subject: Subject, before: Mapping[str, str]) -> Iterator[Finding]:
    """Each of these tensors holds the bytes that it slept with."""
    registered = subject.engine.registered()
    for name, then in before.items():
        if digest(registered[name].tensor) != then:
            text = f"{name} ({registered[name].tag}) does not hold the bytes that it slept with"
            yield _finding(Gate.CONTENTS, subject, name, registered[name], text)


def digest(tensor: Tensor) -> str:
    """BLAKE2b-128 of a tensor's elements in order, as hex."""
    host = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(
        ctypes.string_at(host.data_ptr(), host.numel()), digest_size=16
    ).hexdigest()


def _finding(gate: Gate, subject: Subject, name: str, entry: Registered, text: str) -> Finding:
    segment = find_segment(subject.device.segments(), storage_address(entry.tensor))
    address = segment.address if segment else None
    return Finding(gate, text, tensor=name, tag=entry.tag, segment=address)


def finding_of(subject: Subject, step: object, error: Exception) -> Finding:
    """A step that raised; an error that knows an address names the tensors of that segment."""
    text = f"{step} raised {type(error).__name__}: {error}"
    segment = find_segment(subject.device.segments(), getattr(error, "address", 0))
    if segment is None:
        return Finding(Gate.BEHAVIOUR, text)
    inside = {
        name: entry.tag
        for name, entry in subject.engine.registered().items()
        if segment.address <= entry.tensor.data_ptr() < segment.end
    }
    first, tag = next(iter(inside.items()), (None, None))
    if first:
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        text += f"; it holds {first}{more} ({tag})"
    return Finding(Gate.BEHAVIOUR, text, tensor=first, tag=tag, segment=segment.address)
