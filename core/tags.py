"""Tags, what sleep does to them, and the named policy sets (levels)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hal.errors import InvalidArgument, UnknownTagError

WEIGHTS, KV_CACHE, RUNTIME, WORKSPACE, CUDAGRAPH = (
    "weights",
    "kv_cache",
    "runtime",
    "workspace",
    "cudagraph",
)
SCRATCH = frozenset({KV_CACHE, WORKSPACE})
"""Tags whose contents the engine makes again by itself: discarding them leaves nothing dirty."""


class Policy(enum.Enum):
    """What sleep does to a tag."""

    OFFLOAD = "offload"
    """Kept in host memory; the device memory is released."""
    DISCARD = "discard"
    """Contents given up; the device memory is released."""
    KEEP = "keep"
    """Stays on the device."""


@dataclass(frozen=True)
class Level:
    """A named policy set; a tag it does not name is offloaded."""

    number: int
    policies: Mapping[str, Policy]

    def policy(self, tag: str) -> Policy:
        return self.policies.get(tag, Policy.OFFLOAD)


LEVELS: Mapping[int, Level] = {
    1: Level(1, {KV_CACHE: Policy.DISCARD, WORKSPACE: Policy.DISCARD}),
    2: Level(2, {KV_CACHE: Policy.DISCARD, WORKSPACE: Policy.DISCARD, WEIGHTS: Policy.DISCARD}),
}


def level_of(number: int) -> Level:
    """The level of that number; `InvalidArgument` when there is none."""
    if number not in LEVELS:
        raise InvalidArgument(
            f"there is no sleep level {number!r}; use one of {sorted(LEVELS)}, or policy={{...}}"
        )
    return LEVELS[number]


def tag_list(tags: str | Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """The tags of an argument, a bare string being one; `UnknownTagError` outside `known`."""
    wanted = (tags,) if isinstance(tags, str) else tuple(dict.fromkeys(tags))
    names = frozenset(known)
    for tag in wanted:
        if tag not in names:
            raise UnknownTagError(tag, names)
    return wanted
