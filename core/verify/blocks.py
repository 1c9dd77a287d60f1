"""Who owns which block of the paged KV cache, and which full prompt blocks can be read again."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from hal.errors import StateError


@dataclass(frozen=True)
class Lease:
    """The blocks of one request, in order; the first `cached` of them already hold their tokens."""

    blocks: tuple[int, ...]
    cached: int


class BlockPool:
    """Hands out blocks, shares full prompt blocks by their prefix, and evicts the longest unused.

    The prefix index is only as good as the memory that it points into: `forget` it when the cache's
    contents are gone.
    """

    def __init__(self, blocks: Iterable[int], block_size: int) -> None:
        self.block_size = block_size
        self._free = sorted(blocks)
        self._users: dict[int, int] = {}
        self._by_prefix: dict[tuple[int, ...], int] = {}
        self._prefix_of: dict[int, tuple[int, ...]] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks that a lease could get: free ones, and cached ones that no request uses."""
        return len(self._free) + len(self._unused)

    @property
    def cached_blocks(self) -> int:
        """Blocks whose contents the index vouches for."""
        return len(self._by_prefix)

    def lease(self, prompt: tuple[int, ...], tokens: int, *, kind: int = 0) -> Lease:
        """Blocks for `tokens` tokens that begin with `prompt`; `StateError` if too few are free.

        Prompts of another `kind` share nothing: what a block holds depends on it.
        """
        prefixes = self._prefixes(prompt, kind)
        shared = self._take_shared(prefixes)
        missing = -(-tokens // self.block_size) - len(shared)
        if missing > self.free_blocks:
            self.give_back(shared)
            raise StateError(
                f"{missing} KV blocks needed, {self.free_blocks} free; give the engine more "
                "blocks or fewer rows"
            )
        blocks = shared + tuple(self._take_fresh() for _ in range(missing))
        self._index(prefixes, blocks)
        return Lease(blocks, len(shared))

    def give_back(self, blocks: Iterable[int]) -> None:
        """One request is done with its blocks; indexed ones stay readable until evicted."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._prefix_of:
                self._unused[block] = None
            else:
                heapq.heappush(self._free, block)

    def forget(self) -> None:
        """Drop the prefix index: what the blocks held is gone."""
        for block in self._unused:
            heapq.heappush(self._free, block)
        self._unused.clear()
        self._by_prefix.clear()
        self._prefix_of.clear()

    def indexed(self) -> dict[tuple[int, ...], int]:
        """The block that holds the last tokens of each known prefix, shorter prefixes first."""
        return dict(sorted(self._by_prefix.items(), key=lambda entry: (len(entry[0]), entry[0])))

    def adopt(self, prefix: tuple[int, ...]) -> int | None:
        """A free block for a prefix whose contents the caller brings; None when there is none, or
        the prefix is known.
        """
        if not self._free or prefix in self._by_prefix:
            return None
        block = heapq.heappop(self._free)
        self._by_prefix[prefix] = block
        self._prefix_of[block] = prefix
        self._unused[block] = None
        return block

    def _prefixes(self, prompt: tuple[int, ...], kind: int) -> list[tuple[int, ...]]:
        """What tells the contents of each full block: the kind, and all tokens up to its end."""
        full = len(prompt) // self.block_size
        return [(kind, *prompt[: (count + 1) * self.block_size]) for count in range(full)]

    def _take_shared(self, prefixes: list[tuple[int, ...]]) -> tuple[int, ...]:
        shared = []
        for prefix in prefixes:
            block = self._by_prefix.get(prefix)
            if block is None:
                break
            self._unused.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
            shared.append(block)
        return tuple(shared)

    def _take_fresh(self) -> int:
        block = heapq.heappop(self._free) if self._free else self._evict()
        self._users[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._by_prefix[self._prefix_of.pop(block)]
        return block

    def _index(self, prefixes: list[tuple[int, ...]], blocks: tuple[int, ...]) -> None:
        for prefix, block in zip(prefixes, blocks, strict=False):
            if prefix not in self._by_prefix:
                self._by_prefix[prefix] = block
                self._prefix_of[block] = prefix
