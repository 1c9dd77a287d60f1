"""MLA decode with FlashInfer's paged wrapper, its memory where a sleep can handle it.

The wrapper's float workspace is scratch: any bytes before a plan, between plan and run, and after.
Its plan is not: `plan()` puts it on the device, and a launch whose plan's bytes are lost does
nothing, without an error, and leaves its output as it was, also from a captured graph. So the plan
and the page numbers that it reads lie in the `runtime` tag, and are written again in each wake.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal.core.kernels.flashinfer_backends import choose, workspace_bytes
from hal.core.kernels.lse import LogBase
from hal.core.tags import RUNTIME, WORKSPACE
from hal.core.workspace import TensorSpec, WorkspaceManager
from hal.core.workspace.checked import plain
from hal.errors import InvalidArgument, StateError

if TYPE_CHECKING:
    from hal.core.kernels.mla_decode import Call
    from hal.core.sleep import SleepManager

LATENT, ROPE = 512, 64
OWNER = "mla_decode"
_LSE_MODES = {None: "none", LogBase.TWO: "base2", LogBase.E: "basee"}


@dataclass(frozen=True)
class Pages:
    """The context of a batch in the wrapper's form, on the host."""

    query_starts: Tensor
    """int32 [B + 1]: one query token a request."""
    page_starts: Tensor
    """int32 [B + 1]: where each request's page numbers begin."""
    numbers: Tensor
    lengths: Tensor
    """int32 [B], in tokens."""

    @classmethod
    def of(cls, block_table: Tensor, seq_lens: Tensor, page_size: int) -> Pages:
        """From a block table [B, max_pages] and lengths [B]; waits for the device they are on."""
        table, lengths = block_table.cpu(), seq_lens.cpu().clamp_min(0)
        counts = (lengths + page_size - 1) // page_size
        used = torch.arange(table.shape[1], device="cpu") < counts.unsqueeze(1)
        queries = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cpu")
        starts = torch.zeros_like(queries)
        starts[1:] = counts.cumsum(0)
        return cls(queries, starts, table[used], lengths)


@dataclass(frozen=True)
class Attention:
    """What a wrapper is planned for, but for the context."""

    heads: int
    page_size: int
    scale: float
    dtype: torch.dtype
    lse_base: LogBase | None

    def plan(self, wrapper: Any, pages: Pages) -> None:
        """Schedule on the host and copy the schedule to the device; never under a capture."""
        from flashinfer.mla import MLAPlanMetadata

        with torch.device("cpu"):  # it pins host memory without naming the host: not the caller's
            wrapper.plan(
                metadata=MLAPlanMetadata.csr(
                    pages.query_starts, pages.page_starts, pages.numbers, pages.lengths
                ),
                num_heads=self.heads,
                head_dim_ckv=LATENT,
                head_dim_kpe=ROPE,
                page_size=self.page_size,
                causal=False,
                sm_scale=self.scale,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
                lse_mode=_LSE_MODES[self.lse_base],
            )

    def run(
        self, wrapper: Any, query: Tensor, kv_cache: Tensor, out: Tensor, empty: Tensor
    ) -> Tensor | None:
        """Fill `out` and return the log-sum-exp, if it is planned; `empty`: bool [B]."""
        lse = None
        options: dict[str, Any] = {}
        if self.lse_base is not None:
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
            base_e = self.lse_base is LogBase.E
            options = {"lse": lse, "return_lse": True, "return_lse_base_on_e": base_e}
        wrapper.run(query=query, kv_cache=kv_cache, out=out, **options)
        out.masked_fill_(empty[:, None, None], 0.0)
        return lse.masked_fill_(empty[:, None], -torch.inf) if lse is not None else None


def run_once(call: Call, backend: str) -> None:
    """Plan and run one call: what `mla_decode` does for a back end of FlashInfer."""
    device = call.query.device
    name = choose(backend, device)
    batch, heads, _ = call.query.shape
    size = workspace_bytes(name, heads=heads, rows=batch, device=device)
    [scratch] = call.scratch(TensorSpec((size,), torch.uint8))
    page_size = call.cache.shape[1]
    base = call.base if call.lse is not None else None
    attention = Attention(heads, page_size, call.scale, call.query.dtype, base)
    wrapper = _wrapper()(plain(scratch), backend=name)
    attention.plan(wrapper, Pages.of(call.table, call.lengths, page_size))
    out = call.out if call.out.is_contiguous() else torch.empty_like(call.out)
    lse = attention.run(wrapper, call.query, call.cache, out, call.lengths <= 0)
    if out is not call.out:
        call.out.copy_(out)
    if call.lse is not None and lse is not None:
        call.lse.copy_(lse)


