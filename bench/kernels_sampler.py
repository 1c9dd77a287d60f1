"""The sampler: masks, and sampling in one call, beside vLLM's kernel and FlashInfer's."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from kernel_cells import Cell, Clock, Peer, measured_peer
from torch import Tensor

from hal.core.kernels import topk_topp
from hal.core.kernels.launching import multiprocessors
from hal.core.kernels.topk_topp import draw_bits, topk_topp_specs
from hal.core.kernels.topk_topp_launch import Shape, launch

KERNEL = "sampler"
Limits = tuple[int | None, float | None]
LIMITS: tuple[Limits, ...] = ((50, 0.9), (50, None), (None, 0.9), (2048, 0.95))
MEMORY = 24 << 30
"""Bytes of logits that a cell may take, so that each call has its own."""
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
            call = functools.partial(make, limits, batch, logits.device)
            found.append(
                measured_peer(name, lambda call=call: time_call(clock, call(), logits, rounds)[0])
            )
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
            peers = peers_of(what, limits, logits, clock, options.rounds)
            exact = is_exact(logits, limits) if what == "mask" and options.check else None
            sizes = {"rows": kind} | sizes_of(limits, logits)
            times = (seconds * 1e6, host * 1e6, moved, clock.copy_rate)
            yield Cell(KERNEL, what, sizes, *times, peers, exact)


def sizes_of(limits: Limits, logits: Tensor) -> dict[str, Any]:
    return {"B": len(logits), "V": logits.shape[1], "k": limits[0], "p": limits[1]}


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
        shapes = shapes_to_try(batch, multiprocessors(device))
        for shape, limits in itertools.product(shapes, ((50, 0.9), (None, 0.9))):
            call = launch_of(shape, limits, batch, scratch)
            seconds, host = time_call(clock, call, logits, options.rounds)
            times = (seconds * 1e6, host * 1e6, 2 * logits.nbytes, clock.copy_rate)
            yield Cell(KERNEL, "mask", sizes_of(limits, logits), *times, notes=asdict(shape))


def launch_of(shape: Shape, limits: Limits, batch: int, scratch: Tensor) -> Call:
    k, p = limits_of(limits, batch, scratch.device)
    return lambda logits: launch(logits, k, p, None, None, scratch, shape)
