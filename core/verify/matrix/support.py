"""Which values of the axes a platform cannot have, and why: asked of the platform itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hal.core.backup import BackupOptions
from hal.core.sleep import SleepManager
from hal.core.verify.matrix.table import Cell, Matrix
from hal.detect import HOST
from hal.errors import HalError, Unsupported
from hal.platform import Platform, PoolNesting
from hal.pools import torch_device

CODECS = ("zstd", "ans")
"""Codecs of compressed backups, of which a platform has one at most."""
_SMALL = 1 << 16
_ONE_RANK = "a cell is one process; ranks that agree are tested with hal.core.group"


@dataclass(frozen=True)
class _Asked:
    platform: Platform
    device: int


def unsupported(matrix: Matrix, platform: Platform, device: int) -> dict[tuple[str, str], str]:
    """(axis, value) -> why this platform's device cannot have it."""
    asked = _Asked(platform, device)
    return {
        (axis, value): reason
        for (axis, value), why_not in _RULES.items()
        if value in matrix.axes.get(axis, ()) and (reason := why_not(asked))
    }


def why_not(cell: Cell, missing: Mapping[tuple[str, str], str]) -> str:
    """Why a cell cannot run where these values are missing; "" when it can."""
    return "; ".join(_reasons(cell, missing))


def _reasons(cell: Cell, missing: Mapping[tuple[str, str], str]) -> Iterator[str]:
    for axis, value in cell.values.items():
        if reason := missing.get((axis, value)):
            yield f"{axis}={value}: {reason}"


def _graphs(asked: _Asked) -> str:
    return asked.platform.capabilities_of(asked.device).graph_pools.reason


def _pinned(asked: _Asked) -> str:
    return asked.platform.capabilities_of(asked.device).pinned_host.reason


def _flatten(asked: _Asked) -> str:
    return asked.platform.capabilities_of(asked.device).flatten.reason


def codec_of(platform: Platform, device: int) -> str | None:
    """The codec in which this platform keeps compressed backups; None when it has none."""
    return next((c for c in CODECS if not _why_no_backups(platform, device, compress=c)), None)


def _compressed(asked: _Asked) -> str:
    reasons = [_why_no_backups(asked.platform, asked.device, compress=codec) for codec in CODECS]
    return "" if "" in reasons else "; ".join(dict.fromkeys(reasons))


def _retained(asked: _Asked) -> str:
    return _why_no_backups(asked.platform, asked.device, retain=True)


def _parked(asked: _Asked) -> str:
    if not (flag := asked.platform.capabilities_of(asked.device).park):
        return flag.reason
    return asked.platform.process_checkpoint().why_not_now() or ""


def _why_no_backups(platform: Platform, device: int, **options: Any) -> str:
    """Why backups cannot be kept with these options, which is tried; "" when they can."""
    try:
        with SleepManager(
            platform, device=device, backup=BackupOptions(backing="anonymous", **options)
        ) as sleeper:
            sleeper.prepare(_SMALL)
    except Unsupported as error:
        return str(error)
    return ""


def _float8(asked: _Asked) -> str:
    place = torch_device(asked.platform, asked.device)
    try:
        torch.ones(8, device=place).to(torch.float8_e4m3fn).to(torch.float32)
    except (RuntimeError, HalError) as error:
        return f"torch has no 8-bit floats here: {error}"
    return ""


def _lifo(asked: _Asked) -> str:
    return _order(asked, PoolNesting.LIFO)


def _fifo(asked: _Asked) -> str:
    return _order(asked, PoolNesting.FIFO)


def _order(asked: _Asked, wanted: PoolNesting) -> str:
    found = asked.platform.capabilities_of(asked.device).pool_nesting
    if asked.platform.name == HOST or found is wanted:
        return ""
    return f"this build of torch nests pools {found.value}"


_RULES: dict[tuple[str, str], Callable[[_Asked], str]] = {
    ("execution", "graphs"): _graphs,
    ("backing", "pinned"): _pinned,
    ("fault", "host_register@sleep"): _pinned,
    ("compress", "yes"): _compressed,
    ("retain", "yes"): _retained,
    ("park", "yes"): _parked,
    ("kv", "fp8"): _float8,
    ("nesting", "lifo"): _lifo,
    ("nesting", "fifo"): _fifo,
    ("nesting", "flatten"): _flatten,
    ("ranks", "2"): lambda _: _ONE_RANK,
}
