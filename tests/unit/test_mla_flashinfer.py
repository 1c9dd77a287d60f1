"""FlashInfer's MLA decode: which back end, how much memory, what a sleep does to it; on the host,
with a wrapper that keeps FlashInfer's contracts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_flashinfer import (
    BatchMLAPagedAttentionWrapper,
    _trtllm_without,
    flashinfer,
)
from hal.core import BackupOptions, Policy, SleepManager
from hal.core.kernels import flashinfer_backends
from hal.core.kernels import mla_decode as module
from hal.core.kernels.flashinfer_backends import (
    SIZE_SETTING,
    ScratchKind,
    scratch_kind,
    workspace_bytes,
    workspace_need,
)
from hal.core.kernels.flashinfer_state import adopt_state, row_states
from hal.core.kernels.lse import LogBase
from hal.core.kernels.mla_decode import mla_decode, mla_decode_workspace_bytes, reserve_mla_decode
from hal.core.kernels.mla_decode_flashinfer import Attention, Pages, PlannedMla
from hal.core.kernels.scratch import KernelScratch
from hal.core.workspace import WorkspaceManager
from hal.cpu.platform import CpuPlatform
from hal.errors import InvalidArgument, StateError, Unsupported, WorkspaceTooSmall
from mla_cases import SCALE, MlaCase, dense, mla_case, relative_error

__all__ = ["flashinfer"]  # the fixture
CPU = torch.device("cpu")
OLD_DEFAULT = 413_138_944
"""394 MiB: the constant size whose overflows were reported."""
RAGGED = (5, 0, 33, 16)


@pytest.fixture(autouse=True)
def _fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_scratch", KernelScratch("mla_decode"))
    monkeypatch.delenv(SIZE_SETTING, raising=False)


# -- which back end


def test_the_fastest_that_runs_is_chosen(flashinfer: ModuleType) -> None:
    assert flashinfer_backends.choose("flashinfer", CPU) == "fa3"
    assert flashinfer_backends.choose("fa2", CPU) == "fa2"


def test_an_older_device_takes_the_older_kernel(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_backends, "capability_of", lambda device: (8, 6))
    assert flashinfer_backends.choose("flashinfer", CPU) == "fa2"
    with pytest.raises(Unsupported, match=r"fa3 needs .*9\.0 \(Hopper\), and this device has 8\.6"):
        flashinfer_backends.choose("fa3", CPU)
    monkeypatch.setattr(flashinfer_backends, "capability_of", lambda device: (7, 5))
    with pytest.raises(Unsupported, match=r"fa2 needs compute capability 8\.0 or later"):
        flashinfer_backends.choose("flashinfer", CPU)


@pytest.mark.parametrize("backend", ["trtllm-gen", "cutlass", "cute-dsl", "cutile", "xqa"])
def test_what_needs_a_later_device_says_so(flashinfer: ModuleType, backend: str) -> None:
    case = mla_case((5,))
    with pytest.raises(Unsupported, match=rf"{backend} needs .*\(Blackwell\), .* has 9\.0"):
        mla_decode(*case.arguments, scale=SCALE, backend=backend)


def test_what_is_not_driven_is_told_apart_from_what_does_not_run(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_backends, "capability_of", lambda device: (10, 0))
    assert flashinfer_backends.choose("flashinfer", CPU) == "fa2"
    with pytest.raises(Unsupported, match="not driven by this library yet; use 'fa2'"):
        flashinfer_backends.choose("cutlass", CPU)


def test_without_the_package_or_the_device_there_is_a_way_to_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = mla_case((5,))
    monkeypatch.setattr(flashinfer_backends, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"not installed; install .* or use backend='auto'"):
        mla_decode(*case.arguments, scale=SCALE, backend="fa3")
    monkeypatch.setattr(flashinfer_backends, "find_spec", lambda name: object())
    with pytest.raises(Unsupported, match="no kernels for this kind of device"):
        mla_decode(*case.arguments, scale=SCALE, backend="fa3")
    with pytest.raises(InvalidArgument, match=r"backend='fa4'; use one of 'auto', .*'fa3'"):
        mla_decode(*case.arguments, scale=SCALE, backend="fa4")


# -- how much memory


def test_sizes_come_from_model_and_device(flashinfer: ModuleType) -> None:
    sizes = {"rows": 64, "max_tokens": 1 << 15, "device": CPU, "backend": "fa3"}
    assert workspace_bytes("fa3", heads=128, rows=64, device=CPU) == 17_369_088, "as measured"
    assert mla_decode_workspace_bytes(heads=128, **sizes) == 17_369_088
    assert workspace_need("fa2", heads=16, rows=64, units=78) < 17_369_088 // 1.6


def test_r114_the_statistics_grow_with_heads_and_tokens(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bytes * heads * tokens * 256 and 1 MiB, against what a constant gives."""

    def need(tokens: int) -> int:
        return mla_decode_workspace_bytes(
            heads=128, rows=tokens, max_tokens=1, device=CPU, backend="trtllm-gen"
        )

    assert need(1572) >= 8 * 128 * 1572 * 256 + (1 << 20) == OLD_DEFAULT
    assert need(1573) > OLD_DEFAULT
    workspace = WorkspaceManager(CPU)
    limits = {"heads": 128, "max_tokens": 1, "backend": "trtllm-gen"}
    monkeypatch.setattr(
        WorkspaceManager, "_take", lambda self, size: torch.empty(size, device="meta")
    )
    for tokens in (1572, 1573):
        assert reserve_mla_decode(workspace, rows=tokens, **limits) == need(tokens) // 256 * 256
    monkeypatch.setenv(SIZE_SETTING, str(OLD_DEFAULT))
    assert need(1572) == OLD_DEFAULT
    with pytest.raises(WorkspaceTooSmall) as caught:
        need(1573)
    assert (caught.value.needed, caught.value.have) == (OLD_DEFAULT + 8 * 128 * 256, OLD_DEFAULT)


