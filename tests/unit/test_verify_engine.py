"""The reference engine: it computes what a plain transformer computes, and its bits depend on the
requests alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.core import BackupOptions, SleepManager
from hal.core.kernels.topk_topp import cached_scratch_bytes
from hal.core.verify.blocks import BlockPool
from hal.core.verify.engine import ReferenceEngine
from hal.core.verify.model import ModelConfig, Transformer
from hal.core.verify.requests import Completion, Request, differences, workload
from hal.core.verify.sampler import SamplerRows, sample
from hal.core.verify.state import EngineConfig
from hal.core.workspace import WorkspaceManager
from hal.cpu.platform import CpuPlatform
from hal.errors import AsleepError, DirtyError, StateError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = EngineConfig(
    model=ModelConfig(
        vocabulary=256, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, mlp=48
    ),
    rows=12,
    prefill_rows=4,
    blocks=80,
)
REQUESTS = workload(40, SMALL.shape, seed=3)


@pytest.fixture
def sleeper() -> Iterator[SleepManager]:
    platform = CpuPlatform()
    yield SleepManager(platform, backup=BackupOptions(backing="anonymous"), debug=True)
    platform.device().clear_faults()


@pytest.fixture
def engine(sleeper: SleepManager) -> ReferenceEngine:
    return ReferenceEngine(sleeper, SMALL)


def serve(engine: ReferenceEngine, requests: tuple[Request, ...]) -> dict[int, Completion]:
    engine.submit(requests)
    return drain(engine)


def drain(engine: ReferenceEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.unfinished:
        done.update({each.request: each for each in engine.step()})
    return done


# ---- what it computes ----------------------------------------------------------------------------


def dense_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] by textbook attention over the sequence, without a cache."""
    c = model.config
    x = model.embedding[torch.tensor(tokens)]
    cosine = model.rotary.cosine[: len(tokens)].unsqueeze(1)
    sine = model.rotary.sine[: len(tokens)].unsqueeze(1)

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        left, right = heads.split(c.head_size // 2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)

    for layer in model.layers:
        normed = layer.attention_norm(x)
        queries = rotated(layer.attention.queries(normed).view(len(tokens), c.heads, c.head_size))
        pair = layer.attention.keys_values(normed).view(len(tokens), 2 * c.kv_heads, c.head_size)
        keys, values = rotated(pair[:, : c.kv_heads]), pair[:, c.kv_heads :]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            keys.transpose(0, 1).repeat_interleave(c.queries_per_head, 0),
            values.transpose(0, 1).repeat_interleave(c.queries_per_head, 0),
            is_causal=True,
        )
        x = x + layer.attention.output(mixed.transpose(0, 1).reshape(len(tokens), -1))
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.norm(x) @ model.head.weight.t()


def test_logprobs_are_those_of_a_model_without_a_cache(engine: ReferenceEngine) -> None:
    served = serve(engine, REQUESTS)
    for request in REQUESTS:
        done = served[request.id]
        tokens = [*request.prompt, *done.tokens]
        expected = dense_logits(engine.model, tokens).log_softmax(-1)
        chosen = expected[range(len(tokens) - 1), tokens[1:]]
        found = torch.tensor([*done.prompt_logprobs, *done.logprobs])
        torch.testing.assert_close(found, chosen, atol=2e-4, rtol=2e-4)


def test_every_request_gets_what_it_asked_for(engine: ReferenceEngine) -> None:
    served = serve(engine, REQUESTS)
    assert set(served) == {request.id for request in REQUESTS}
    for request in REQUESTS:
        assert len(served[request.id].tokens) == request.output_tokens
        assert len(served[request.id].logprob_bits) == request.output_tokens
        assert len(served[request.id].prompt_logprob_bits) == len(request.prompt) - 1


def test_greedy_requests_take_the_most_likely_token(engine: ReferenceEngine) -> None:
    greedy = tuple(replace(request, top_k=1) for request in REQUESTS[:8])
    served = serve(engine, greedy)
    for request in greedy:
        tokens = [*request.prompt, *served[request.id].tokens]
        best = dense_logits(engine.model, tokens).argmax(-1)[len(request.prompt) - 1 : -1]
        assert served[request.id].tokens == tuple(best.tolist())


