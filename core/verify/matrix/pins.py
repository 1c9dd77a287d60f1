"""The pinned set of cells of a platform: what must run, and what may be left out for which reason.

A cell that vanishes, appears, or is left out for another reason than before is an error, so that a
run cannot pass by testing less.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hal.errors import InvalidArgument

SCHEMA = 1
LISTED = 400
"""Sets up to this size are kept by name, larger ones by their digest."""
_SHOWN = 5


def pin_file(matrix_file: Path, platform: str) -> Path:
    """Where a platform's set is kept: in `cells`, beside the matrix."""
    return matrix_file.parent / "cells" / f"{platform}.json"


def problems(
    path: Path, tier: str, cells: Sequence[str], unsupported: Mapping[str, str]
) -> list[str]:
    """In what a run's set differs from the pinned one; a platform without a file has none."""
    if not path.exists():
        return []
    pinned = _read(path).get("tiers", {}).get(tier)
    if pinned is None:
        return [f"{path.name} has no set for tier {tier}; add it with --pin"]
    return [*_of_cells(pinned, cells), *_of_reasons(pinned["unsupported"], unsupported)]


def write(path: Path, tier: str, cells: Sequence[str], unsupported: Mapping[str, str]) -> None:
    """Make a run's set the pinned one of its tier."""
    content: dict[str, Any] = {"schema": SCHEMA, "tiers": {}}
    if path.exists():
        content = _read(path)
    entry: dict[str, Any] = {"count": len(cells), "sha256": _digest(cells)}
    if len(cells) <= LISTED:
        entry["cells"] = sorted(cells)
    content["tiers"][tier] = entry | {"unsupported": dict(sorted(unsupported.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if content.get("schema") != SCHEMA:
        raise InvalidArgument(f"{path} has schema {content.get('schema')}, not {SCHEMA}")
    return content


def _of_cells(pinned: Mapping[str, Any], cells: Sequence[str]) -> Iterator[str]:
    if _digest(cells) == pinned["sha256"]:
        return
    if "cells" not in pinned:
        yield f"the set of cells has changed: {len(cells)} now, {pinned['count']} pinned"
        return
    for name in _first(set(pinned["cells"]) - set(cells)):
        yield f"cell {name} has vanished"
    for name in _first(set(cells) - set(pinned["cells"])):
        yield f"cell {name} is not pinned"


def _of_reasons(pinned: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(pinned.keys() | found.keys()):
        was, now = pinned.get(name), found.get(name)
        if was == now:
            continue
        if now is None:
            yield f"cell {name} was expected to be unsupported ({was})"
        elif was is None:
            yield f"cell {name} is unsupported unexpectedly: {now}"
        else:
            yield f"cell {name} is unsupported for another reason: {now} (pinned: {was})"


def _first(names: set[str]) -> Iterator[str]:
    """A few of many names."""
    ordered = sorted(names)
    yield from ordered[:_SHOWN]
    if len(ordered) > _SHOWN:
        yield f"… and {len(ordered) - _SHOWN} more"


def _digest(cells: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(cells)).encode()).hexdigest()
