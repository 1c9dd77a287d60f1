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
from hal.core.report import SleepReport
from hal.core.sleep import SleepManager
from hal.core.tags import CUDAGRAPH, KV_CACHE, Policy
from hal.core.verify.blocks import BlockPool, Lease
from hal.core.verify.compute import Compute, Models, emitted, logprob_bits
from hal.core.verify.config import Architecture
from hal.core.verify.connector import TAG as CONNECTOR
from hal.core.verify.connector import Connector
from hal.core.verify.graphs import GraphRunner
from hal.core.verify.layers import Batch
from hal.core.verify.model import Draft, Transformer
from hal.core.verify.requests import Completion, Request
from hal.core.verify.state import (
    CacheMemory,
    EngineConfig,
    RuntimeState,
    Workspace,
    slot_views,
)
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
        """Note a token, unless the request has all that it asked for: a draft may run past it."""
        if not self.finished:
            self.tokens.append(token)
            self.logprob_bits.append(logprob_bits)

    def completion(self) -> Completion:
        bits = tuple(self.logprob_bits)
        return Completion(self.request.id, tuple(self.tokens), bits, self.prompt_logprob_bits)


@dataclass
class _Prefilling:
    """Requests whose prompts enter the cache together, by chunks; `rows`: int64 [P], padded."""

    admitted: list[_Running]
    rows: Tensor
    start: int = 0
    """Prompt tokens that earlier chunks have computed."""


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
        self._prefilling: _Prefilling | None = None
        self._keeps_cache = False
        self._allocate()
        self._connect()

    # -- memory

    def _allocate(self) -> None:
        config = self.config
        with self.sleeper.pool("weights"), self.device:
            self.model = Transformer(config.model)
            self.draft = Draft(self.model) if config.draft_tokens else None
        self._models = Models(self.model, self.draft)
        self._models.load(config.seed)
        self._models.load_adapters(config.seed)
        self._initialise()
        self.workspace = Workspace.build(config, self.sleeper)
        self._compute = Compute.over(
            config, self._models, self._cache, self.runtime, self.workspace
        )
        self._connector = self._make_connector() if config.connector_blocks else None
        self._graphs = self._capture() if self.execution == "graphs" else None

    def _initialise(self) -> None:
        """Cache and runtime state; where the state is made first, it is in ordinary memory."""
        if not self.config.state_inside:
            self.runtime = RuntimeState.build(self.config, self.device)
        with self.sleeper.kv_init(nesting=self.nesting) as kv:
            self._initialise_kv(kv)
        self.kv_findings = kv.findings
        # Where nesting would put the cache into the runtime pool, its surroundings stay outside.
        is_outside = kv.strategy == "fallback" or not self.config.state_inside
        self._runtime_tag = None if is_outside else "runtime"

    def _initialise_kv(self, kv: KVInitScope) -> None:
        """The cache's pages in its own pool, and everything else outside that scope."""
        with kv.cache():
            self._cache = CacheMemory.build(self.config, self.device)
        kv.declare(self._cache.tensors)
        if self.config.state_inside:
            self.runtime = RuntimeState.build(self.config, self.device)

    @property
    def pages(self) -> tuple[Tensor, ...]:
        """The KV cache's allocations."""
        return self._cache.tensors

    def _make_connector(self) -> Connector:
        views = [view for pages in self.pages for view in slot_views(self.config, pages)]
        config = self.config
        return Connector(self.sleeper, views, config.connector_blocks, config.block_size)

    @torch.inference_mode()
    def _capture(self) -> GraphRunner:
        """The decode step as graphs; no row is active yet, so that the warm-up changes nothing."""
        sizes = self.config.decode_sizes
        return GraphRunner(self._compute.decode, sizes, self.sleeper, self.device)

    def registered(self) -> dict[str, Registered]:
        """Every tensor of the engine by name, with the tag that it must have."""
        groups: tuple[tuple[str, str | None, dict[str, Tensor]], ...] = (
            ("model", "weights", self._models.named),
            ("pages", "kv_cache", {str(index): pages for index, pages in enumerate(self.pages)}),
            ("runtime", self._runtime_tag, self.runtime.named),
            ("workspace", "workspace", self.workspace.named),
            ("connector", CONNECTOR, self._connector.tensors if self._connector else {}),
            ("graphs", CUDAGRAPH, self._graphs.outputs() if self._graphs else {}),
        )
        return {
            f"{group}.{name}": Registered(tensor, tag)
            for group, tag, tensors in groups
            for name, tensor in tensors.items()
            if tensor.numel()
        }

    # -- sleep and wake

    def _connect(self) -> None:
        """Tell the manager what no checkpoint brings back, and what follows from an empty cache."""
        self.sleeper.track(self._models.named, prefix="model.")
        self.sleeper.preserve(self._preserved())
        if self._connector:
            self.sleeper.before_sleep(self.drain, name="save blocks in host memory")
        self.sleeper.after_wake(self._cache_woke, name="restart on an empty KV cache", tag=KV_CACHE)
        tags = {entry.tag for entry in self.registered().values()}
        self.needs = tuple(sorted(tag for tag in tags if tag is not None))
        """The tags without which no step can be taken."""

    def _preserved(self) -> dict[str, Tensor]:
        """What must outlive a discard, since no load brings it back."""
        return self._models.in_no_checkpoint()

    def sleep(
        self, level: int = 1, *, policy: Mapping[str, Policy] | None = None, park: bool = False
    ) -> SleepReport:
        """Put memory to sleep, and remember whether the cache keeps its contents."""
        keeps = policy is not None and policy.get(KV_CACHE) is not Policy.DISCARD
        if KV_CACHE not in self.sleeper.sleeping_tags:
            self._keeps_cache = keeps
        if policy is None:
            return self.sleeper.sleep(level, park=park)
        return self.sleeper.sleep(level, policy=policy, park=park)

    def drain(self) -> None:
        """Let the connector save what it can; every sleep begins with it."""
        if self._connector and not self.sleeper.is_sleeping and not self._keeps_cache:
            self._connector.save(self._blocks, self._unwritten())

    def _unwritten(self) -> frozenset[int]:
        """Blocks that are indexed, but not yet filled: those of prompts that are half computed."""
        admitted = self._prefilling.admitted if self._prefilling else []
        return frozenset(block for running in admitted for block in running.lease.blocks)

    def _cache_woke(self) -> None:
        if self._keeps_cache:
            return
        self.restart()
        if self._connector:
            self._connector.restore(self._blocks)

    def restart(self) -> None:
        """Trust no block any more, and queue what was running again, in its order."""
        for running in reversed(tuple(self._running.values())):
            self._release(running)
            self._waiting.appendleft(running.request)
        self._prefilling = None
        self._blocks.forget()

    def reload_weights(self) -> None:
        """Load the checkpoint again, in place, after the weights were discarded."""
        self._models.load(self.config.seed)
        self.sleeper.mark_loaded("weights")

    def close(self) -> None:
        """Drop every tensor, awake or asleep; the engine cannot serve any more."""
        del self._graphs, self._compute  # graphs go before the memory that they were captured in
        self.workspace.kernels.close()
        del self.model, self.draft, self._models, self._connector
        del self._cache, self.runtime, self.workspace

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
            self.sleeper.require_awake(*self.needs)
        self._waiting.extend(arrived)

    def _check(self, what: str, request: int, tokens: int, most: int) -> None:
        if not 1 <= tokens <= most:
            raise StateError(
                f"request {request} has {tokens} {what} tokens; this engine takes 1 to {most}"
            )

    @torch.inference_mode()
    def step(self) -> tuple[Completion, ...]:
        """Admit what waits, give each running request a token, and return what is finished."""
        self.sleeper.require_awake(*self.needs)
        if self._prefilling is None and (admitted := self._admit()):
            self._prefilling = _Prefilling(admitted, self._write_rows(admitted))
        if self._prefilling is not None:
            self._prefilling = self._prefill(self._prefilling)
        finished = self._take_finished()
        if decoding := self._decoding():
            self._decode(decoding)
        return finished + self._take_finished()

    def _admit(self) -> list[_Running]:
        """A full prefill batch, or all that waits if that is less; nothing while rows are short."""
        count = min(len(self._waiting), self.config.prefill_rows)
        if count > len(self._free_rows):
            return []
        return [self._start(self._waiting.popleft()) for _ in range(count)]

    def _start(self, request: Request) -> _Running:
        tokens = self.config.tokens_of(len(request.prompt), request.output_tokens)
        lease = self._blocks.lease(request.prompt, tokens, kind=self._adapter(request))
        running = _Running(request, heapq.heappop(self._free_rows), lease)
        self._running[running.row] = running
        return running

    def _adapter(self, request: Request) -> int:
        """Which adapter serves a request; its cache holds what that adapter makes of the tokens."""
        has_adapters = self.config.model.architecture is Architecture.LORA
        return request.seed % self.config.model.adapters if has_adapters else 0

    def _take_finished(self) -> tuple[Completion, ...]:
        finished = [running for running in self._running.values() if running.finished]
        for running in finished:
            self._release(running)
        return tuple(running.completion() for running in finished)

    def _release(self, running: _Running) -> None:
        del self._running[running.row]
        heapq.heappush(self._free_rows, running.row)
        self._blocks.give_back(running.lease.blocks)

    # -- prefill: P rows of Q prompt tokens a chunk, the missing ones padding

    def _prefill(self, group: _Prefilling) -> _Prefilling | None:
        """Compute the group's next chunk; returns what is left of it."""
        batch = self._prefill_batch(group)
        self._compute.guess(batch)
        logits = self._compute.forward(batch)
        self._take_prompt_logprobs(group, logits)
        self._take_first_tokens(group, logits)
        group.start += self.config.chunk
        longest = max(len(running.request.prompt) for running in group.admitted)
        return group if group.start < longest else None

    def _take_first_tokens(self, group: _Prefilling, logits: Tensor) -> None:
        """Sample for the rows whose prompts end in this chunk."""
        width, count = self.config.chunk, self.config.prefill_rows
        ends = [len(r.request.prompt) - 1 - group.start for r in group.admitted]
        inside = [index for index, end in enumerate(ends) if 0 <= end < width]
        last = [index * width + end % width for index, end in enumerate(ends)]
        last_logits = logits[self._tensor(_padded(last, count, 0))]
        sampled = self._compute.sampled(last_logits, group.rows)
        if inside:
            chosen = self._tensor(inside)
            rows = group.rows[chosen]
            self.runtime.last_tokens[rows] = sampled[0, chosen]
            self.runtime.steps[rows] = 1
        self._append({index: group.admitted[index] for index in inside}, sampled)

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
            (state.adapters, [self._adapter(request) for request in requests]),
        )
        for column, values in columns:
            column[rows] = torch.tensor(values, dtype=column.dtype, device=self.device)
        missing = self.config.prefill_rows - len(admitted)
        return torch.cat((rows, rows[:1].expand(missing)))

    def _prefill_batch(self, group: _Prefilling) -> Batch:
        state, admitted, start = self.runtime, group.admitted, group.start
        rows, count, width = group.rows, self.config.prefill_rows, self.config.chunk
        state.prefill_tokens.copy_(self._chunk(admitted, start))
        state.prefill_targets.copy_(self._chunk(admitted, start + 1))
        fresh = [self._fresh_positions(running, start) for running in admitted]
        written = self._tensor(_padded(fresh, count, [False] * width))
        lengths = [len(running.request.prompt) for running in admitted]
        ends = self._tensor(_padded(lengths, count, 0)).unsqueeze(1)
        positions = (state.prompt_offsets + start).expand(count, width)
        padding = state.padding_slots[: count * width].view(count, width)
        slots = self._compute.slots(state.block_tables[rows], positions)
        torch.where(written, slots, padding, out=state.prefill_slots)
        return self._compute.batch(
            state.prefill_tokens,
            positions,
            state.prefill_slots,
            rows,
            known=ends.squeeze(1).clamp_max(start + width),
            fresh=torch.full((count,), start == 0, device=self.device),
            counted=positions < ends,
        )

    def _chunk(self, admitted: Sequence[_Running], start: int) -> Tensor:
        """The prompts' tokens from `start` on: int64 [P, Q]."""
        width = self.config.chunk
        prompts = [running.request.prompt[start : start + width] for running in admitted]
        padded = [_padded(prompt, width, 0) for prompt in prompts]
        return self._tensor(_padded(padded, self.config.prefill_rows, [0] * width))

    def _fresh_positions(self, running: _Running, start: int) -> list[bool]:
        """Which of Q positions hold a prompt token that no shared block has yet."""
        cached = running.lease.cached * self.config.block_size
        tokens, positions = len(running.request.prompt), range(start, start + self.config.chunk)
        return [cached <= position < tokens for position in positions]

    def _take_prompt_logprobs(self, group: _Prefilling, logits: Tensor) -> None:
        targets = self.runtime.prefill_targets
        bits = self._read(logprob_bits(logits, targets.flatten()).view(targets.shape))
        for running, row in zip(group.admitted, bits, strict=False):
            missing = len(running.request.prompt) - 1 - group.start
            running.prompt_logprob_bits += tuple(row[: max(0, missing)])

    # -- decode: the first rows with the tokens of one step each, the idle ones padding

    def _decoding(self) -> dict[int, _Running]:
        """The running requests whose whole prompt is in the cache, by row."""
        pending = {id(running) for running in self._prefilling.admitted} if self._prefilling else ()
        return {row: each for row, each in self._running.items() if id(each) not in pending}

    def _decode(self, decoding: Mapping[int, _Running]) -> None:
        running = [row in decoding for row in range(self.config.rows)]
        self.runtime.active.copy_(self._tensor(running))
        count = self.config.decode_size(max(decoding) + 1)
        run = self._graphs or self._compute.decode
        self._append(decoding, run(count))

    # -- both

    def _append(self, running: Mapping[int, _Running], sampled: Tensor) -> None:
        """Note the tokens, and their log-probabilities, of each batch index in `running`."""
        read = self._read(sampled)
        for index, each in running.items():
            for token, bits in emitted(read, index):
                each.append(token, bits)

    def _tensor(self, values: Sequence[object]) -> Tensor:
        """The only way from the host to the device, but for the columns of `_write_rows`."""
        return torch.tensor(values, device=self.device)

    def _read(self, values: Tensor) -> list[Any]:
        """The only way from the device to the host; waits for the device."""
        return values.tolist()


def _padded(values: Sequence[_T], length: int, padding: _T) -> list[_T]:
    return [*values, *[padding] * (length - len(values))]
