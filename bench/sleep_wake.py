"""Sleep and wake side by side: this library with its options, and its peers, in one run.

Every subject and part is a process of its own, one after the other: weights (cycles of tensors of
mixed sizes), touch (first allocations), small (many small tensors) and kv_cache (memory that wakes
without contents). Between sleep and wake this process, which has no device context, reads what is
in use: device memory from the management library, host memory from the kernel and the control
group, both less what was in use before. Each multiplies once at its start, as an engine would. The
link is measured first and last.

Peers come from a folder outside the tree (--peers): `torch_memory_saver` as its wheel unpacks, with
its libraries beside it, and `vllm/` with `cumem_allocator.abi3.so` and `device_allocator/`. A
subject that is not there, or an option that this version does not have, is skipped with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from figures import Figure, settings_of, write_json
from pools import ACCELERATOR, HOST, KV_WAKE_MILLISECONDS
from subjects import PARTS, PEERS, SUBJECTS, Spec, nvidia_library

import hal

SCHEMA_VERSION = 1
MIB, GIB = 1 << 20, 1 << 30
SIZES = {"bf16": 24 * GIB, "fp8": 8 * GIB, "int8": 8 * GIB}
WITHOUT_OPTIONS = ("ours", "tms", "cumem")
"""The subjects of the parts that no option changes."""
DTYPES = {"ours": tuple(SIZES), "ours-ans": tuple(SIZES)}
"""Where other types than bf16 tell something."""
Results = dict[str, dict[str, Any]]


# ---- a process for each --------------------------------------------------------------------------


class Watch:
    """What is in use on the device and the host, seen from a process without a context."""

    def __init__(self, platform: hal.Platform) -> None:
        self._platform = platform
        self.on_device = platform.device_type != "cpu"

    def read(self) -> dict[str, int | None]:
        """Bytes in use; None where the source is not there."""
        return {
            "device": self._device(),
            "host": _meminfo("MemTotal") - _meminfo("MemAvailable"),
            "cgroup": _cgroup(),
        }

    def _device(self) -> int | None:
        if not self.on_device:
            return None
        info = self._platform.get_memory_info()
        if info.total is None or info.free is None:
            return None
        return info.total - info.free - (info.reserved or 0)


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/meminfo has no {name}")


def _cgroup() -> int | None:
    for file in ("memory.current", "memory/memory.usage_in_bytes"):
        path = Path("/sys/fs/cgroup") / file
        if path.is_file():
            return int(path.read_text())
    return None


def run(spec: Spec, watch: Watch) -> dict[str, Any]:
    """Measure one subject in a process of its own; the figures are less what was in use before."""
    if spec.subject in PEERS and (why := _why_no_peers(spec, watch)):
        return {"skipped": why}
    before = watch.read()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("subjects.py")), json.dumps(asdict(spec))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(spec),
    )
    try:
        return _converse(process, watch, before)
    finally:
        _end(process)


def _why_no_peers(spec: Spec, watch: Watch) -> str | None:
    if not watch.on_device:
        return "peers need an accelerator"
    return None if spec.peers else "no folder of peers was given (--peers)"


def _end(process: subprocess.Popen[str]) -> None:
    """Wait until a process and what it holds on the device are gone."""
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _converse(
    process: subprocess.Popen[str], watch: Watch, before: Mapping[str, int | None]
) -> dict[str, Any]:
    for line in process.stdout or ():
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            sys.stderr.write(line)  # a peer's own output
            continue
        if "result" in said:
            result: dict[str, Any] = said["result"]
            return result
        seen = {key: _less(value, before[key]) for key, value in watch.read().items()}
        if process.stdin:
            process.stdin.write(json.dumps(seen) + "\n")
            process.stdin.flush()
    return {"failed": f"its process ended with {process.wait()}"}


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _environment(spec: Spec) -> dict[str, str]:
    """The environment of a subject: torch_memory_saver's library is loaded before all others."""
    env = dict(os.environ)
    if not spec.subject.startswith("tms") or spec.peers is None:
        return env
    runtime = nvidia_library("libcudart.so")
    found = sorted(Path(spec.peers).glob("torch_memory_saver_hook_mode_preload*.so"))
    if runtime and found:
        path = [str(Path(runtime).parent), env.get("LD_LIBRARY_PATH", "")]
        env |= {"LD_PRELOAD": str(found[-1]), "LD_LIBRARY_PATH": ":".join(filter(None, path))}
    return env


def plans(options: argparse.Namespace, base: Spec) -> Iterator[Spec]:
    """Every process of the run, in order."""
    for part in options.parts:
        for subject in options.subjects:
            if part != "weights":
                if subject in WITHOUT_OPTIONS:
                    yield replace(base, subject=subject, part=part)
                continue
            for dtype in options.dtypes:
                if dtype == "bf16" or subject in DTYPES:
                    size = options.mib * MIB if options.mib else SIZES[dtype]
                    yield replace(base, subject=subject, part=part, dtype=dtype, size=size)


