"""Sleep and wake of a real vLLM engine: the stock allocator against the plugin, in one run.

Each way to sleep has an engine of its own in a process of its own, on the same model: 9.85 GiB of
weights and 20 GiB of KV cache by default, decode graphs captured. What a step needs of the device
is left to vLLM's own options; sizes and steps are this script's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure, finish, milliseconds, settings_of

import hal

GIB, MIB = 1 << 30, 1 << 20
STEPS = ("cycles", "selective", "level_2")
PARKED_MOST = 16
"""MiB of device memory that a parked process may hold."""


@dataclass(frozen=True)
class Variant:
    """One way to sleep: the plugin's options, and what is measured of it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[str, ...] = STEPS


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("stock"),
        Variant("hal", {"retain": True}, (*STEPS, "contended", "many")),
        Variant("hal-copies", {"retain": False}, ("cycles",)),
        Variant("hal-compress", {"retain": True, "compress": "ans"}, ("cycles", "level_2")),
        Variant("hal-park", {"retain": True, "park": True}, ("cycles",)),
    )
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default="stock,hal", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--kv-gib", type=float, default=20.0)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--cycles", type=int, default=4, help="compared bit for bit, each")
    parser.add_argument("--many", type=int, default=100, help="without answers in between")
    parser.add_argument("--offload-graphs", action="store_true", help="graph memory sleeps, too")
    parser.add_argument("--codec", default="ans", help="of the variant hal-compress")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one engine")
    parser.add_argument("--workdir", default=f"{tempfile.gettempdir()}/vllm_sleep")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run_variant(variant: Variant, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure one way to sleep in a process of its own; what it wrote, however it ended."""
    result = Path(chosen.workdir) / f"{variant.name}.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    codec = {"compress": chosen.codec} if "compress" in variant.options else {}
    steps = [s for s in variant.steps if s != "contended" or chosen.device != "cpu"]
    settings = {
        **{k: v for k, v in vars(chosen).items() if k not in {"json", "variants"}},
        "variant": variant.name,
        "options": variant.options | codec,
        "steps": steps,
        "result": str(result),
    }
    command = [sys.executable, str(Path(__file__).with_name("vllm_engine.py"))]
    log = result.with_suffix(".log")
    start = time.perf_counter()
    with log.open("w") as output:
        try:
            status: int | str = subprocess.run(
                [*command, json.dumps(settings)],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=chosen.limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"more than {chosen.limit:g} s"
    seconds = time.perf_counter() - start
    print(f"{variant.name}: status {status} after {seconds:.0f} s", flush=True)
    if status:
        print("\n".join(line[:300] for line in log.read_text().splitlines()[-60:]), flush=True)
    found = json.loads(result.read_text()) if result.exists() else {"checks": {}}
    return found | {"status": status, "seconds": seconds, "log": log.read_text()[-20000:]}


# -- figures


def figures_of(name: str, found: dict[str, Any], stock: dict[str, Any]) -> list[Figure]:
    """What a run measured, beside what the stock allocator needed for the same."""
    if "sleeps" not in found:
        return []
    beside = "stock" if stock and found is not stock else ""
    measured = {
        "first sleep": ("ms", lambda run: times(run, "sleeps", slice(1))),
        "later sleep": ("ms", lambda run: times(run, "sleeps", slice(1, None))),
        "wake": ("ms", lambda run: times(run, "wakes", slice(None))),
        "device used asleep": ("MiB", lambda run: asleep(run, "device_used", MIB)),
        "host memory a byte kept": ("", pinned_ratio),
        "rounds that differ": ("", differing),
    }
    entries = [
        Figure(
            f"{name}: {what}",
            unit,
            samples(found),
            beside,
            samples(stock) if beside else (),
            at_most=targets(name).get(what),
        )
        for what, (unit, samples) in measured.items()
    ]
    if name == "hal-park":
        most = targets(name)["process parked"]
        entries.append(Figure(f"{name}: process parked", "MiB", parked(found), at_most=most))
    if many := found.get("many"):
        name_of, most = f"{name}: device memory a cycle", targets(name)["device memory a cycle"]
        entries.append(Figure(name_of, "MiB", (slope(many["asleep"]) / MIB,), at_most=most))
    return [entry for entry in entries if entry.samples]


def times(found: dict[str, Any], which: str, part: slice) -> tuple[float, ...]:
    return milliseconds(found.get(which, [])[part])


def slope(values: Sequence[float]) -> float:
    """What is added in each cycle, along a line through all of them."""
    return statistics.linear_regression(range(len(values)), values).slope


def targets(name: str) -> dict[str, float]:
    """The most that a figure of our variants may be."""
    if name == "stock":
        return {"rounds that differ": 0}
    wanted: dict[str, float] = {"rounds that differ": 0, "device memory a cycle": 0.01}
    if name != "hal-park":
        wanted |= {"host memory a byte kept": 1.01, "wake": 180 if "compress" in name else 240}
        wanted["first sleep"] = 1000
    if name == "hal":
        wanted["later sleep"] = 60
    if name == "hal-park":
        wanted["process parked"] = PARKED_MOST
    return wanted


def asleep(found: dict[str, Any], what: str, unit: int) -> tuple[float, ...]:
    value = found.get("asleep", {}).get(what)
    return () if value is None else (value / unit,)


def pinned_ratio(found: dict[str, Any]) -> tuple[float, ...]:
    """Host memory taken, over the bytes that the sleep kept."""
    taken = found.get("asleep", {}).get("pinned")
    last = found.get("report", {}).get("last")
    offloaded = (tag["bytes"] for tag in last["tags"] if tag["policy"] == "offload") if last else ()
    kept = sum(offloaded) or found.get("weight_bytes", 0)
    return (taken / kept,) if taken and kept else ()


def parked(found: dict[str, Any]) -> tuple[float, ...]:
    """MiB of device memory of the process while parked: by the process list, else the increase
    over what was used before the engine.
    """
    held = found.get("asleep", {}).get("process_used")
    if held is None:
        before = found["events"][0]["device_used"]
        held = max(0, found["asleep"]["device_used"] - before)
    return (held / MIB,)


def differing(found: dict[str, Any]) -> tuple[float, ...]:
    """How many comparisons failed."""
    return (float(sum(not same for same in found.get("checks", {}).values())),)


def residual_lines(found: dict[str, Any]) -> list[str]:
    """What stays on the device while asleep, by source."""
    last = found.get("report", {}).get("last") or {}
    return [
        f"  {entry['source']}: "
        + ("unknown" if entry["bytes"] is None else f"{entry['bytes'] / MIB:,.1f} MiB")
        + (f" ({entry['reason']})" if entry["reason"] else "")
        for entry in last.get("residual", ())
    ]


def main() -> int:
    chosen = arguments()
    runs = {
        name: run_variant(VARIANTS[name], chosen) for name in chosen.variants.split(",") if name
    }
    stock = runs.get("stock", {})
    entries = [figure for name, found in runs.items() for figure in figures_of(name, found, stock)]
    for name, found in runs.items():
        if lines := residual_lines(found):
            print(f"{name}, on the device while asleep:", *lines, sep="\n")
        if contended := found.get("contended"):
            print(f"{name}, a wake that did not fit: {contended}")
    if chosen.json:
        runs_path = chosen.json.with_name(f"{chosen.json.stem}-runs.json")
        runs_path.write_text(json.dumps(runs, indent=1))
    status = finish("vLLM sleep", hal.detect(), entries, settings_of(chosen), chosen.json)
    return status or int(any(run["status"] for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
