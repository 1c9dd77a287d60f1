"""Device memory of a process that may be parked, read by another: a query of NVML's made by a
parked process itself waits for its wake.

Run by its path with the owner's process id. The owner writes a JSON object a line, {"path": its
sys.path, "devices": {"0": uuid}}, and reads one for each: by device, the fields of a `MemoryInfo`.
The reader ends with its owner.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def _answer(owner: int, request: dict[str, Any]) -> dict[str, Any]:
    sys.path[:] = request["path"]  # nvidia-ml-py is where its owner has it
    from hal.cuda import telemetry

    return {
        index: asdict(telemetry.management_memory(int(index), device_id, owner))
        for index, device_id in request["devices"].items()
    }


def main(owner: int) -> None:
    """Answer the owner until it ends."""
    sys.path.append(str(Path(__file__).parent))
    from checkpoint_helper import requests  # type: ignore[import-not-found]  # beside this file

    for request in requests(owner):
        sys.stdout.write(json.dumps(_answer(owner, request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
