"""A few decode steps of one MLA layer, over state that KV initialisation made: for tests that
replay them from a graph, or call them, before and after a sleep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.core import SleepManager
from hal.core.kernels.mla_decode import mla_decode, reserve_mla_decode
from hal.core.workspace import WorkspaceManager

PAGE, WIDTH, LATENT, SCALE = 16, 576, 512, 0.05


class DecodeSteps:
    """Every step writes a token a request into the cache and attends to all of them.

    Each reads block tables, writes a slot mapping and advances lengths on the device: what a graph
    of several steps holds the addresses of.
    """

    def __init__(
        self,
        sleeper: SleepManager,
        device: torch.device | str,
        *,
        lengths: tuple[int, ...] = (14, 1, 33),
        heads: int = 4,
        steps: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rows, pages = len(lengths), -(-(max(lengths) + steps) // PAGE)
        self.steps, self._lengths = steps, lengths
        with torch.device(device), sleeper.kv_init(strict=True) as kv:
            self.tables = (
                torch.arange(rows * pages, dtype=torch.int32).view(pages, rows).T.contiguous()
            )
            self.lengths = torch.zeros(rows, dtype=torch.int32)
            self.slots = torch.zeros(rows, dtype=torch.int64)
            self.hidden = torch.zeros(rows, heads, WIDTH, dtype=dtype)
            with kv.cache():
                cache = torch.zeros(rows * pages, PAGE, WIDTH, dtype=dtype)
            self.cache = kv.declare(cache)
            self.outputs = torch.zeros(steps, rows, heads, LATENT, dtype=dtype)
        self.workspace = WorkspaceManager.of(sleeper)
        limits = {"heads": heads, "rows": rows, "max_tokens": pages * PAGE}
        reserve_mla_decode(self.workspace, dtype=dtype, **limits)
        self.workspace.lock()

    def state(self) -> dict[str, Tensor]:
        """What has to be where it was after a wake, by name."""
        names = ("tables", "lengths", "slots", "hidden", "cache", "outputs")
        return {name: getattr(self, name) for name in names}

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.state().items()}

    def begin(self) -> None:
        """Put the requests back to their first step."""
        self.fill_cache()
        self.lengths.copy_(torch.tensor(self._lengths, dtype=torch.int32))
        self.hidden.copy_(_pattern(self.hidden))

    def fill_cache(self) -> None:
        """The context again, as a prefill would write it."""
        self.cache.copy_(_pattern(self.cache))

    def __call__(self) -> Tensor:
        """All steps; returns their outputs [steps, rows, heads, 512], written in place."""
        for step in range(self.steps):
            page = self.tables.gather(1, (self.lengths // PAGE).long().unsqueeze(1)).squeeze(1)
            self.slots.copy_(page * PAGE + self.lengths % PAGE)
            self.cache.view(-1, WIDTH).index_copy_(0, self.slots, self.hidden[:, 0])
            self.lengths.add_(1)
            mla_decode(
                self.hidden,
                self.cache,
                self.tables,
                self.lengths,
                scale=SCALE,
                workspace=self.workspace,
                out=self.outputs[step],
            )
            self.hidden[..., :LATENT].copy_(self.outputs[step])
        return self.outputs


def _pattern(like: Tensor) -> Tensor:
    numbers = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return (numbers * 0.7310585).sin().view(like.shape).to(like.dtype)
