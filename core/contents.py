"""What the engine's tensors are called, which outlive a discard, and which are dirty after one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hal.caching import ALIGNMENT
from hal.errors import InvalidArgument
from hal.pools import Ranges

Tensors = torch.nn.Module | torch.Tensor | Mapping[str, torch.Tensor] | Iterable[torch.Tensor]
Range = tuple[int, int]
"""(address, size) in bytes."""


def named_tensors(source: Tensors, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a module (parameters, buffers), a mapping, a sequence or a tensor, by name."""
    if isinstance(source, torch.nn.Module):
        named = [*source.named_parameters(), *source.named_buffers()]
    elif isinstance(source, torch.Tensor):
        named = [("tensor", source)]
    elif isinstance(source, Mapping):
        named = list(source.items())
    else:
        named = [(str(index), tensor) for index, tensor in enumerate(source)]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    return {prefix + name: tensor for name, tensor in named}


def extent(tensor: torch.Tensor) -> Range:
    """The address range that a strided tensor's elements span."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _covers(outer: Range, inner: Range) -> bool:
    return outer[0] <= inner[0] and inner[0] + inner[1] <= outer[0] + outer[1]


def _overlaps(a: Range, b: Range) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def _without(ranges: list[Range], hole: Range, smallest: int) -> list[Range]:
    """The parts of ranges outside `hole` that have at least `smallest` bytes."""
    begin, end = hole[0], hole[0] + hole[1]
    parts: list[Range] = []
    for start, size in ranges:
        stop = start + size
        parts += [(start, min(stop, begin) - start), (max(start, end), stop - max(start, end))]
    return [part for part in parts if part[1] >= smallest]


@dataclass
class _Dirty:
    """A tensor, or a block that no tracked tensor lies in, and the ranges of it that are missing.

    A block ends with padding that nobody will ever load: a rest of it below `smallest` bytes counts
    as loaded.
    """

    tag: str
    name: str
    missing: list[Range]
    smallest: int


class Contents:
    """Names, preserved ranges and dirty ranges of one manager's tensors."""

    def __init__(self) -> None:
        self._names: dict[str, weakref.ref[torch.Tensor]] = {}
        self._preserved: set[Range] = set()
        self._dirty: list[_Dirty] = []

    def track(self, source: Tensors, prefix: str) -> None:
        for name, tensor in named_tensors(source, prefix).items():
            self._names[name] = weakref.ref(tensor)

    def tracked(self) -> dict[str, torch.Tensor]:
        """The tracked tensors that still live, by name."""
        pairs = ((name, ref()) for name, ref in self._names.items())
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def preserve(self, source: Tensors) -> None:
        self._preserved |= {extent(t) for t in named_tensors(source).values() if t.numel()}

    def preserved_in(self, address: int, size: int, live: Ranges) -> Ranges:
        """The preserved (offset, size) ranges of a segment; those whose block was freed are
        forgotten.
        """
        block = [(address + offset, length) for offset, length in live]
        inside = {r for r in self._preserved if _covers((address, size), r)}
        kept = {r for r in inside if any(_covers(b, r) for b in block)}
        self._preserved -= inside - kept
        return tuple(sorted((start - address, length) for start, length in kept))

    def mark_discarded(self, tag: str, blocks: Iterable[Range]) -> None:
        """Note that the blocks of a tag lost their contents, but for the preserved ranges."""
        blocks = tuple(blocks)
        self._dirty = [
            e for e in self._dirty if not any(_overlaps(b, r) for b in blocks for r in e.missing)
        ]
        tensors = [(name, extent(tensor)) for name, tensor in self.tracked().items()]
        for block in blocks:
            inside = [(n, r) for n, r in tensors if r[1] and _covers(block, r)]
            if inside:
                entries = [_Dirty(tag, name, [lost], 1) for name, lost in inside]
            else:
                name = f"untracked block of {block[1]} bytes at {block[0]:#x}"
                entries = [_Dirty(tag, name, [block], ALIGNMENT)]
            for entry in entries:
                for kept in self._preserved:
                    entry.missing = _without(entry.missing, kept, entry.smallest)
            self._dirty += [entry for entry in entries if entry.missing]

    def mark_loaded(self, source: str | Tensors) -> None:
        """Clean a tag, or exactly the tensors given."""
        if isinstance(source, str):
            self._dirty = [entry for entry in self._dirty if entry.tag != source]
            return
        for tensor in named_tensors(source).values():
            loaded = extent(tensor)
            for entry in self._dirty:
                entry.missing = _without(entry.missing, loaded, entry.smallest)
        self._dirty = [entry for entry in self._dirty if entry.missing]

    def forget_freed(self, tag: str, blocks: Iterable[Range]) -> None:
        """Drop dirty entries of a tag whose block is no longer live."""
        alive = list(blocks)
        self._dirty = [
            e
            for e in self._dirty
            if e.tag != tag or any(_overlaps(b, r) for b in alive for r in e.missing)
        ]

    @property
    def dirty_tags(self) -> set[str]:
        """The tags that have something dirty."""
        return {entry.tag for entry in self._dirty}

    def dirty(self, tags: Iterable[str] | None = None) -> tuple[str, ...]:
        """Names of what was discarded and not loaded again, of the given tags or of all."""
        wanted = None if tags is None else frozenset(tags)
        return tuple(e.name for e in self._dirty if wanted is None or e.tag in wanted)
