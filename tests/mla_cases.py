"""Paged latent caches for the tests of MLA decode, with traps beyond each request's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WIDTH, LATENT = 576, 512
SCALE = 0.07


@dataclass(frozen=True)
class MlaCase:
    """The arguments of a call; a table's entries beyond the length are wild, and the numbers
    beyond it on its last page NaN.
    """

    query: Tensor
    cache: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.cache, self.table, self.lengths

    def without_traps(self) -> MlaCase:
        """The same, with numbers beyond the lengths: for kernels that multiply them by 0."""
        return replace(self, cache=self.cache.nan_to_num(0.5))

    def to(self, device: torch.device | str) -> MlaCase:
        return MlaCase(*(tensor.to(device) for tensor in self.arguments))

    def context(self, row: int) -> Tensor:
        """A request's tokens, float64 [length, 576]."""
        length, page = int(self.lengths[row]), self.cache.shape[1]
        pages = self.table[row, : -(-length // page)].long()
        return self.cache[pages].flatten(0, 1)[:length].double()

    def shard(self, pages: slice) -> MlaCase:
        """The requests as a rank sees them that holds these columns of the table."""
        page = self.cache.shape[1]
        start, stop = pages.start * page, pages.stop * page
        own = (self.lengths.clamp(max=stop) - start).clamp_min(0)
        return replace(self, table=self.table[:, pages].contiguous(), lengths=own)


def mla_case(
    lengths: Sequence[int],
    *,
    heads: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> MlaCase:
    """Random queries and pages in random order, on the host."""
    generator, host = torch.Generator("cpu").manual_seed(seed), torch.device("cpu")
    counts = [-(-length // page) for length in lengths]
    pages = sum(counts) + 2
    cache = torch.randn(pages, page, WIDTH, generator=generator, device=host).to(dtype)
    query = torch.randn(len(lengths), heads, WIDTH, generator=generator, device=host).to(dtype)
    table = torch.full((len(lengths), max(1, *counts)), 1 << 30, dtype=torch.int32, device=host)
    order = torch.randperm(pages, generator=generator, device=host).int().split([*counts, 2])
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = order[row]
        if length % page:
            cache[table[row, count - 1], length % page :] = torch.nan
    return MlaCase(query, cache, table, torch.tensor(lengths, dtype=torch.int32, device=host))


def dense(case: MlaCase, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    """Attention in float64 without pages, and its log-sum-exp in base e."""
    outputs, logs = [], []
    for row, query in enumerate(case.query.double()):
        context = case.context(row)
        scores = query @ context.T * scale
        outputs.append(scores.softmax(1) @ context[:, :LATENT])
        logs.append(scores.logsumexp(1))
    return torch.stack(outputs), torch.stack(logs)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest expected number."""
    difference = (found.double().cpu() - expected.double().cpu()).abs().max()
    return float(difference / expected.abs().max().clamp_min(1e-9))
