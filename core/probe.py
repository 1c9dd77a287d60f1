"""Where the tensors of a KV initialisation land on this platform: expected beside found.

Engines open a `runtime` scope around KV initialisation and a `kv_cache` scope within it. `kv` is a
tensor made in the inner scope and `rt` one made in the outer scope after it. The pool that a tensor
is in decides whose memory it shares; the tag of its segment decides what a sleep does to it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal.core.kv_init import Nesting
from hal.core.sleep import SleepManager
from hal.core.tags import KV_CACHE, RUNTIME
from hal.detect import detect
from hal.environment import table
from hal.errors import HalError
from hal.pools import find_segment, storage_address, torch_device

if TYPE_CHECKING:
    from rich.console import Console

    from hal.environment import Environment
    from hal.platform import Platform
    from hal.pools import Pool

OUTSIDE = "outside the pools"
NESTED = "nested"
_KV_BYTES, _RT_BYTES = 5 << 19, 5 << 18
"""`rt` fits into what `kv` leaves of a segment, in torch's allocators and in the host's."""


@dataclass(frozen=True)
class Placement:
    """Where one tensor belongs and where it is; `pool` and `tag` are `OUTSIDE` in no pool."""

    way: str
    """How the scopes were opened: `NESTED`, or by `kv_init` with a strategy."""
    tensor: str
    expected: str
    pool: str
    """The tag of the pool that torch took the tensor's block from."""
    tag: str
    """The tag that the ledger has for the tensor's segment."""

    @property
    def is_right(self) -> bool:
        return self.expected == self.pool == self.tag

    def __str__(self) -> str:
        verdict = "as expected" if self.is_right else "NOT as expected"
        return (
            f"{self.tensor} expected in {self.expected}; found in pool {self.pool}, segment tagged "
            f"{self.tag}: {verdict}"
        )


@dataclass(frozen=True)
class PlacementReport:
    """What `hal probe` adds to the environment's report."""

    placements: tuple[Placement, ...]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "placements": [asdict(p) | {"is_right": p.is_right} for p in self.placements],
            "placement_problems": list(self.problems),
        }

    def render(self, console: Console) -> None:
        """Print the report for people."""
        rows = [(f"{p.tensor}, {p.way}", str(p)) for p in self.placements]
        for title, lines in (
            ("KV initialisation", rows),
            ("Problems of KV initialisation", [("x", text) for text in self.problems]),
        ):
            if lines:
                console.print(table(title, lines))


def placement_report(environment: Environment) -> PlacementReport:
    """Probe the platform that an environment's report found; empty where nothing can sleep."""
    found = environment.platform
    if found is None or not found.capabilities or not _can_sleep(found.capabilities):
        return PlacementReport((), ())
    try:
        placements = probe_placements(detect(found.name))
    except (HalError, RuntimeError) as error:
        return PlacementReport((), (str(error),))
    # Where plain nesting goes wrong, kv_init does not nest.
    wrong = (p for p in placements if not p.is_right and p.way != NESTED)
    return PlacementReport(placements, tuple(f"{p.way}: {p}" for p in wrong))


def _can_sleep(capabilities: dict[str, Any]) -> bool:
    return bool(capabilities["virtual_memory"]["available"])


def probe_placements(platform: Platform, device: int = 0) -> tuple[Placement, ...]:
    """Nested scopes as engines open them, then `kv_init` with what the platform allows."""
    found = _nested(platform, device)
    for way in _strategies(platform, device):
        found += _kv_init(platform, device, way)
    return tuple(found)


def _strategies(platform: Platform, device: int) -> list[Nesting]:
    return ["auto", "flatten"] if platform.capabilities_of(device).flatten else ["auto"]


def _tensor(size: int, place: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=place)


def _nested(platform: Platform, device: int) -> list[Placement]:
    outer, inner = (platform.create_pool(tag, device) for tag in (RUNTIME, KV_CACHE))
    place = torch_device(platform, device)
    with outer.use():
        with inner.use():
            kv = _tensor(_KV_BYTES, place)
        rt = _tensor(_RT_BYTES, place)
    pools = (outer, inner)
    found = [
        _placement(NESTED, "kv", KV_CACHE, kv, pools),
        _placement(NESTED, "rt", RUNTIME, rt, pools),
    ]
    del kv, rt
    for pool in pools:
        pool.close()
    return found


def _kv_init(platform: Platform, device: int, nesting: Nesting) -> list[Placement]:
    place = torch_device(platform, device)
    with SleepManager(platform, device=device) as sleeper:
        with sleeper.kv_init(nesting=nesting) as scope:
            with scope.cache():
                kv = scope.declare(_tensor(_KV_BYTES, place))
            rt = _tensor(_RT_BYTES, place)
        pools = (_pool(sleeper, RUNTIME), _pool(sleeper, KV_CACHE))
        rt_belongs = OUTSIDE if scope.strategy == "fallback" else RUNTIME
        found = [
            _placement(f"kv_init ({scope.strategy})", "kv", KV_CACHE, kv, pools),
            _placement(f"kv_init ({scope.strategy})", "rt", rt_belongs, rt, pools),
        ]
        del kv, rt
    return found


def _pool(sleeper: SleepManager, tag: str) -> Pool:
    with sleeper.pool(tag) as pool:
        return pool


def _placement(
    way: str, tensor: str, expected: str, made: torch.Tensor, pools: tuple[Pool, ...]
) -> Placement:
    address = storage_address(made)
    pool = next((p.tag for p in pools if p.holds(address)), OUTSIDE)
    tag = next((p.tag for p in pools if find_segment(p.segments(), address)), OUTSIDE)
    return Placement(way, tensor, expected, pool, tag)
