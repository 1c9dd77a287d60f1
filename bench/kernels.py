"""How fast the kernels are, beside their peers and beside the memory's own speed, in one run.

Each call gets logits of its own, so that none reads what another has masked, and finds a cache that
something else has filled. Peers that are installed are measured in the same run; for others the
table has what was reported for an H200. The floor is one read of the logits and, for masks, one
write, at the speed of a copy that was measured here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from figures import environment
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hal
from hal.core.kernels import topk_topp
from hal.core.kernels.topk_topp import draw_bits, reserve_topk_topp, topk_topp_specs
from hal.core.kernels.topk_topp_launch import Shape, launch, multiprocessors
from hal.core.workspace import WorkspaceManager
from hal.pools import torch_device

SCHEMA_VERSION = 1
BATCHES = (1, 8, 64, 256, 1024)
VOCABULARIES = (32_000, 129_280, 262_144)
Limits = tuple[int | None, float | None]
LIMITS: tuple[Limits, ...] = ((50, 0.9), (50, None), (None, 0.9), (2048, 0.95))
MEMORY = 24 << 30
"""Bytes of logits that a cell may take, so that each call has its own."""
FLUSH = 1 << 30
"""Bytes written between calls: the cache's contents go, and the host gets ahead of the device."""
REPORTED: dict[tuple[str, str, Limits, int, int], float] = {
    ("vLLM 0.33.0", "mask", (50, 0.9), 129_280, 1): 320.0,
    ("vLLM 0.33.0", "mask", (50, 0.9), 129_280, 64): 171.0,
    ("vLLM 0.33.0", "mask", (50, 0.9), 129_280, 1024): 1017.0,
    ("vLLM 0.33.0", "mask", (None, 0.9), 129_280, 1): 145.0,
    ("vLLM 0.33.0", "mask", (None, 0.9), 129_280, 64): 542.0,
    ("vLLM 0.33.0", "mask", (None, 0.9), 129_280, 1024): 2070.0,
    ("FlashInfer 0.7.4", "mask", (50, 0.9), 129_280, 1): 39.0 + 78.0,
    ("FlashInfer 0.7.4", "mask", (50, 0.9), 129_280, 64): 85.0 + 171.0,
    ("FlashInfer 0.7.4", "mask", (50, 0.9), 129_280, 1024): 963.0 + 1337.0,
    ("FlashInfer 0.7.4", "sample", (50, 0.9), 129_280, 1): 12.0 + 45.0,
    ("FlashInfer 0.7.4", "sample", (50, 0.9), 129_280, 64): 42.0 + 61.0,
    ("FlashInfer 0.7.4", "sample", (50, 0.9), 129_280, 1024): 357.0 + 526.0,
}
"""Microseconds on an H200: (peer, what, limits, vocabulary, batch)."""

Call = Callable[[Tensor], object]


@dataclass(frozen=True)
class Peer:
    """What another library takes for the same work."""

    name: str
    microseconds: float
    measured: bool
    """In this run; else reported for an H200."""


@dataclass(frozen=True)
class Cell:
    """One kernel at one size."""

    what: str
    rows: str
    batch: int
    vocabulary: int
    k: int | None
    p: float | None
    microseconds: float
    host_microseconds: float
    """What the call keeps the host busy for."""
    floor_microseconds: float
    peers: tuple[Peer, ...] = ()
    exact: bool | None = None
    """Whether what stays is what a sort keeps; None where it was not compared."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the memory's speed."""
        return self.floor_microseconds / self.microseconds

    def as_dict(self) -> dict[str, Any]:
        ratios = {peer.name: peer.microseconds / self.microseconds for peer in self.peers}
        return asdict(self) | {"share": self.share, "times_faster": ratios}


