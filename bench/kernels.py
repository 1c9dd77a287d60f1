"""How fast the kernels are, beside their peers and beside the memory's own speed, in one run.

Each call finds a cache that something else has filled, and logits of its own, so that none reads
what another has masked. Peers that are installed are measured in the same run; for others the table
has what was reported for an H200. "of copy" is the time that a copy takes for the bytes that have
to be moved at least (logits read once and, for masks, written once; KV read once), by the call's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernels_mla
import kernels_sampler
from figures import environment, write_json
from kernel_cells import Cell, Clock, table_of
from rich.console import Console

import hal
from hal.core.kernels.mla_decode import reserve_mla_decode
from hal.core.kernels.topk_topp import reserve_topk_topp
from hal.core.workspace import WorkspaceManager
from hal.pools import torch_device

SCHEMA_VERSION = 2
KERNELS = {"mla": kernels_mla, "sampler": kernels_sampler}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--platform", help="platform name (default: what is detected)")
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    add("--rounds", type=int, default=15)
    add("--no-check", dest="check", action="store_false", help="skip `exact`")
    add("--sweep", action="store_true", help="time launch shapes instead")
    add("--json", type=Path, metavar="FILE", help="also write the cells here")
    add("--batches", type=int, nargs="+", default=[1, 8, 64, 256, 1024], help="sampler")
    add("--vocabularies", type=int, nargs="+", default=[32_000, 129_280, 262_144])
    add("--rows", nargs="+", default=["normal"], choices=["normal", "peaked"])
    add("--mla-batches", type=int, nargs="+", default=[1, 16, 64])
    add("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 32_768], help="of KV")
    add("--heads", type=int, nargs="+", default=[128])
    add("--pages", type=int, nargs="+", default=[64])
    return parser.parse_args()


def report_of(platform: hal.Platform, clock: Clock, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "bench": "kernels",
        "environment": environment(platform),
        "copy_bytes_per_second": clock.copy_rate,
        "cells": [cell.as_dict() for cell in cells],
    }


def main() -> int:
    options = parse()
    platform = hal.detect(options.platform, require_accelerator=True)
    device = torch_device(platform, 0)
    workspace = WorkspaceManager(device)
    reserve_topk_topp(
        workspace, vocabulary=max(options.vocabularies), max_num_seqs=max(options.batches)
    )
    sizes = {"rows": max(options.mla_batches), "max_tokens": max(options.lengths)}
    reserve_mla_decode(workspace, heads=max(options.heads), **sizes)
    workspace.lock()
    clock = Clock(device, options.rounds)
    begun = time.monotonic()
    cells: list[Cell] = []
    for name in options.kernels:
        found = KERNELS[name]
        for cell in (found.sweep if options.sweep else found.measure)(clock, options, device):
            cells.append(cell)
            if options.json:  # after each, so that a run that is cut short leaves what it has
                write_json(options.json, report_of(platform, clock, cells))
    title = (
        f"kernels on {platform.capabilities.device_name}, copy {clock.copy_rate / 1e12:.2f} TB/s, "
        f"{time.monotonic() - begun:.0f} s"
    )
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table_of(cells, f"{title}; * reported, not measured"))
    return 1 if any(cell.exact is False for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