def key_of(spec: Spec) -> str:
    name = f"{spec.subject}/{spec.part}"
    return name if spec.dtype == "bf16" else f"{name}/{spec.dtype}"


# ---- figures -------------------------------------------------------------------------------------


def seconds(result: Mapping[str, Any], name: str, cycles: slice = slice(None)) -> tuple[float, ...]:
    return tuple(each[name] for each in result.get("cycles", ())[cycles] if name in each)


def rates(result: Mapping[str, Any], name: str, cycles: slice = slice(None)) -> tuple[float, ...]:
    """GB/s of the tensors' bytes, whatever crossed the link."""
    return tuple(result["bytes"] / value / 1e9 for value in seconds(result, name, cycles))


FIRST, LATER = slice(1), slice(1, None)
LINKS = "link", "link again"


def residual(result: Mapping[str, Any]) -> float | None:
    """MiB of device memory in use while asleep."""
    used = [each["asleep"]["device"] for each in result.get("cycles", ())]
    return None if None in used or not used else max(used) / MIB


def host_ratio(result: Mapping[str, Any]) -> float | None:
    """Host memory that the first sleep took, a byte of tensors: as the kernel tells it, with what a
    driver pins, or what the subject says that it holds, if that is more.
    """
    awake, cycles = result.get("awake"), result.get("cycles")
    if not awake or not cycles:
        return None
    first = cycles[0]
    taken = first["asleep"]["host"] - awake["host"]
    return float(max(taken, first.get("held", 0)) / result["bytes"])


def figures_of(results: Results) -> list[Figure]:
    """What the run is held against; a figure whose subject was skipped is left out."""
    link_out, link_in = (
        tuple(rate / 1e9 for name in LINKS for rate in results.get(name, {}).get(way, ()))
        for way in ("out", "in")
    )
    measured = {key: result for key, result in results.items() if "cycles" in result}
    peers = [measured[f"{peer}/weights"] for peer in PEERS if f"{peer}/weights" in measured]
    figures = list(_weights(measured, peers, link_out, link_in))
    if parked := measured.get("ours-park/weights"):
        figures += _parked(parked)
    for key, result in measured.items():
        if key.endswith("/kv_cache"):
            wakes = tuple(1e3 * value for value in seconds(result, "wake_seconds"))
            bound = KV_WAKE_MILLISECONDS if result["bytes"] == 64 * GIB else None
            at_most = bound if key.startswith("ours") else None
            amount = f"{result['bytes'] / GIB:g} GiB"
            figures.append(Figure(f"{key}: wake {amount}", "ms", wakes, at_most=at_most))
    return figures


def _weights(
    measured: Results,
    peers: Sequence[dict[str, Any]],
    link_out: tuple[float, ...],
    link_in: tuple[float, ...],
) -> Iterator[Figure]:
    device = bool(peers)  # targets are a device's
    if ours := measured.get("ours/weights"):
        first = rates(ours, "sleep_seconds", FIRST)
        best = max((rates(peer, "sleep_seconds", FIRST) for peer in peers), default=())
        yield Figure("ours: first sleep", "GB/s", first, "best peer", best, 7.0 if device else None)
        later, woke = rates(ours, "sleep_seconds", LATER), rates(ours, "wake_seconds")
        bound = 0.98 if device else None
        yield Figure("ours: later sleep", "GB/s", later, "link", link_out, bound)
        yield Figure("ours: wake", "GB/s", woke, "link", link_in, bound)
        left = [found for peer in peers if (found := residual(peer)) is not None]
        if left and (own := residual(ours)) is not None:
            yield Figure("ours: residual", "MiB", (own,), at_most=min(left))
        if device and (ratio := host_ratio(ours)) is not None:
            yield Figure("ours: host memory", "of the bytes", (ratio,), at_most=1.01)
    if kept := measured.get("ours-retain/weights"):
        later = rates(kept, "sleep_seconds", LATER)
        aim = (500.0,) if device else ()
        yield Figure("ours-retain: unchanged", "GB/s", later, "floor", aim, 1.0 if device else None)
    if small := measured.get("ours-ans/weights"):
        woke = rates(small, "wake_seconds")
        yield Figure("ours-ans: wake", "GB/s", woke, "link", link_in, 1.4 if device else None)
        if device and (ratio := host_ratio(small)) is not None:
            yield Figure("ours-ans: host memory", "of the bytes", (ratio,), at_most=0.70)


def _parked(result: dict[str, Any]) -> Iterator[Figure]:
    if (left := residual(result)) is not None:
        yield Figure("ours-park: residual", "MiB", (left,), at_most=16.0)
    for name, most in (("park_seconds", 0.8), ("unpark_seconds", 0.5)):
        if values := seconds(result, name):
            yield Figure(f"ours-park: {name.partition('_')[0]}", "s", values, at_most=most)


# ---- tables --------------------------------------------------------------------------------------


