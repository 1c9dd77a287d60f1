"""MLA decode: plain torch and the Triton kernel against dense attention in float64."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hal.core.kernels import mla_decode as module
from hal.core.kernels.lse import LogBase, merge_attention
from hal.core.kernels.mla_decode import (
    mla_decode,
    mla_decode_specs,
    mla_decode_workspace_bytes,
    reserve_mla_decode,
)
from hal.core.kernels.scratch import KernelScratch
from hal.core.workspace import WorkspaceManager
from hal.errors import InvalidArgument, Unsupported
from mla_cases import SCALE, MlaCase, dense, mla_case, relative_error
from triton_interpreter import interpreter_problem

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RAGGED = (0, 1, 16, 17, 0, 50, 15)
BATCHES: dict[str, Sequence[int]] = {
    "one token": (1,),
    "page boundaries": (16, 32, 15, 17),
    "ragged, some without a token": RAGGED,
    "nothing at all": (0, 0),
    "one long request over every share": (333,),
    "fewer tiles than shares": (2, 1),
    "more requests than shares": (5, 20, 33, 1, 16, 40, 2, 7, 64, 3, 18),
}


@pytest.fixture(autouse=True)
def _fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_scratch", KernelScratch("mla_decode"))


@pytest.fixture(params=["torch", "interpreted", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the tensors are; "auto" takes plain torch on the host, and the kernel else."""
    if request.param == "interpreted":
        if problem := interpreter_problem():
            pytest.skip(problem)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def decode(
    case: MlaCase, device: torch.device, base: LogBase = LogBase.E, **options: WorkspaceManager
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp on the host."""
    arguments = case.to(device).arguments
    output, lse = mla_decode(*arguments, scale=SCALE, return_lse=True, lse_base=base, **options)
    return output.cpu(), lse.cpu()


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("heads", "page"), [(16, 16), (3, 64), (20, 1)])
def test_it_is_dense_attention(
    lengths: Sequence[int], heads: int, page: int, device: torch.device
) -> None:
    case = mla_case(lengths, heads=heads, page=page)
    output, lse = decode(case, device)
    expected, logs = dense(case)
    empty = case.lengths == 0
    assert not output[empty].any()
    assert lse[empty].isneginf().all()
    if not empty.all():
        assert relative_error(output, expected) < TOLERANCE[torch.float16]
        torch.testing.assert_close(lse[~empty].double(), logs[~empty], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(333,), (40, 0, 50)], ids=["alone", "with an empty one"])
def test_many_parts_are_merged_a_block_at_once(
    lengths: Sequence[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (kernel := module._triton(device, torch.float16)) is None:
        pytest.skip("plain torch has no parts")
    case = mla_case(lengths, heads=3)
    expected, logs = decode(case, device)
    monkeypatch.setattr(kernel, "MERGED", (2, 1))
    output, lse = decode(case, device)
    assert relative_error(output, expected) < TOLERANCE[torch.float16]
    torch.testing.assert_close(lse, logs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_torch_keeps_to_the_precision_of_its_numbers(dtype: torch.dtype) -> None:
    case = mla_case(RAGGED[1:4], dtype=dtype)
    output = mla_decode(*case.arguments, scale=SCALE, backend="torch")
    assert output.dtype == dtype
    assert relative_error(output, dense(case)[0]) < TOLERANCE[dtype]


def test_r125_the_base_is_the_one_that_was_asked_for(device: torch.device) -> None:
    case = mla_case((5, 40))
    natural, two = (decode(case, device, base)[1] for base in (LogBase.E, LogBase.TWO))
    torch.testing.assert_close(two * math.log(2), natural)
    assert (two - natural).abs().min() > 0.1, "the bases differ, or the test says nothing"


def test_r124_shards_merge_to_the_whole(device: torch.device) -> None:
    """Three ranks hold pages each; for the short requests the later ones hold none."""
    case = mla_case((40, 3, 17, 64), page=16)
    whole, whole_lse = decode(case, device)
    shards = [case.shard(pages) for pages in (slice(0, 1), slice(1, 3), slice(3, 4))]
    assert [shard.lengths.tolist() for shard in shards][2] == [0, 0, 0, 16]
    outputs, logs = zip(*(decode(shard, device, LogBase.TWO) for shard in shards), strict=True)
    merged, lse = merge_attention(torch.stack(outputs), torch.stack(logs), base=LogBase.TWO)
    assert relative_error(merged, whole) < TOLERANCE[torch.float16]
    torch.testing.assert_close(lse * math.log(2), whole_lse, rtol=1e-4, atol=1e-4)


def test_scratch_may_hold_anything(device: torch.device) -> None:
    """Debug mode hands scratch out full of NaN."""
    case = mla_case(RAGGED)
    clean = decode(case, device, workspace=WorkspaceManager(device))
    poisoned = WorkspaceManager(device, debug=True)
    for _ in range(2):
        for found, expected in zip(decode(case, device, workspace=poisoned), clean, strict=True):
            assert torch.equal(found, expected)
    assert not poisoned.findings


def test_strided_rows_are_read_and_written_in_place(device: torch.device) -> None:
    case = mla_case((5, 33), heads=8)
    expected, _ = decode(case, device)
    query, cache, table, lengths = case.to(device).arguments
    wide_query = torch.full((2, 8, 600), torch.nan, dtype=query.dtype, device=device)
    wide_query[..., :576] = query
    wide_cache = torch.full((len(cache), 17, 640), torch.nan, dtype=query.dtype, device=device)
    wide_cache[:, :16, :576] = cache
    wide_table = torch.cat((table, table), 1)[:, : table.shape[1]]
    buffer = torch.full((2, 9, 520), 7.0, dtype=query.dtype, device=device)
    out = buffer[:, :8, :512]
    views = wide_query[..., :576], wide_cache[:, :16, :576], wide_table, lengths
    assert mla_decode(*views, scale=SCALE, out=out) is out
    assert torch.equal(out.cpu(), expected)
    assert buffer[:, 8].eq(7).all()
    assert buffer[..., 512:].eq(7).all()


def test_equal_batches_give_equal_bits(device: torch.device) -> None:
    case = mla_case(RAGGED)
    first, second = decode(case, device), decode(case, device)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_batch_without_requests_is_no_launch(device: torch.device) -> None:
    case = mla_case((1,)).to(device)
    arguments = case.query[:0], case.cache, case.table[:0], case.lengths[:0]
    assert mla_decode(*arguments, scale=SCALE).shape == (0, 16, 512)


# -- scratch


def test_a_reservation_serves_every_later_batch(device: torch.device) -> None:
    workspace = WorkspaceManager(device)
    case = mla_case((40, 3), heads=8)
    tokens = case.table.shape[1] * case.cache.shape[1]
    limits = {"heads": 8, "rows": 2, "max_tokens": tokens, "dtype": torch.float16}
    size = reserve_mla_decode(workspace, **limits)
    assert size == mla_decode_workspace_bytes(device=workspace.device, **limits)
    workspace.lock()
    decode(case, device)
    assert module._scratch.cached_bytes(workspace.device) == 0
    assert workspace.report().slots[0].bytes == size
    assert workspace.report().slots[0].high_water_owner == "mla_decode"


def test_scratch_of_the_kernel_depends_on_heads_and_device_alone(device: torch.device) -> None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("plain torch takes a request's context instead")
    sizes = [(1, 1024), (1024, 1 << 20)]
    small, large = (
        mla_decode_specs(heads=128, rows=rows, max_tokens=tokens, device=device)
        for rows, tokens in sizes
    )
    assert small == large
    few, many = (
        mla_decode_workspace_bytes(heads=heads, rows=1, max_tokens=1, device=device)
        for heads in (16, 128)
    )
    assert few <= many


# -- errors


def test_arguments_that_do_not_fit_are_named() -> None:
    query, cache, table, lengths = mla_case((5,)).arguments
    wrong = {
        "query": (query[..., :512], cache, table, lengths),
        "kv_cache": (query, cache.float(), table, lengths),
        "block_table": (query, cache, table.long(), lengths),
        "seq_lens": (query, cache, table, lengths.repeat(2)),
        "the last dimension of query": (
            query.repeat_interleave(2, 2)[..., ::2],
            cache,
            table,
            lengths,
        ),
    }
    for name, arguments in wrong.items():
        with pytest.raises(InvalidArgument, match=name):
            mla_decode(*arguments, scale=SCALE)
    with pytest.raises(InvalidArgument, match="out is"):
        mla_decode(query, cache, table, lengths, scale=SCALE, out=query)
    with pytest.raises(InvalidArgument, match="lse_base='10'"):
        mla_decode(query, cache, table, lengths, scale=SCALE, lse_base="10")


def test_the_kernel_says_why_it_does_not_run() -> None:
    arguments = mla_case((5,), dtype=torch.float32).arguments
    with pytest.raises(Unsupported, match="takes bfloat16 or float16, and the query is"):
        mla_decode(*arguments, scale=SCALE, backend="triton")
    arguments = mla_case((5,)).arguments
    with pytest.raises(Unsupported, match="use backend='torch'"):
        mla_decode(*arguments, scale=SCALE, backend="triton")


@pytest.mark.parametrize("apart", [False, True])
def test_every_launch_shape_gives_the_attention(device: torch.device, apart: bool) -> None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("plain torch is not launched")
    from hal.core.kernels.mla_decode_triton import Shape, launch, part_specs

    host = mla_case((70, 3), heads=20)
    case, shape = host.to(device), Shape(16, tile=32, sharing=1, warps=4, stages=2, apart=apart)
    specs = part_specs(20, 512, device, shape)
    parts = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
    out = torch.empty(2, 20, 512, dtype=torch.float16, device=device)
    launch(*case.arguments, SCALE, out, None, 1.0, *parts, shape)
    assert relative_error(out, dense(host)[0]) < TOLERANCE[torch.float16]
