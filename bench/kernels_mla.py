"""MLA decode: the Triton kernel beside FlashInfer's back ends; the floor is one read of the KV."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from kernel_cells import Cell, Clock, Peer, measured_peer
from torch import Tensor

from hal.core.kernels.mla_decode import LATENT, ROPE, mla_decode
from hal.core.kernels.mla_decode_flashinfer import PlannedMla
from hal.core.kernels.mla_decode_triton import Shape, launch, part_specs
from hal.core.workspace import WorkspaceManager

KERNEL = "MLA decode"
SCALE = 1 / math.sqrt(128 + 64)
BACKENDS = ("fa3", "fa2")
REPORTED: dict[tuple[str, int, int], float] = {
    ("fa3", 1, 32_768): 44.0,
    ("fa2", 1, 32_768): 63.0,
    ("fa3", 16, 32_768): 262.0,
    ("fa2", 16, 32_768): 554.0,
    ("fa3", 64, 8192): 258.0,
    ("fa2", 64, 8192): 556.0,
}
"""Microseconds of FlashInfer 0.7.4 on an H200: (back end, batch, KV) at 128 heads, pages of 64."""
Call = Callable[[], object]


class Context:
    """A batch of requests of one length, their pages in random order."""

    def __init__(
        self, batch: int, length: int, heads: int, page: int, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(batch * length)
        pages = -(-length // page)
        numbers = torch.randperm(batch * pages, generator=generator, device=device)
        self.table = numbers.to(torch.int32).view(batch, pages)
        self.cache = torch.empty(
            batch * pages, page, LATENT + ROPE, dtype=torch.bfloat16, device=device
        ).normal_(generator=generator)
        self.query = torch.randn(
            batch, heads, LATENT + ROPE, device=device, generator=generator
        ).to(torch.bfloat16)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.out = self.query.new_empty(batch, heads, LATENT)
        self.read_bytes = batch * length * (LATENT + ROPE) * self.cache.itemsize
        self.operations = 2 * batch * length * heads * (2 * LATENT + ROPE)

    def call(self, backend: str, rows: int | None = None) -> Tensor:
        """The first `rows` requests."""
        return mla_decode(
            self.query[:rows],
            self.cache,
            self.table[:rows],
            self.lengths[:rows],
            scale=SCALE,
            out=self.out[:rows],
            backend=backend,
        )


def contexts(
    options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[Context, dict[str, Any]]]:
    grid = itertools.product(options.heads, options.pages, options.mla_batches, options.lengths)
    for heads, page, batch, length in grid:
        sizes = {"B": batch, "KV": length, "heads": heads, "page": page}
        yield Context(batch, length, heads, page, device), sizes


def measure(clock: Clock, options: argparse.Namespace, device: torch.device) -> Iterator[Cell]:
    for context, sizes in contexts(options, device):
        seconds, host = time_call(clock, lambda own=context: own.call("triton"), options.rounds)
        exact = is_close(context) if options.check else None
        peers = tuple(peers_of(clock, context, sizes, options.rounds))
        times = (seconds * 1e6, host * 1e6, context.read_bytes, clock.copy_rate)
        notes = {"tflops": round(context.operations / seconds / 1e12, 1)}
        yield Cell(KERNEL, "triton", sizes, *times, peers, exact, notes)


def time_call(clock: Clock, call: Call, rounds: int) -> tuple[float, float]:
    for _ in range(2):
        call()
    return clock.seconds([call] * rounds)


def is_close(context: Context) -> bool:
    """Whether a few rows are what plain torch gives in float32, within what bfloat16 holds."""
    rows = min(2, len(context.query))
    found = context.call("triton").float()[:rows].clone()
    expected = context.call("torch", rows).float()
    return float((found - expected).abs().max() / expected.abs().max()) < 1e-2


def peers_of(clock: Clock, context: Context, sizes: dict[str, Any], rounds: int) -> Iterator[Peer]:
    """FlashInfer's run alone, without its plan, which an engine makes once a step."""
    for backend in BACKENDS:
        if find_spec("flashinfer") is not None:
            yield measured_peer(
                f"FlashInfer {backend}",
                lambda name=backend: time_call(clock, planned_call(context, name), rounds)[0],
            )
        elif sizes["heads"] == 128 and sizes["page"] == 64:
            known = REPORTED.get((backend, sizes["B"], sizes["KV"]))
            if known is not None:
                yield Peer(f"FlashInfer {backend}", known, measured=False)


def planned_call(context: Context, backend: str) -> Call:
    planned = PlannedMla(
        WorkspaceManager(context.query.device),
        heads=context.query.shape[1],
        page_size=context.cache.shape[1],
        batch=len(context.query),
        max_pages=context.table.numel(),
        scale=SCALE,
        backend=backend,
    )
    planned.plan(context.table, context.lengths)
    return lambda: planned.run(context.query, context.cache, out=context.out)


def shapes_to_try(heads: int) -> tuple[Shape, ...]:
    if heads > 32:
        sizes = [(64, 64, 1, 8, 2), (64, 32, 1, 8, 3), (64, 32, 1, 8, 4)]
        sizes += [(64, 32, 1, 8, 3, True), (64, 32, 1, 8, 2, True), (32, 64, 1, 8, 2)]
    else:
        sizes = [(16, 32, 2, 4, 3), (16, 64, 2, 4, 2), (16, 32, 1, 4, 4), (16, 64, 1, 8, 3)]
        sizes += [(16, 32, 2, 8, 3), (16, 16, 3, 4, 4)]
    return tuple(Shape(*size) for size in sizes)  # type: ignore[arg-type]


def sweep(clock: Clock, options: argparse.Namespace, device: torch.device) -> Iterator[Cell]:
    """The same kernel with other launch shapes, to choose `shape_of` by."""
    for context, sizes in contexts(options, device):
        for shape in shapes_to_try(sizes["heads"]):
            try:
                call = launch_of(shape, context)
                seconds, host = time_call(clock, call, options.rounds)
            except Exception as problem:  # noqa: BLE001 - a shape that the device cannot hold
                print(f"{shape}: {type(problem).__name__}: {problem}", flush=True)
                continue
            times = (seconds * 1e6, host * 1e6, context.read_bytes, clock.copy_rate)
            yield Cell(KERNEL, "triton", sizes, *times, notes=asdict(shape))


def launch_of(shape: Shape, context: Context) -> Call:
    specs = part_specs(context.query.shape[1], LATENT, context.query.device, shape)
    parts = [
        torch.empty(spec.shape, dtype=spec.dtype, device=context.query.device) for spec in specs
    ]
    arguments = context.query, context.cache, context.table, context.lengths, SCALE
    return lambda: launch(*arguments, context.out, None, 1.0, *parts, shape)