def markdown(results: Results, figures: Sequence[Figure]) -> str:
    """The run as Markdown: what every subject reached, and what this library is held against."""
    lines = [
        "| subject | first sleep | later sleep | wake | asleep residual | host memory |",
        "|---|---|---|---|---|---|",
        *(_row(key, result) for key, result in results.items() if "/weights" in key),
        "",
        "| figure | measured | against | ratio | target | |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(figure.row())} |" for figure in figures),
        "",
        "| part | figure |",
        "|---|---|",
        *(line for key, result in results.items() for line in _part_rows(key, result)),
    ]
    return "\n".join(lines) + "\n"


def _row(key: str, result: Mapping[str, Any]) -> str:
    name = key.replace("/weights", "")
    if "cycles" not in result:
        return f"| {name} | {why_not(result)} | | | | |"
    left, ratio = residual(result), host_ratio(result)
    cells = (
        _median(rates(result, "sleep_seconds", FIRST)),
        _median(rates(result, "sleep_seconds", LATER)),
        _median(rates(result, "wake_seconds")),
        "unknown" if left is None else f"{left:,.0f} MiB",
        "unknown" if ratio is None else f"{ratio:.3f} × the bytes",
    )
    return f"| {name} | {' | '.join(cells)} |"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} GB/s" if values else ""


def why_not(result: Mapping[str, Any]) -> str:
    return f"skipped: {result['skipped']}" if "skipped" in result else f"FAILED: {result['failed']}"


def _part_rows(key: str, result: Mapping[str, Any]) -> Iterator[str]:
    if "/weights" in key or "link" in key:
        return
    if "skipped" in result or "failed" in result:
        yield f"| {key} | {why_not(result)} |"
    elif "region_seconds" in result:
        region, plain = (1e3 * result[name] for name in ("region_seconds", "plain_seconds"))
        yield f"| {key} | {region:.1f} ms, torch alone {plain:.1f} ms |"
    else:
        slept, woke = (
            statistics.median(seconds(result, name)) * 1e3
            for name in ("sleep_seconds", "wake_seconds")
        )
        last = result["cycles"][-1]
        zero = "" if "zeroed" not in last else f", {'zeroed' if last['zeroed'] else 'not zeroed'}"
        yield f"| {key} | sleep {slept:.1f} ms, wake {woke:.1f} ms{zero} |"


# ---- all of it -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Results:
    platform = hal.detect(options.platform)
    watch = Watch(platform)
    scale = ACCELERATOR if watch.on_device else HOST
    base = Spec(
        subject="link",
        part="",
        platform=options.platform or platform.name,
        peers=options.peers,
        dtype="bf16",
        size=options.mib * MIB if options.mib else SIZES["bf16"],
        cycles=options.cycles,
        touched=scale.touched,
        small=scale.small,
        kv_cache=scale.kv_cache,
        kv_piece=scale.kv_piece,
    )
    results = {"link": run(base, watch)}
    if watch.on_device:  # whoever takes the machine's memory first waits for it
        run(replace(base, subject="ours", part="weights", cycles=1), watch)
    for spec in plans(options, base):
        results[key_of(spec)] = run(spec, watch)
        print(f"{key_of(spec)}: {summary(results[key_of(spec)])}", flush=True)
        save(options, results)
    results["link again"] = run(base, watch)
    return results


def summary(result: Mapping[str, Any]) -> str:
    return why_not(result) if "skipped" in result or "failed" in result else "measured"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platform", help="platform name (default: HAL_PLATFORM, else what is detected)"
    )
    parser.add_argument(
        "--peers",
        default=os.environ.get("HAL_BENCH_PEERS"),
        help="folder with the peers (default: HAL_BENCH_PEERS)",
    )
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--dtypes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument(
        "--mib", type=int, help="size of the weights (default: 24 GiB, fp8 and int8 8)"
    )
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table here")
    options = parser.parse_args()
    results = measure(options)
    figures = figures_of(results)
    return finish(options, results, figures)


def _failed(results: Results) -> list[str]:
    return [key for key, result in results.items() if "failed" in result]


def _missed(figures: Sequence[Figure]) -> list[str]:
    return [figure.name for figure in figures if figure.met is False]


def save(options: argparse.Namespace, results: Results) -> None:
    """Write what there is so far: a run that is cut short leaves it."""
    if not options.json:
        return
    figures = figures_of(results)
    report = {
        "schema_version": SCHEMA_VERSION,
        "bench": "sleep_wake",
        "passed": not _failed(results) and not _missed(figures),
        "environment": results["link"].get("environment"),
        "settings": settings_of(options),
        "figures": [figure.as_dict() for figure in figures],
        "results": results,
    }
    write_json(options.json, report)


def finish(options: argparse.Namespace, results: Results, figures: Sequence[Figure]) -> int:
    """Print the table, write the files, and return the exit status: 1 where anything failed."""
    failed, missed = _failed(results), _missed(figures)
    table = markdown(results, figures)
    print(table)
    if options.markdown:
        options.markdown.write_text(table)
    save(options, results)
    print(f"MISSED: {', '.join(missed)}" if missed else "no target missed")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
