"""The pipelines of ci/matrix.toml as jobs of a CI system.

Usage: python ci/pipelines.py github|buildkite [NAME...]; without a name all pipelines. The first
prints the values of a job matrix, the second a pipeline to upload; both are JSON.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MATRIX = Path(__file__).resolve().parent / "matrix.toml"

Pipelines = dict[str, dict[str, Any]]


def pipelines(path: Path = MATRIX) -> Pipelines:
    """Name -> script, labels, tier and minutes."""
    table = tomllib.loads(path.read_text())
    found: Pipelines = table["pipelines"]
    return found


def github(found: Pipelines) -> list[dict[str, Any]]:
    """The entries of `strategy.matrix.include`."""
    return [{"vendor": name, **entry} for name, entry in found.items()]


def buildkite(found: Pipelines) -> dict[str, Any]:
    """A pipeline with a step a vendor; an agent has the device whose name it carries."""
    return {"steps": [_step(name, entry) for name, entry in found.items()]}


def _step(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "label": f"verify {name}",
        "command": entry["script"],
        "env": {"TIER": entry["tier"], "OUT": f"build/{name}"},
        "agents": {"queue": name if "self-hosted" in entry["labels"] else "default"},
        "timeout_in_minutes": entry["minutes"],
        "artifact_paths": [f"build/{name}/**/*"],
    }


KINDS: dict[str, Callable[[Pipelines], Any]] = {"github": github, "buildkite": buildkite}


def main(arguments: list[str]) -> int:
    found = pipelines()
    kind, *names = arguments or [""]
    if kind not in KINDS or not set(names) <= set(found):
        print(f"{__doc__}\nPipelines: {', '.join(found)}", file=sys.stderr)
        return 2
    print(json.dumps(KINDS[kind]({name: found[name] for name in names or found})))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