class PlannedMla:
    """MLA decode of batches of one size: planned once a step, run once a layer, and captured.

    Everything that a captured graph reads keeps its address: the plan and the page numbers in the
    `runtime` tag of `sleeper`, the scratch in the workspace, which has to be locked before a
    capture. Both are right again after each wake, without a call. `debug` compares the plan on the
    device with what was planned at each run, and so waits for the device.
    """

    def __init__(
        self,
        workspace: WorkspaceManager,
        *,
        heads: int,
        page_size: int,
        batch: int,
        max_pages: int,
        scale: float,
        dtype: torch.dtype = torch.bfloat16,
        lse_base: LogBase | None = None,
        backend: str = "flashinfer",
        sleeper: SleepManager | None = None,
        debug: bool = False,
    ) -> None:
        """`max_pages`: of the whole batch. Raises `Unsupported`, `WorkspaceTooSmall`."""
        device = workspace.device
        self.backend = choose(backend, device)
        self.batch, self.max_pages = batch, max_pages
        self._workspace, self._sleeper, self._debug = workspace, sleeper, debug
        self._attention = Attention(heads, page_size, scale, dtype, lse_base)
        size = workspace_bytes(self.backend, heads=heads, rows=batch, device=device)
        self._scratch_spec = TensorSpec((size,), torch.uint8)
        workspace.reserve(OWNER, self._scratch_spec)
        with self._place():
            names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
            sizes = (batch + 1, batch + 1, max_pages, batch)
            self._metadata = {
                name: torch.zeros(size, dtype=torch.int32, device=device)
                for name, size in zip(names, sizes, strict=True)
            }
            self._empty = torch.zeros(batch, dtype=torch.bool, device=device)
            # True: for graphs, so that later plans go into the same memory.
            self._wrapper = _wrapper()(
                plain(self._take()), True, backend=self.backend, **self._metadata
            )
            self._pages = _first_pages(batch)
            self._write()  # the first plan takes the plan's memory
        self._follow_wakes()

    def plan(self, block_table: Tensor, seq_lens: Tensor) -> None:
        """Plan a step: block_table int32 [batch, max_pages], seq_lens int32 [batch], best on the
        host, since planning waits for a device that they are on.
        """
        if len(seq_lens) != self.batch or len(block_table) != self.batch:
            raise InvalidArgument(
                f"{len(seq_lens)} requests are planned with a wrapper for {self.batch}; make one "
                "for each batch size, or pad with lengths of 0"
            )
        pages = Pages.of(block_table, seq_lens, self._attention.page_size)
        if len(pages.numbers) > self.max_pages:
            raise InvalidArgument(
                f"{len(pages.numbers)} pages are planned and max_pages is {self.max_pages}; make "
                "the wrapper with more"
            )
        self._pages = pages
        self._write()

    def run(
        self, query: Tensor, kv_cache: Tensor, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Output [batch, H, 512] and log-sum-exp float32 [batch, H] in the planned base, or None.

        query: [batch, H, 576]; kv_cache: [pages, page, 576]. Requests without a token give 0 and
        -inf. Raises `StateError` for a plan that is older than the last wake.
        """
        if self._planned_at != self._wakes():
            raise StateError("the MLA plan is older than the last wake; call plan() again")
        if self._debug:
            self.check_plan()
        if out is None:
            out = query.new_empty(*query.shape[:2], LATENT)
        _retarget(self._wrapper, plain(self._take()))
        return out, self._attention.run(self._wrapper, query, kv_cache, out, self._empty)

    def check_plan(self) -> None:
        """Raise `StateError` unless the plan on the device is what was planned (with `debug`)."""
        if self._debug and not torch.equal(self.plan_memory.cpu(), self._planned_bytes):
            raise StateError(
                "the MLA plan lost its bytes: a launch would write nothing and say nothing; keep "
                "its tag's contents over a sleep, or call plan() again"
            )

    @property
    def plan_memory(self) -> Tensor:
        """The memory of the plan on the device, uint8: found where FlashInfer keeps it."""
        found: Tensor = self._wrapper._planned_backend._int_workspace_buffer  # noqa: SLF001
        return found

    def memory(self) -> list[Tensor]:
        """What has to keep its address and its bytes: plan, page numbers, lengths."""
        return [self.plan_memory, self._empty, *self._metadata.values()]

    # -- the plan

    def _place(self) -> AbstractContextManager[object]:
        return self._sleeper.pool(RUNTIME) if self._sleeper is not None else nullcontext()

    def _take(self) -> Tensor:
        [scratch] = self._workspace.get_simultaneous(self._scratch_spec, owner=OWNER)
        return scratch

    def _write(self) -> None:
        self._attention.plan(self._wrapper, self._pages)
        self._empty.copy_(self._pages.lengths == 0)
        self._planned_at = self._wakes()
        if self._debug:
            self._planned_bytes = self.plan_memory.to("cpu", copy=True)

    def _wakes(self) -> int:
        counted = self._workspace if self._sleeper is None else self._sleeper
        return counted.wake_count

    def _follow_wakes(self) -> None:
        """Hooks outlive what registers them, so they hold no more than a weak reference."""
        own = weakref.ref(self)

        def find() -> list[Tensor]:
            planned = own()
            return planned.memory() if planned is not None else []

        if self._sleeper is None:
            self._workspace.adopt("FlashInfer's MLA plan", find, on_wake=_weakly(own))
        else:
            self._workspace.adopt("FlashInfer's MLA plan", find)
            self._sleeper.after_wake(_weakly(own), name="FlashInfer's MLA plan")

    def _woke(self) -> None:
        """Plan again what was planned; where its tags still sleep, a later wake does."""
        asleep = self._sleeper.sleeping_tags if self._sleeper is not None else frozenset()
        if not asleep & {RUNTIME, WORKSPACE}:
            self._write()


def _weakly(own: weakref.ref[PlannedMla]) -> Callable[[], None]:
    def woke() -> None:
        planned = own()
        if planned is not None:
            planned._woke()  # noqa: SLF001 - its own hook

    return woke


def _first_pages(batch: int) -> Pages:
    """A plan of one token a request, on page 0."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    zeros = torch.zeros_like(starts[1:])
    return Pages(starts, starts.clone(), zeros, torch.ones_like(zeros))


def _retarget(wrapper: Any, scratch: Tensor) -> None:
    """Make the wrapper use this scratch from now on; it keeps the tensor in two places."""
    for holder in (wrapper, wrapper._planned_backend):  # noqa: SLF001 - it has no public way
        holder._float_workspace_buffer = scratch  # noqa: SLF001


def _wrapper() -> Any:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper
