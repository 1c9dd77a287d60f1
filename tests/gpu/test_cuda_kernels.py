"""Kernels and their memory on a real GPU: MLA decode beside FlashInfer and float64, what FlashInfer
keeps over a sleep, graphs of several steps, and the merges over NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dcp_ranks
from decode_steps import DecodeSteps
from hal.core import Policy, SleepManager
from hal.core.kernels import mla_decode as module
from hal.core.kernels.dcp_topk import merge_topk_global, reserve_dcp_topk
from hal.core.kernels.flashinfer_state import adopt_state, row_states
from hal.core.kernels.lse import LogBase, merge_attention, merge_attention_across
from hal.core.kernels.mla_decode import mla_decode, mla_decode_specs
from hal.core.kernels.mla_decode_flashinfer import PlannedMla
from hal.core.kernels.scratch import KernelScratch
from hal.core.verify.graphs import GraphRunner
from hal.core.workspace import WorkspaceManager
from hal.errors import StateError, Unsupported
from mla_cases import SCALE, MlaCase, dense, mla_case, relative_error

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda", 0)
BATCHES = {
    "ragged": (1, 63, 64, 65, 4097, 700),
    "alike": (1024,) * 16,
    "one long": (20_000,),
    "some without a token": (0, 5, 0, 128),
}
needs_flashinfer = pytest.mark.skipif(
    find_spec("flashinfer") is None, reason="needs flashinfer, whose kernels are built beforehand"
)
RUN_ON_HOPPER = [
    "triton",
    pytest.param("fa2", marks=needs_flashinfer),
    pytest.param("fa3", marks=needs_flashinfer),
]


@pytest.fixture(autouse=True)
def _fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_scratch", KernelScratch("mla_decode"))


def bf16_case(
    lengths: tuple[int, ...], *, heads: int = 128, page: int = 64, traps: bool = False
) -> tuple[MlaCase, MlaCase]:
    """On the host, and on the device; `traps`: with NaN beyond the lengths."""
    case = mla_case(lengths, heads=heads, page=page, dtype=torch.bfloat16)
    case = case if traps else case.without_traps()
    return case, case.to(CUDA)


def poisoned(case: MlaCase) -> Tensor:
    """An output that shows when nothing was written to it."""
    return torch.full((*case.query.shape[:2], 512), 7.0, dtype=case.query.dtype, device=CUDA)


# -- one call


@pytest.mark.parametrize("backend", RUN_ON_HOPPER)
@pytest.mark.parametrize("page", [64, 1])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_mla_decode_is_dense_attention(lengths: tuple[int, ...], page: int, backend: str) -> None:
    host, case = bf16_case(lengths, page=page, traps=backend == "triton")
    output, lse = mla_decode(*case.arguments, scale=SCALE, return_lse=True, backend=backend)
    expected, logs = dense(host)
    some = host.lengths > 0
    assert relative_error(output.cpu()[some], expected[some]) < 2e-2
    assert (lse.cpu()[some] - logs[some]).abs().max() < 2e-2
    assert not output.cpu()[~some].any()
    assert lse.cpu()[~some].isneginf().all()


@pytest.mark.parametrize("heads", [1, 16, 24, 32, 64, 80, 128])
def test_any_number_of_heads(heads: int) -> None:
    host, case = bf16_case((5, 300, 64), heads=heads, traps=True)
    output = mla_decode(*case.arguments, scale=SCALE, backend="triton")
    assert relative_error(output, dense(host)[0]) < 2e-2


@needs_flashinfer
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_triton_and_flashinfer_agree_in_output_and_base(backend: str) -> None:
    _, case = bf16_case(BATCHES["ragged"])
    for base in LogBase:
        options: dict[str, Any] = {"scale": SCALE, "return_lse": True, "lse_base": base}
        ours, our_lse = mla_decode(*case.arguments, backend="triton", **options)
        theirs, their_lse = mla_decode(*case.arguments, backend=backend, **options)
        assert relative_error(ours, theirs) < 1e-2
        torch.testing.assert_close(our_lse, their_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", RUN_ON_HOPPER)
def test_r114_scratch_may_hold_anything_and_its_size_is_enough(backend: str) -> None:
    """Exactly what is asked for, full of NaN, with a guard behind it."""
    _, case = bf16_case(BATCHES["ragged"])
    tokens = case.table.shape[1] * case.cache.shape[1]
    sizes = {"heads": 128, "rows": len(case.query), "max_tokens": tokens}
    specs = mla_decode_specs(device=CUDA, backend=backend, **sizes)
    clean = mla_decode(*case.arguments, scale=SCALE, backend=backend)
    for fill in (0xFF, 0x00, 0x7B):
        workspace = WorkspaceManager(CUDA)
        views = workspace.get_simultaneous(*specs, ((4096,), torch.uint8))
        for view in views:
            view.view(-1).view(torch.uint8).fill_(fill)
        output = mla_decode(*case.arguments, scale=SCALE, backend=backend, workspace=workspace)
        assert torch.equal(output, clean)
        assert views[-1].eq(fill).all(), "written beyond its end"


def test_r124_shards_merge_to_the_whole() -> None:
    _, case = bf16_case((4000, 130, 64))
    whole = mla_decode(*case.arguments, scale=SCALE)
    pages = case.table.shape[1]
    shards = [case.shard(slice(start, start + 20)) for start in range(0, pages, 20)]
    outputs, logs = zip(
        *(
            mla_decode(*shard.arguments, scale=SCALE, return_lse=True, lse_base=LogBase.TWO)
            for shard in shards
        ),
        strict=True,
    )
    merged, _ = merge_attention(torch.stack(outputs), torch.stack(logs), base=LogBase.TWO)
    assert relative_error(merged, whole) < 2e-2


@needs_flashinfer
@pytest.mark.parametrize("backend", ["cutlass", "trtllm-gen", "cute-dsl", "cutile", "xqa"])
def test_what_needs_a_later_device_says_so(backend: str) -> None:
    _, case = bf16_case((5,))
    with pytest.raises(Unsupported, match="Blackwell"):
        mla_decode(*case.arguments, scale=SCALE, backend=backend)


# -- FlashInfer's plan over a sleep


def planned(
    case: MlaCase, workspace: WorkspaceManager, sleeper: SleepManager, backend: str, **options: Any
) -> PlannedMla:
    made = PlannedMla(
        workspace,
        heads=case.query.shape[1],
        page_size=case.cache.shape[1],
        batch=len(case.query),
        max_pages=case.table.numel(),
        scale=SCALE,
        backend=backend,
        sleeper=sleeper,
        **options,
    )
    made.plan(case.table, case.lengths)
    return made


DISCARD = {"runtime": Policy.DISCARD, "workspace": Policy.DISCARD}


@needs_flashinfer
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("policy", [None, DISCARD], ids=["level 1", "the plan discarded"])
def test_r118_a_plan_and_its_graph_are_right_after_each_wake(
    sleeper: SleepManager, backend: str, policy: dict[str, Policy] | None
) -> None:
    host, case = bf16_case(BATCHES["ragged"])
    workspace = WorkspaceManager.of(sleeper)
    made = planned(case, workspace, sleeper, backend, debug=True)
    workspace.lock()
    assert {sleeper.tag_of(tensor) for tensor in made.memory()} == {"runtime"}
    addresses = [tensor.data_ptr() for tensor in made.memory()]
    out = poisoned(case)
    made._debug = False  # its comparison reads the device, which no capture can
    run = GraphRunner(
        lambda size: made.run(case.query, case.cache, out=out)[0], (1,), sleeper, CUDA
    )
    made._debug = True
    expected = run(1).clone()
    assert relative_error(expected, dense(host)[0]) < 2e-2
    for _ in range(2):
        sleeper.sleep(policy=policy) if policy else sleeper.sleep(level=1)
        sleeper.wake_up()
        made.check_plan()
        out.fill_(7.0)
        assert torch.equal(run(1), expected), "replayed"
        assert torch.equal(made.run(case.query, case.cache, out=poisoned(case))[0], expected)
    assert [tensor.data_ptr() for tensor in made.memory()] == addresses


@needs_flashinfer
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_a_lost_plan_is_never_silently_wrong(
    sleeper: SleepManager, backend: str, fill: int
) -> None:
    """The wrapper itself writes nothing and says nothing; ours refuses, and repairs."""
    _, case = bf16_case(BATCHES["ragged"])
    made = planned(case, WorkspaceManager.of(sleeper), sleeper, backend, debug=True)
    expected = made.run(case.query, case.cache)[0].clone()
    made.plan_memory.fill_(fill)
    out = poisoned(case)
    made._wrapper.run(query=case.query, kv_cache=case.cache, out=out)
    assert out.eq(7).all(), "the fault that this is about"
    with pytest.raises(StateError, match="lost its bytes"):
        made.run(case.query, case.cache, out=out)
    made.plan(case.table, case.lengths)
    assert torch.equal(made.run(case.query, case.cache, out=out)[0], expected)


@needs_flashinfer
def test_a_step_is_planned_between_replays(sleeper: SleepManager) -> None:
    _, case = bf16_case((100, 7, 1300, 64))
    later_host, later = bf16_case((101, 8, 1301, 0))
    workspace = WorkspaceManager.of(sleeper)
    made = planned(case, workspace, sleeper, "fa3")
    workspace.lock()
    pages = max(len(case.cache), len(later.cache))
    query, cache = case.query.clone(), case.cache.new_zeros(pages, *case.cache.shape[1:])
    cache[: len(case.cache)] = case.cache
    run = GraphRunner(lambda size: made.run(query, cache)[0], (1,), sleeper, CUDA)
    run(1)
    query.copy_(later.query)
    cache[: len(later.cache)] = later.cache
    made.plan(later_host.table, later_host.lengths)
    output = run(1).cpu()
    assert relative_error(output[:3], dense(later_host)[0][:3]) < 2e-2
    assert not output[3].any()


# -- FlashInfer's hidden buffers


@needs_flashinfer
def test_r112_row_states_are_zero_again_after_a_wake(sleeper: SleepManager) -> None:
    """0x01: the arrival counter is past every target, so nothing waits, and rows are wrong."""
    from flashinfer import sampling

    workspace = WorkspaceManager.of(sleeper)
    workspace.get_simultaneous(((16,), torch.uint8))
    adopt_state(workspace, sleeper)
    generator = torch.Generator("cuda").manual_seed(5)
    logits = torch.randn(8, 262_144, generator=generator) * 4
    expected = sampling.top_k_mask_logits(logits, 50).clone()
    assert row_states(), "the release keeps none: then nothing has to be done"
    for buffer in row_states():
        buffer.fill_(0x01)
    assert not torch.equal(sampling.top_k_mask_logits(logits, 50), expected), "the fault"
    sleeper.sleep(level=1)
    for buffer in row_states():
        buffer.fill_(0x01)
    sleeper.wake_up()
    assert not any(bool(buffer.any()) for buffer in row_states())
    for _ in range(2):
        assert torch.equal(sampling.top_k_mask_logits(logits, 50), expected)
    assert sum(report.bytes for report in workspace.report().adopted) >= 1 << 20


# -- graphs of several steps


@pytest.mark.parametrize("level", [1, 2])
def test_a_graph_of_several_steps_replays_after_a_wake(sleeper: SleepManager, level: int) -> None:
    """Its block tables, lengths and slots are where they were, with what they held."""
    steps = DecodeSteps(sleeper, CUDA, lengths=(14, 1, 333, 64), heads=16, dtype=torch.bfloat16)
    run = GraphRunner(lambda size: steps(), (1,), sleeper, CUDA)
    steps.begin()
    expected = run(1).clone()
    steps.begin()
    assert torch.equal(steps(), expected), "called"
    addresses = steps.addresses()
    steps.begin()
    kept = {name: tensor.clone() for name, tensor in steps.state().items() if name != "cache"}
    sleeper.sleep(level=level)
    sleeper.wake_up()
    assert steps.addresses() == addresses
    assert all(torch.equal(steps.state()[name], tensor) for name, tensor in kept.items())
    steps.fill_cache()
    assert torch.equal(run(1), expected)
    assert module._scratch.cached_bytes(CUDA) == 0


def test_asleep_nothing_of_the_kernels_stays(sleeper: SleepManager) -> None:
    steps = DecodeSteps(sleeper, CUDA, heads=128, dtype=torch.bfloat16)
    steps.begin()
    steps()
    assert steps.workspace.report().bytes > 32 << 20
    report = sleeper.sleep(level=1)
    assert report.tag("workspace").bytes >= steps.workspace.report().bytes
    assert report.tag("workspace").policy is Policy.DISCARD
    assert report.tag("workspace").copied == 0
    sleeper.wake_up()


# -- merges over NCCL


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone, over the communicator that several would use."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # a machine without a network has no other
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=CUDA
    )
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


def test_r127_the_top_k_merge_over_nccl(one_rank: dist.ProcessGroup, sleeper: SleepManager) -> None:
    """Two whole chunks and five rows more, before and after a sleep, within the reservation."""
    with torch.device("cpu"):
        scores = dcp_ranks.whole(96)
        own = dcp_ranks.candidates(scores, torch.arange(96), dcp_ranks.K)
        expected = [tensor.to(CUDA) for tensor in dcp_ranks.expected(scores, dcp_ranks.K)]
    workspace = WorkspaceManager.of(sleeper)
    size = reserve_dcp_topk(workspace, dcp=1, k=dcp_ranks.K)
    workspace.lock()
    local = [tensor.to(CUDA) for tensor in own]
    for _ in range(2):
        merged = merge_topk_global(*local, dcp_ranks.K, one_rank)
        assert torch.equal(merged.indices, expected[1])
        assert torch.equal(merged.scores, expected[0])
        sleeper.sleep(level=1)
        sleeper.wake_up()
    assert workspace.report().slots[0].bytes == size


def test_attention_merges_over_nccl(one_rank: dist.ProcessGroup) -> None:
    _, case = bf16_case((400, 5))
    output, lse = mla_decode(*case.arguments, scale=SCALE, return_lse=True)
    merged, total = merge_attention_across(output, lse, one_rank, base=LogBase.E)
    torch.testing.assert_close(merged, output)
    torch.testing.assert_close(total, lse)
    assert math.isfinite(float(total.sum()))