def test_other_weights_give_other_bits(engine: ReferenceEngine, sleeper: SleepManager) -> None:
    other = ReferenceEngine(
        SleepManager(sleeper.platform, backup=BackupOptions(backing="anonymous")),
        replace(SMALL, seed=1),
    )
    mine, others = serve(engine, REQUESTS), serve(other, REQUESTS)
    assert all(mine[i].logprob_bits != others[i].logprob_bits for i in mine)


# ---- what its bits depend on ---------------------------------------------------------------------


def test_rounds_are_equal_bit_for_bit(engine: ReferenceEngine) -> None:
    cold = serve(engine, REQUESTS)
    assert engine.cached_blocks > 0
    assert serve(engine, REQUESTS) == cold


def test_a_draw_does_not_depend_on_the_batch(engine: ReferenceEngine) -> None:
    reference = serve(engine, REQUESTS)
    shuffled = list(REQUESTS)
    random.Random(5).shuffle(shuffled)
    found = serve(engine, tuple(shuffled))
    assert {i: found[i].tokens for i in found} == {i: reference[i].tokens for i in reference}


def test_operators_are_deterministic(engine: ReferenceEngine) -> None:
    reference = serve(engine, REQUESTS)
    torch.use_deterministic_algorithms(True)
    try:
        assert serve(engine, REQUESTS) == reference
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_workload_depends_on_its_seed_alone() -> None:
    assert workload(40, SMALL.shape, seed=3) == REQUESTS
    assert workload(20, SMALL.shape, seed=3) == REQUESTS[:20]
    assert workload(40, SMALL.shape, seed=4) != REQUESTS


def test_the_workload_fits_its_shape() -> None:
    for request in workload(500, SMALL.shape):
        assert SMALL.shape.prompt[0] <= len(request.prompt) <= SMALL.shape.prompt[1]
        assert SMALL.shape.output[0] <= request.output_tokens <= SMALL.shape.output[1]
        assert all(0 <= token < SMALL.model.vocabulary for token in request.prompt)
        assert 1 <= request.top_k <= SMALL.model.vocabulary


# ---- bits ----------------------------------------------------------------------------------------

QUIET_NAN, ZERO, MINUS_ZERO = 0x7FC00000, 0, -(1 << 31)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": (1, 3)}, ("tokens",)),
        ({"logprob_bits": (QUIET_NAN, MINUS_ZERO)}, ("output logprobs",)),
        ({"logprob_bits": (QUIET_NAN + 1, ZERO)}, ("output logprobs",)),
        ({"prompt_logprob_bits": ()}, ("prompt logprobs",)),
        ({}, ()),
    ],
)
def test_differences_are_of_bits(change: dict[str, tuple[int, ...]], named: tuple[str]) -> None:
    done = Completion(0, (1, 2), (QUIET_NAN, ZERO), (ZERO,))
    assert differences(done, replace(done, **change)) == named


def test_bits_are_those_of_float32() -> None:
    done = Completion(0, (1,), (-1082130432, MINUS_ZERO), ())
    assert done.logprobs == (-1.0, 0.0)


# ---- sampling ------------------------------------------------------------------------------------


def rows(count: int, **values: object) -> SamplerRows:
    defaults = {"seeds": range(count), "steps": 0, "temperature": 1.0, "top_k": 64, "top_p": 1.0}
    given_values = defaults | values

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        value = given_values[name]
        entries = list(value) if isinstance(value, range) else [value] * count
        return torch.tensor(entries, dtype=dtype)

    return SamplerRows(
        seeds=column("seeds", torch.int64),
        steps=column("steps", torch.int64),
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float32),
    )


