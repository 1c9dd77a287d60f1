"""The reference engine: a small continuous-batching server that knows each tensor's name and tag.

It does what engines do around a sleep: weights with buffers that no checkpoint has, a paged KV
cache behind a prefix index, block tables and sampler state made at KV-init, scratch in the
workspace, requests that queue while memory is asleep. All shapes are fixed, so equal requests
submitted in equal order give equal bits.

A decode step runs on the smallest of a few batch sizes that holds the rows in use: operator by
operator, or replayed from graphs that were captured when the engine was made.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hal.core.kv_init import KVInitScope, Nesting
from hal.core.sleep import SleepManager
from hal.core.tags import CUDAGRAPH
from hal.core.verify.blocks import BlockPool, Lease
from hal.core.verify.compute import Compute, logprob_bits
from hal.core.verify.graphs import GraphRunner
from hal.core.verify.model import Batch, Transformer
from hal.core.verify.requests import Completion, Request
from hal.core.verify.state import EngineConfig, RuntimeState, Workspace, make_pages, named_tensors
from hal.errors import StateError
from hal.pools import torch_device

Execution = Literal["eager", "graphs"]
"""How decode steps run: operator by operator, or replayed from captured graphs."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Registered:
    """A tensor and the tag that its memory must carry; None: ordinary memory, never asleep."""

    tensor: Tensor
    tag: str | None


@dataclass
class _Running:
    """A request that holds a row and blocks."""

    request: Request
    row: int
    lease: Lease
    tokens: list[int] = field(default_factory=list)
    logprob_bits: list[int] = field(default_factory=list)
    prompt_logprob_bits: tuple[int, ...] = ()

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.request.output_tokens

    def append(self, token: int, logprob_bits: int) -> None:
        self.tokens.append(token)
        self.logprob_bits.append(logprob_bits)

    def completion(self) -> Completion:
        bits = tuple(self.logprob_bits)
        return Completion(self.request.id, tuple(self.tokens), bits, self.prompt_logprob_bits)