def test_r115_the_error_has_need_have_and_the_setting(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 heads and 4,084 tokens need the reported 536,346,624 bytes."""
    monkeypatch.setenv(SIZE_SETTING, str(OLD_DEFAULT))
    with pytest.raises(WorkspaceTooSmall, match=SIZE_SETTING) as caught:
        workspace_bytes("trtllm-gen", heads=64, rows=4084, device=CPU)
    assert (caught.value.needed, caught.value.have) == (536_346_624, OLD_DEFAULT)
    assert caught.value.name == "FlashInfer trtllm-gen"
    monkeypatch.delenv(SIZE_SETTING)
    assert workspace_bytes("trtllm-gen", heads=64, rows=4084, device=CPU) == 536_346_624


def test_the_setting_is_honoured_and_checked_before_a_launch(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = mla_case((5,), heads=128)
    monkeypatch.setenv(SIZE_SETTING, str(64 << 20))
    workspace = WorkspaceManager(CPU)
    mla_decode(*case.arguments, scale=SCALE, backend="fa3", workspace=workspace)
    assert workspace.report().slots[0].high_water == 64 << 20
    monkeypatch.setenv(SIZE_SETTING, "17369087")
    with pytest.raises(WorkspaceTooSmall, match=r"fa3.*16\.56 MiB"):
        mla_decode(*case.arguments, scale=SCALE, backend="fa3")
    assert BatchMLAPagedAttentionWrapper.plans == 1
    monkeypatch.setenv(SIZE_SETTING, "lots")
    with pytest.raises(InvalidArgument, match="give bytes as a whole number"):
        mla_decode(*case.arguments, scale=SCALE, backend="fa3")


# -- one call


@pytest.mark.parametrize("base", LogBase)
def test_a_call_plans_and_runs(flashinfer: ModuleType, base: LogBase) -> None:
    case = mla_case(RAGGED)
    workspace = WorkspaceManager(CPU, debug=True)
    options: dict[str, Any] = {"scale": SCALE, "return_lse": True, "lse_base": base}
    output, lse = mla_decode(*case.arguments, backend="fa2", workspace=workspace, **options)
    expected, logs = mla_decode(*case.arguments, backend="torch", **options)
    assert relative_error(output, expected) < 2e-3
    torch.testing.assert_close(lse, logs, rtol=1e-4, atol=1e-4)
    assert not workspace.findings


# -- the plan over a sleep


@pytest.fixture
def sleeper() -> Iterator[SleepManager]:
    made = SleepManager(CpuPlatform(), backup=BackupOptions(backing="anonymous"), debug=True)
    yield made
    if made.is_sleeping:
        made.wake_up()


def planned(case: MlaCase, workspace: WorkspaceManager, **options: Any) -> PlannedMla:
    made = PlannedMla(
        workspace,
        heads=case.query.shape[1],
        page_size=case.cache.shape[1],
        batch=len(case.query),
        max_pages=64,
        scale=SCALE,
        dtype=case.query.dtype,
        **options,
    )
    made.plan(case.table, case.lengths)
    return made


def run(made: PlannedMla, case: MlaCase) -> Tensor:
    """Into memory that shows when nothing was written."""
    out = torch.full((*case.query.shape[:2], 512), 7.0, dtype=case.query.dtype)
    return made.run(case.query, case.cache, out=out)[0]


def test_without_care_a_lost_plan_is_an_unchanged_output_and_no_error(
    flashinfer: ModuleType,
) -> None:
    """What the tests below would see if nothing was done."""
    case = mla_case((5,))
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(32 << 20, dtype=torch.uint8))
    attention = Attention(16, 16, SCALE, torch.float16, None)
    attention.plan(wrapper, Pages.of(case.table, case.lengths, 16))
    wrapper._planned_backend._int_workspace_buffer.zero_()
    out = torch.full((1, 16, 512), 7.0, dtype=torch.float16)
    attention.run(wrapper, case.query, case.cache, out, torch.tensor([False]))
    assert out.eq(7).all()


@pytest.mark.parametrize("policy", [None, {"runtime": Policy.DISCARD, "workspace": Policy.DISCARD}])
def test_r118_the_plan_is_right_after_each_wake(
    flashinfer: ModuleType, sleeper: SleepManager, policy: dict[str, Policy] | None
) -> None:
    """At level 1 its bytes come back; discarded, the wake plans again; at the same addresses."""
    case = mla_case(RAGGED)
    workspace = WorkspaceManager.of(sleeper)
    made = planned(case, workspace, sleeper=sleeper, debug=True)
    workspace.lock()
    assert {sleeper.tag_of(tensor) for tensor in made.memory()} == {"runtime"}
    addresses = [tensor.data_ptr() for tensor in made.memory()]
    before = run(made, case)
    assert (
        relative_error(before[case.lengths > 0], dense(mla_case(RAGGED))[0][case.lengths > 0])
        < 2e-3
    )
    for _ in range(2):
        sleeper.sleep(policy=policy) if policy else sleeper.sleep(level=1)
        sleeper.wake_up()
        made.check_plan()
        assert torch.equal(run(made, case), before)
    assert [tensor.data_ptr() for tensor in made.memory()] == addresses


def test_a_workspace_of_an_engines_own_pools_plans_again_when_it_is_restored(
    flashinfer: ModuleType,
) -> None:
    case = mla_case(RAGGED)
    workspace = WorkspaceManager(CPU)
    made = planned(case, workspace, debug=True)
    before = run(made, case)
    workspace.release()
    made.plan_memory.fill_(0xFF)
    workspace.restore()
    assert torch.equal(run(made, case), before)
    [report] = workspace.report().adopted
    assert report.owner == "FlashInfer's MLA plan"
    assert report.bytes >= 8 << 20


def test_a_lost_plan_is_refused_in_debug_mode(flashinfer: ModuleType) -> None:
    case = mla_case(RAGGED)
    made = planned(case, WorkspaceManager(CPU), debug=True)
    made.plan_memory.zero_()
    with pytest.raises(StateError, match="the MLA plan lost its bytes"):
        made.run(case.query, case.cache)
    made.plan(case.table, case.lengths)
    run(made, case)


def test_a_plan_from_before_a_wake_is_refused(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = mla_case(RAGGED)
    workspace = WorkspaceManager(CPU)
    made = planned(case, workspace)
    monkeypatch.setattr(PlannedMla, "_woke", lambda self: None)  # a hook that did nothing
    workspace.release()
    workspace.restore()
    with pytest.raises(StateError, match="older than the last wake"):
        made.run(case.query, case.cache)


def test_float_scratch_is_asked_for_at_each_run(flashinfer: ModuleType) -> None:
    """Another kernel grows the slot: the old buffer is gone, and the next run uses the new one."""
    case = mla_case(RAGGED)
    workspace = WorkspaceManager(CPU)
    made = planned(case, workspace)
    [grown] = workspace.get_simultaneous(((64 << 20,), torch.uint8))
    run(made, case)
    assert made._wrapper._planned_backend._float_workspace_buffer.data_ptr() == grown.data_ptr()


def test_a_step_changes_the_context_and_not_the_addresses(flashinfer: ModuleType) -> None:
    case, later = mla_case(RAGGED), mla_case((6, 1, 34, 17), seed=1)
    made = planned(case, WorkspaceManager(CPU), lse_base=LogBase.TWO)
    addresses = [tensor.data_ptr() for tensor in made.memory()]
    made.plan(later.table, later.lengths)
    output, lse = made.run(later.query, later.cache)
    assert relative_error(output, dense(later)[0]) < 2e-3
    assert lse is not None
    assert relative_error(lse * torch.tensor(2.0).log(), dense(later)[1]) < 1e-4
    assert [tensor.data_ptr() for tensor in made.memory()] == addresses
    with pytest.raises(InvalidArgument, match="a wrapper for 4"):
        made.plan(later.table[:3], later.lengths[:3])
    many = mla_case((500, 500, 500, 1))
    with pytest.raises(InvalidArgument, match="97 pages are planned and max_pages is 64"):
        made.plan(many.table, many.lengths)


# -- hidden state


def test_hidden_state_is_repaired_in_each_wake(
    flashinfer: ModuleType, sleeper: SleepManager
) -> None:
    """Row states are zeroed and constants written again, wherever they lie."""
    workspace = WorkspaceManager.of(sleeper)
    workspace.get_simultaneous(((16,), torch.uint8))
    adopt_state(workspace, sleeper)
    with sleeper.pool("kv_cache"):  # as a release does that takes the pool which is open
        inside = torch.zeros(1 << 20, dtype=torch.uint8)
        numbers = torch.arange(64, dtype=torch.int32)
        slopes = torch.arange(8, 0.0, -1.0)
    outside = torch.zeros(1 << 20, dtype=torch.uint8)
    grown = torch.zeros(1 << 10, dtype=torch.uint8)
    flashinfer._cache_buf.update(
        {
            ("top_k_mask_logits_row_states_cpu", CPU): inside,
            ("range_64", CPU): numbers,
            ("alibi_slopes_8", CPU): slopes,
            ("softmax_workspace", CPU): torch.ones(4),
        }
    )
    flashinfer._stream_cache_buf["radix_topk_row_states", CPU, 0] = outside
    flashinfer._cache_buf_retired.append(grown)
    assert {id(buffer) for buffer in row_states()} == {id(inside), id(outside), id(grown)}
    sleeper.sleep(level=1)
    outside.fill_(0xFF)
    grown.fill_(0xFF)
    sleeper.wake_up(["workspace"])  # the cache still sleeps: what lies in it waits
    assert not outside.any()
    assert not grown.any()
    sleeper.wake_up()
    assert not inside.any(), "a wake in debug mode has filled it with 0xFF"
    assert numbers.tolist() == list(range(64))
    assert slopes.tolist() == list(range(8, 0, -1))
    [report] = workspace.report().adopted
    assert report.bytes == (2 << 20) + (1 << 10)


def test_r111_counters_are_apart_where_the_release_takes_them(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scratch_kind("fa2") is scratch_kind("fa3") is ScratchKind.UNZEROED
    assert scratch_kind("trtllm-gen") is ScratchKind.COUNTERS_APART
    assert scratch_kind("xqa") is ScratchKind.ZEROED
    monkeypatch.setattr(
        sys.modules["flashinfer.mla"], "trtllm_batch_decode_with_kv_cache_mla", _trtllm_without
    )
    flashinfer_backends._arguments_of_trtllm_gen.cache_clear()
    assert scratch_kind("trtllm-gen") is ScratchKind.ZEROED