class Clock:
    """Times calls on a device: medians, with a cold cache and the host ahead."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device, self._rounds = device, rounds
        self._flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
        self.copy_rate = self._measure_copy()

    def _measure_copy(self) -> float:
        """Bytes a second that a copy reads and writes."""
        source = torch.empty(2 << 30, dtype=torch.uint8, device=self._device).zero_()
        target = torch.empty_like(source)
        seconds = self.seconds([lambda: target.copy_(source)] * self._rounds)[0]
        return 2 * source.nbytes / seconds

    def seconds(self, calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
        """(on the device, on the host): medians over calls, each made once."""
        spans, host = [], []
        for call in calls:
            start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            self._flush.zero_()
            start.record()
            begun = time.perf_counter()
            call()
            host.append(time.perf_counter() - begun)
            end.record()
            spans.append((start, end))
        torch.accelerator.synchronize()
        device = [start.elapsed_time(end) / 1e3 for start, end in spans]
        return statistics.median(device), statistics.median(host)


def make_rows(kind: str, batch: int, vocabulary: int, device: torch.device) -> Tensor:
    """Logits of noise, or with a few likely tokens above it as a language model has them."""
    generator = torch.Generator(device).manual_seed(batch * vocabulary)
    logits = torch.randn(batch, vocabulary, device=device, generator=generator)
    if kind == "peaked":
        likely = torch.randint(vocabulary, (batch, 20), device=device, generator=generator)
        heights = torch.linspace(16, 6, 20, device=device).expand(batch, 20)
        logits.scatter_(1, likely, heights)
    return logits


def limits_of(limits: Limits, batch: int, device: torch.device) -> tuple[Tensor | None, ...]:
    k, p = limits
    return (
        None if k is None else torch.full((batch,), k, dtype=torch.int32, device=device),
        None if p is None else torch.full((batch,), p, device=device),
    )


def copies(logits: Tensor, rounds: int) -> Iterator[Tensor]:
    """Logits for each round, as many of their own as there is room for."""
    own = max(1, min(rounds, MEMORY // logits.nbytes))
    made = [logits.clone() for _ in range(own)]
    for number in range(rounds):
        if number >= own:
            made[number % own].copy_(logits)
        yield made[number % own]


def time_call(clock: Clock, call: Call, logits: Tensor, rounds: int) -> tuple[float, float]:
    for warm_up in copies(logits, 2):
        call(warm_up)
    calls = [lambda own=own: call(own) for own in copies(logits, rounds)]
    return clock.seconds(calls)


def vllm_mask(limits: Limits, batch: int, device: torch.device) -> Call:
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    k, p = limits_of(limits, batch, device)
    return lambda logits: apply_top_k_top_p_triton(logits, k, p)


def flashinfer_mask(limits: Limits, _batch: int, _device: torch.device) -> Call:
    """top_k_mask_logits, and top_p_renorm_probs of probabilities that are there already."""
    from flashinfer import sampling

    k, p = limits

    def mask(logits: Tensor) -> None:
        if k is not None:
            sampling.top_k_mask_logits(logits, k)
        if p is not None:
            sampling.top_p_renorm_probs(logits, p)  # its time does not depend on their sum

    return mask


def flashinfer_sample(limits: Limits, _batch: int, _device: torch.device) -> Call:
    """Softmax, then the joint filter of top_k_top_p_sampling_from_probs."""
    from flashinfer import sampling

    k, p = limits

    def sample(logits: Tensor) -> None:
        probabilities = logits.softmax(-1)
        sampling.top_k_top_p_sampling_from_probs(
            probabilities,
            k or logits.shape[1],
            p or 1.0,
            filter_apply_order="joint",
            seed=7,
            offset=0,
        )

    return sample


PEERS: dict[str, tuple[tuple[str, str, Callable[[Limits, int, torch.device], Call]], ...]] = {
    "mask": (
        ("vLLM 0.33.0", "vllm", vllm_mask),
        ("FlashInfer 0.7.4", "flashinfer", flashinfer_mask),
    ),
    "sample": (("FlashInfer 0.7.4", "flashinfer", flashinfer_sample),),
}


def peers_of(
    what: str, limits: Limits, logits: Tensor, clock: Clock, rounds: int
) -> tuple[Peer, ...]:
    batch, vocabulary = logits.shape
    found: list[Peer] = []
    for name, package, make in PEERS[what]:
        if find_spec(package) is not None:
            call = make(limits, batch, logits.device)
            seconds, _ = time_call(clock, call, logits, rounds)
            found.append(Peer(name, seconds * 1e6, measured=True))
        elif (known := REPORTED.get((name, what, limits, vocabulary, batch))) is not None:
            found.append(Peer(name, known, measured=False))
    return tuple(found)


def is_exact(logits: Tensor, limits: Limits) -> bool:
    """Whether the kernel keeps what the reference keeps, of a few rows.

    exp2 differs in its last bits from machine to machine, so a nucleus may end one token aside.
    """
    few = logits[:16]
    k, p = limits_of(limits, len(few), few.device)
    kept = topk_topp.apply_top_k_top_p(few.clone(), k, p)
    host = [None if limit is None else limit.cpu() for limit in (k, p)]
    expected = topk_topp.apply_top_k_top_p(few.cpu(), *host)
    differing = (kept.cpu().isfinite() != expected.isfinite()).sum(1)
    return int(differing.max()) <= (0 if p is None else 1)


def ours(what: str, limits: Limits, batch: int, device: torch.device) -> Call:
    k, p = limits_of(limits, batch, device)
    if what == "mask":
        return lambda logits: topk_topp.apply_top_k_top_p(logits, k, p)
    numbers = torch.arange(batch, device=device)
    draws = draw_bits(numbers, numbers)
    return lambda logits: topk_topp.sample_top_k_top_p(logits, k, p, draws)


def measure(clock: Clock, options: argparse.Namespace, device: torch.device) -> Iterator[Cell]:
    grid = itertools.product(options.rows, options.vocabularies, options.batches)
    for kind, vocabulary, batch in grid:
        logits = make_rows(kind, batch, vocabulary, device)
        for limits, what in itertools.product(LIMITS, ("mask", "sample")):
            seconds, host = time_call(
                clock, ours(what, limits, batch, device), logits, options.rounds
            )
            moved = logits.nbytes * (2 if what == "mask" else 1)
            times = (seconds * 1e6, host * 1e6, moved / clock.copy_rate * 1e6)
            peers = peers_of(what, limits, logits, clock, options.rounds)
            exact = is_exact(logits, limits) if what == "mask" and options.check else None
            yield Cell(what, kind, batch, vocabulary, *limits, *times, peers, exact)


def shapes_to_try(batch: int, slots: int) -> Iterator[Shape]:
    """Launch shapes for a batch on a device with `slots` multiprocessors."""
    few = [(1, 8, 4096), (1, 16, 8192), (1, 16, 4096), (1, 32, 8192)]
    many = [(2, 8, 4096), (2, 8, 2048), (2, 16, 4096), (1, 16, 8192), (3, 8, 2048), (4, 4, 2048)]
    sizes = few if batch <= slots else many
    for (programs, warps, tile), sample in itertools.product(sizes, (2048, 4096)):
        yield Shape(min(batch, programs * slots), programs, warps, tile, sample=sample)


def sweep(clock: Clock, options: argparse.Namespace, device: torch.device) -> Iterator[Cell]:
    """The same kernel with other launch shapes, to choose `shape_of` by."""
    for batch, vocabulary in itertools.product(options.batches, options.vocabularies):
        logits = make_rows("normal", batch, vocabulary, device)
        [spec] = topk_topp_specs(batch, vocabulary, device)
        scratch = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        floor = 2 * logits.nbytes / clock.copy_rate * 1e6
        shapes = shapes_to_try(batch, multiprocessors(device))
        for shape, limits in itertools.product(shapes, ((50, 0.9), (None, 0.9))):
            call = launch_of(shape, limits, batch, scratch)
            seconds, host = time_call(clock, call, logits, options.rounds)
            size = (batch, vocabulary, *limits)
            times = (seconds * 1e6, host * 1e6, floor)
            yield Cell("mask", "normal", *size, *times, notes=asdict(shape))


def launch_of(shape: Shape, limits: Limits, batch: int, scratch: Tensor) -> Call:
    k, p = limits_of(limits, batch, scratch.device)
    return lambda logits: launch(logits, k, p, None, None, scratch, shape)


def table_of(cells: Sequence[Cell], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("what", "rows", "V", "B", "k", "p", "µs", "host µs", "of floor", "peers", "exact"):
        left = name in ("what", "rows", "peers")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for cell in cells:
        peers = "; ".join(
            f"{peer.name}{'' if peer.measured else '*'} {peer.microseconds:.0f} "
            f"(×{peer.microseconds / cell.microseconds:.1f})"
            for peer in cell.peers
        )
        notes = " ".join(f"{name}={value}" for name, value in cell.notes.items())
        limits = [str(value) if value is not None else "" for value in (cell.k, cell.p)]
        exact = {True: "yes", False: "NO", None: ""}[cell.exact]
        sizes = [f"{cell.vocabulary:,}", str(cell.batch), *limits]
        times = [f"{cell.microseconds:.1f}", f"{cell.host_microseconds:.0f}", f"{cell.share:.2f}"]
        table.add_row(cell.what, cell.rows, *sizes, *times, peers or notes, exact)
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", help="platform name (default: what is detected)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--rows", nargs="+", default=["normal"], choices=["normal", "peaked"])
    parser.add_argument("--no-check", dest="check", action="store_false", help="skip `exact`")
    parser.add_argument("--sweep", action="store_true", help="time launch shapes instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the cells here")
    return parser.parse_args()


def main() -> int:
    options = parse()
    platform = hal.detect(options.platform, require_accelerator=True)
    device = torch_device(platform, 0)
    workspace = WorkspaceManager(device)
    reserve_topk_topp(
        workspace, vocabulary=max(options.vocabularies), max_num_seqs=max(options.batches)
    )
    workspace.lock()
    clock = Clock(device, options.rounds)
    cells = list((sweep if options.sweep else measure)(clock, options, device))
    title = (
        f"kernels on {platform.capabilities.device_name}, copy {clock.copy_rate / 1e12:.2f} TB/s"
    )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table_of(cells, f"{title}; * reported, not measured"))
    if options.json:
        report = {
            "schema_version": SCHEMA_VERSION,
            "bench": "kernels",
            "environment": environment(platform),
            "copy_bytes_per_second": clock.copy_rate,
            "cells": [cell.as_dict() for cell in cells],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if any(cell.exact is False for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
