"""Memory queries of the `cpu` platform: host memory as the device's memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hal.errors import HalError
from hal.memory import MemoryInfo
from hal.native import Device, Fact

PROC_SELF = Path("/proc/self")


def memory_info(device: Device) -> MemoryInfo:
    """Total and free as the driver reports them and this process's resident bytes; unknown is
    None.
    """
    total, free, doubts = _driver_figures(device)
    used, source, doubt = resident_bytes()
    reason = "; ".join(text for text in (*doubts, doubt) if text)
    return MemoryInfo(total, free, used, f"{device.driver} driver, {source}", not reason, reason)


def _driver_figures(device: Device) -> tuple[int | None, int | None, list[str]]:
    facts = device.facts
    doubts = [] if Fact.FREE_TRUTHFUL in facts.yes else [facts.why_not[Fact.FREE_TRUTHFUL]]
    try:
        free, total = device.memory()
    except HalError as error:
        return None, None, [*doubts, f"total and free are unknown: {error}"]
    return total, free, doubts


def resident_bytes(process: Path = PROC_SELF) -> tuple[int | None, str, str]:
    """(resident bytes, their source, why they are not exact) of the process with that /proc folder.

    `smaps_rollup` counts page by page. `statm`, which proc(5) calls inaccurate, is for kernels
    without it.
    """
    try:
        return _from_rollup(process / "smaps_rollup"), "smaps_rollup", ""
    except (OSError, ValueError) as no_rollup:
        try:
            return _from_statm(process / "statm"), "statm", f"statm is approximate ({no_rollup})"
        except (OSError, ValueError) as no_statm:
            return None, "no source", f"process_used is unknown: {no_rollup}; {no_statm}"


def _from_rollup(path: Path) -> int:
    found = re.search(r"^Rss:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} has no Rss line")
    return int(found[1]) * 1024


def _from_statm(path: Path) -> int:
    fields = path.read_text().split()
    if len(fields) < 2:
        raise ValueError(f"{path} has no second field")
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