class ReferenceEngine:
    """Serves requests on `sleeper`'s device with all of its memory in `sleeper`'s pools.

    `submit` queues; `step` serves, and raises `AsleepError` or `DirtyError` when memory that
    it needs is asleep or was discarded and not loaded again.
    """

    def __init__(
        self,
        sleeper: SleepManager,
        config: EngineConfig | None = None,
        *,
        nesting: Nesting = "auto",
        execution: Execution = "eager",
    ) -> None:
        self.sleeper, self.config = sleeper, config or EngineConfig()
        self.nesting, self.execution = nesting, execution
        self.device = torch_device(sleeper.platform, sleeper.device_index)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._free_rows = list(range(self.config.rows))
        self._blocks = BlockPool(self.config.usable_blocks, self.config.block_size)
        self._allocate()
        self._connect()

    # -- memory

    def _allocate(self) -> None:
        with self.sleeper.pool("weights"), self.device:
            self.model = Transformer(self.config.model)
        self.model.load(self.config.seed)
        with self.sleeper.kv_init(nesting=self.nesting) as kv:
            self._initialise_kv(kv)
        self.kv_findings = kv.findings
        # Where nesting would put the cache into the runtime pool, its surroundings stay outside.
        self._runtime_tag = None if kv.strategy == "fallback" else "runtime"
        with self.sleeper.pool("workspace"):
            self.workspace = Workspace.build(self.config, self.device)
        self._compute = Compute.over(
            self.config, self.model, self.pages, self.runtime, self.workspace
        )
        self._graphs = self._capture() if self.execution == "graphs" else None

    def _initialise_kv(self, kv: KVInitScope) -> None:
        """The cache's pages in its own pool, and everything else outside that scope."""
        with kv.cache():
            self.pages = make_pages(self.config, self.device)
        kv.declare(self.pages)
        self.runtime = RuntimeState.build(self.config, self.device)

    @torch.inference_mode()
    def _capture(self) -> GraphRunner:
        """The decode step as graphs; no row is active yet, so that the warm-up changes nothing."""
        sizes = self.config.decode_sizes
        return GraphRunner(self._compute.decode, sizes, self.sleeper, self.device)

    def registered(self) -> dict[str, Registered]:
        """Every tensor of the engine by name, with the tag that it must have."""
        weights = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        groups: tuple[tuple[str, str | None, dict[str, Tensor]], ...] = (
            ("model", "weights", weights),
            ("pages", "kv_cache", {str(index): pages for index, pages in enumerate(self.pages)}),
            ("runtime", self._runtime_tag, named_tensors(self.runtime)),
            ("workspace", "workspace", named_tensors(self.workspace)),
            ("graphs", CUDAGRAPH, self._graphs.outputs() if self._graphs else {}),
        )
        return {
            f"{group}.{name}": Registered(tensor, tag)
            for group, tag, tensors in groups
            for name, tensor in tensors.items()
        }

    # -- sleep and wake

    def _connect(self) -> None:
        """Tell the manager what no checkpoint brings back, and what follows from an empty cache."""
        self.sleeper.track(self.model, prefix="model.")
        self.sleeper.preserve(self.model.buffers())
        self.sleeper.after_wake(self.restart, name="restart on an empty KV cache", tag="kv_cache")
        tags = {entry.tag for entry in self.registered().values()}
        self._needs = sorted(tag for tag in tags if tag is not None)

    def restart(self) -> None:
        """Trust no block any more, and queue what was running again, in its order."""
        for running in reversed(tuple(self._running.values())):
            self._release(running)
            self._waiting.appendleft(running.request)
        self._blocks.forget()

    def reload_weights(self) -> None:
        """Load the checkpoint again, in place, after the weights were discarded."""
        self.model.load(self.config.seed)
        self.sleeper.mark_loaded("weights")

    def close(self) -> None:
        """Drop every tensor, awake or asleep; the engine cannot serve any more."""
        del self._graphs, self._compute  # graphs go before the memory that they were captured in
        del self.model, self.pages, self.runtime, self.workspace

    # -- serving

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def cached_blocks(self) -> int:
        """Blocks that the prefix index would read without writing them first."""
        return self._blocks.cached_blocks

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue all of these requests or none, whether memory is awake or not.

        Raises `StateError` for one that cannot fit, and `AsleepError` with `reject_while_asleep`.
        """
        arrived = tuple(requests)
        for request in arrived:
            self._check("prompt", request.id, len(request.prompt), self.config.prompt_tokens)
            self._check("output", request.id, request.output_tokens, self.config.output_tokens)
        if self.config.reject_while_asleep:
            self.sleeper.require_awake(*self._needs)
        self._waiting.extend(arrived)

    def _check(self, what: str, request: int, tokens: int, most: int) -> None:
        if not 1 <= tokens <= most:
            raise StateError(
                f"request {request} has {tokens} {what} tokens; this engine takes 1 to {most}"
            )

    @torch.inference_mode()
    def step(self) -> tuple[Completion, ...]:
        """Admit what waits, give each running request a token, and return what is finished."""
        self.sleeper.require_awake(*self._needs)
        if admitted := self._admit():
            self._prefill(admitted)
        finished = self._take_finished()
        if self._running:
            self._decode()
        return finished + self._take_finished()

    def _admit(self) -> list[_Running]:
        """A full prefill batch, or all that waits if that is less; nothing while rows are short."""
        count = min(len(self._waiting), self.config.prefill_rows)
        if count > len(self._free_rows):
            return []
        return [self._start(self._waiting.popleft()) for _ in range(count)]

    def _start(self, request: Request) -> _Running:
        lease = self._blocks.lease(request.prompt, len(request.prompt) + request.output_tokens)
        running = _Running(request, heapq.heappop(self._free_rows), lease)
        self._running[running.row] = running
        return running

    def _take_finished(self) -> tuple[Completion, ...]:
        finished = [running for running in self._running.values() if running.finished]
        for running in finished:
            self._release(running)
        return tuple(running.completion() for running in finished)

    def _release(self, running: _Running) -> None:
        del self._running[running.row]
        heapq.heappush(self._free_rows, running.row)
        self._blocks.give_back(running.lease.blocks)

    # -- prefill: P rows of Q prompt tokens, the missing ones padding

    def _prefill(self, admitted: Sequence[_Running]) -> None:
        rows = self._write_rows(admitted)
        logits = self._compute.forward(self._prefill_batch(rows, admitted))
        self._take_prompt_logprobs(admitted, logits)
        ends = [len(running.request.prompt) - 1 for running in admitted]
        width = self.config.prompt_tokens
        last = [index * width + end for index, end in enumerate(ends)]
        last_logits = logits[self._tensor(_padded(last, self.config.prefill_rows, 0))]
        sampled = self._compute.sampled(last_logits, rows)
        count = len(admitted)
        self.runtime.last_tokens[rows[:count]] = sampled[0, :count]
        self.runtime.steps[rows[:count]] = 1
        self._append(dict(enumerate(admitted)), sampled)

    def _write_rows(self, admitted: Sequence[_Running]) -> Tensor:
        """Set the rows' runtime state; returns their numbers, int64 [P], padded with the first."""
        state, requests = self.runtime, [running.request for running in admitted]
        rows = self._tensor([running.row for running in admitted])
        tables = [_padded(each.lease.blocks, self.config.request_blocks, 0) for each in admitted]
        columns: tuple[tuple[Tensor, Sequence[object]], ...] = (
            (state.block_tables, tables),
            (state.lengths, [len(request.prompt) for request in requests]),
            (state.seeds, [request.seed for request in requests]),
            (state.steps, [0] * len(requests)),
            (state.temperature, [request.temperature for request in requests]),
            (state.top_k, [request.top_k for request in requests]),
            (state.top_p, [request.top_p for request in requests]),
        )
        for column, values in columns:
            column[rows] = torch.tensor(values, dtype=column.dtype, device=self.device)
        missing = self.config.prefill_rows - len(admitted)
        return torch.cat((rows, rows[:1].expand(missing)))

    def _prefill_batch(self, rows: Tensor, admitted: Sequence[_Running]) -> Batch:
        state, count = self.runtime, self.config.prefill_rows
        width = self.config.prompt_tokens
        prompts = [_padded(running.request.prompt, width, 0) for running in admitted]
        state.prefill_tokens.copy_(self._tensor(_padded(prompts, count, [0] * width)))
        fresh = [self._fresh_positions(running) for running in admitted]
        written = self._tensor(_padded(fresh, count, [False] * width))
        positions = state.prompt_offsets.expand(count, width)
        padding = state.padding_slots[: count * width].view(count, width)
        slots = self._compute.slots(state.block_tables[rows], positions)
        torch.where(written, slots, padding, out=state.prefill_slots)
        return self._compute.batch(state.prefill_tokens, positions, state.prefill_slots, rows)

    def _fresh_positions(self, running: _Running) -> list[bool]:
        """Which of Q positions hold a prompt token that no shared block has yet."""
        cached = running.lease.cached * self.config.block_size
        tokens = len(running.request.prompt)
        return [cached <= position < tokens for position in range(self.config.prompt_tokens)]

    def _take_prompt_logprobs(self, admitted: Sequence[_Running], logits: Tensor) -> None:
        targets = self.runtime.prefill_tokens.roll(-1, dims=1)
        bits = self._read(logprob_bits(logits, targets.flatten()).view(targets.shape))
        for running, row in zip(admitted, bits, strict=False):
            running.prompt_logprob_bits = tuple(row[: len(running.request.prompt) - 1])

    # -- decode: the first rows with one token each, the idle ones padding

    def _decode(self) -> None:
        running = [row in self._running for row in range(self.config.rows)]
        self.runtime.active.copy_(self._tensor(running))
        count = self.config.decode_size(max(self._running) + 1)
        run = self._graphs or self._compute.decode
        self._append(self._running, run(count))

    # -- both

    def _append(self, running: Mapping[int, _Running], sampled: Tensor) -> None:
        """Note the token, and its log-probability, of each batch index in `running`."""
        tokens, bits = self._read(sampled)
        for index, each in running.items():
            each.append(tokens[index], bits[index])

    def _tensor(self, values: Sequence[object]) -> Tensor:
        """The only way from the host to the device, but for the columns of `_write_rows`."""
        return torch.tensor(values, device=self.device)

    def _read(self, values: Tensor) -> list[Any]:
        """The only way from the device to the host; waits for the device."""
        return values.tolist()


def _padded(values: Sequence[_T], length: int, padding: _T) -> list[_T]:
    return [*values, *[padding] * (length - len(values))]