def test_draws_follow_the_probabilities() -> None:
    count = 20_000
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(1)).expand(count, -1)
    tokens = sample(logits, rows(count, temperature=0.7, top_k=5), WorkspaceManager("cpu"))
    best = logits[0].topk(5)
    chances = dict(
        zip(best.indices.tolist(), (best.values / 0.7).softmax(-1).tolist(), strict=True)
    )
    drawn = Counter(tokens.tolist())
    assert set(drawn) == set(chances)
    for token, chance in chances.items():
        assert abs(drawn[token] / count - chance) < 0.015


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 7, 64]), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
@settings(max_examples=40)
def test_draws_stay_inside_top_k_and_top_p(seed: int, top_k: int, top_p: float) -> None:
    logits = torch.randn(32, 100, generator=torch.Generator().manual_seed(seed)) * 3
    tokens = sample(logits, rows(32, top_k=top_k, top_p=top_p), WorkspaceManager("cpu"))
    for row, token in zip(logits, tokens.tolist(), strict=True):
        ordered = row.topk(top_k)
        before = ordered.values.softmax(-1).double().cumsum(0) - ordered.values.softmax(-1)
        assert token in ordered.indices[before < top_p + 1e-6].tolist()


def test_samples_take_their_scratch_from_the_workspace(engine: ReferenceEngine) -> None:
    cached = cached_scratch_bytes(engine.device)
    serve(engine, REQUESTS)
    kernels = engine.workspace.kernels
    assert kernels.is_locked
    assert "topk_topp" in [slot.high_water_owner for slot in kernels.report().slots]
    assert kernels.report().unreserved == ()
    assert cached_scratch_bytes(engine.device) == cached


# ---- blocks --------------------------------------------------------------------------------------


def test_full_prompt_blocks_are_shared_by_prefix() -> None:
    pool = BlockPool(range(100, 110), 4)
    first = pool.lease((1, 2, 3, 4, 5, 6), 8)
    second = pool.lease((1, 2, 3, 4, 9), 8)
    assert (first.cached, second.cached) == (0, 1)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]


def test_given_back_blocks_can_be_read_again_until_the_index_is_forgotten() -> None:
    pool = BlockPool(range(10), 4)
    prompt = (1, 2, 3, 4)
    pool.give_back(pool.lease(prompt, 8).blocks)
    again = pool.lease(prompt, 8)
    assert again.cached == 1
    pool.give_back(again.blocks)
    pool.forget()
    assert pool.cached_blocks == 0
    assert pool.lease(prompt, 8).cached == 0


def test_the_longest_unused_block_is_evicted_first() -> None:
    pool = BlockPool(range(2), 2)
    for prompt in ((1, 1), (2, 2)):
        pool.give_back(pool.lease(prompt, 2).blocks)
    pool.give_back(pool.lease((3, 3), 2).blocks)
    assert pool.lease((2, 2), 2).cached == 1
    assert pool.lease((1, 1), 2).cached == 0


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(range(2), 2)
    lease = pool.lease((1, 2), 4)
    with pytest.raises(StateError, match="more blocks"):
        pool.lease((1, 2, 3), 6)
    pool.give_back(lease.blocks)
    assert pool.free_blocks == 2


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=7))))
def test_blocks_are_neither_lost_nor_written_twice(
    moves: list[tuple[bool, list[int]]],
) -> None:
    """A block that two leases hold is one that both find cached, or that the first one fills."""
    pool, leases = BlockPool(range(12), 2), []
    for is_lease, prompt in moves:
        if is_lease and pool.free_blocks >= 4:
            leases.append(pool.lease(tuple(prompt), 8))
        elif leases:
            pool.give_back(leases.pop(0).blocks)
        fresh = [block for lease in leases for block in lease.blocks[lease.cached :]]
        assert len(fresh) == len(set(fresh))
        held = {block for lease in leases for block in lease.blocks}
        assert pool.free_blocks + len(held) == 12


# ---- around a sleep ------------------------------------------------------------------------------


def test_every_byte_of_its_pools_is_registered(
    engine: ReferenceEngine, sleeper: SleepManager
) -> None:
    registered = list(engine.registered().values())
    for tag in sleeper.tags:
        live = {address for address, _ in sleeper.live_blocks(tag)}
        known = {e.tensor.untyped_storage().data_ptr() for e in registered if e.tag == tag}
        assert live == known
        assert known
    assert set(sleeper.tags) == {"weights", "runtime", "kv_cache", "workspace"}


def test_r03_a_step_while_asleep_is_refused_and_serves_later(
    engine: ReferenceEngine, sleeper: SleepManager
) -> None:
    reference = serve(engine, REQUESTS)
    sleeper.sleep(level=1)
    engine.submit(REQUESTS)
    with pytest.raises(AsleepError):
        engine.step()
    sleeper.wake_up("weights")
    with pytest.raises(AsleepError) as refused:
        engine.step()
    assert refused.value.tags == ("kv_cache",)
    sleeper.wake_up("kv_cache")
    assert drain(engine) == reference


def test_r04_an_engine_may_reject_what_arrives_while_asleep(sleeper: SleepManager) -> None:
    engine = ReferenceEngine(sleeper, replace(SMALL, reject_while_asleep=True))
    sleeper.sleep(level=1)
    with pytest.raises(AsleepError):
        engine.submit(REQUESTS)
    assert engine.unfinished == 0
    sleeper.wake_up()
    assert len(serve(engine, REQUESTS)) == len(REQUESTS)


def test_r21_a_queued_request_that_holds_no_memory_does_not_stop_a_sleep(
    engine: ReferenceEngine, sleeper: SleepManager
) -> None:
    reference = serve(engine, REQUESTS)
    engine.submit(REQUESTS)
    sleeper.sleep(level=1)
    assert engine.unfinished == len(REQUESTS)
    sleeper.wake_up()
    assert drain(engine) == reference


def test_r24_buffers_outlive_a_discard_that_no_checkpoint_undoes(
    engine: ReferenceEngine, sleeper: SleepManager
) -> None:
    reference = serve(engine, REQUESTS)
    buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    sleeper.sleep(level=2)
    sleeper.wake_up()
    with pytest.raises(DirtyError) as refused:
        engine.step()
    assert set(refused.value.names) == {
        f"model.{name}" for name, _ in engine.model.named_parameters()
    }
    assert all(torch.equal(buffers[name], b) for name, b in engine.model.named_buffers())
    engine.reload_weights()
    assert serve(engine, REQUESTS) == reference


def test_r35_the_prefix_index_is_forgotten_with_the_cache(
    engine: ReferenceEngine, sleeper: SleepManager
) -> None:
    reference = serve(engine, REQUESTS)
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert engine.cached_blocks == 0
    assert serve(engine, REQUESTS) == reference


def test_requests_that_run_when_it_sleeps_start_again(
    engine: ReferenceEngine, sleeper: SleepManager
) -> None:
    reference = serve(engine, REQUESTS)
    engine.submit(REQUESTS)
    done = {each.request: each for _ in range(3) for each in engine.step()}
    assert engine.unfinished > len(REQUESTS) - len(done) - 1
    sleeper.sleep(level=1)
    sleeper.wake_up()
    done |= drain(engine)
    assert {i: done[i].tokens for i in done} == {i: reference[i].tokens for i in reference}


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (replace(REQUESTS[0], prompt=()), "0 prompt tokens"),
        (replace(REQUESTS[0], prompt=(1,) * 25), "25 prompt tokens"),
        (replace(REQUESTS[0], output_tokens=9), "9 output tokens"),
    ],
)
def test_a_request_that_cannot_fit_is_refused_with_its_batch(
    engine: ReferenceEngine, request_: Request, what: str
) -> None:
    with pytest.raises(StateError, match=what):
        engine.submit((REQUESTS[1], request_))
    assert engine.unfinished == 0


@pytest.mark.parametrize("change", [{"blocks": 47}, {"prefill_rows": 0}, {"prefill_rows": 13}])
def test_sizes_that_cannot_serve_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(StateError, match="12 rows need 48 KV blocks"):
        replace(SMALL, **change)
