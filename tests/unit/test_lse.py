"""Merging partial attention by its log-sum-exp: declared bases, and shards without a token."""

from __future__ import annotations

import math

import pytest
import torch

from hal.core.kernels.lse import LogBase, merge_attention
from hal.errors import InvalidArgument


def test_r125_the_base_of_the_log_sum_exp_is_declared() -> None:
    outputs = torch.tensor([[0.0], [4.0]])
    natural = torch.tensor([3.0, 5.0]).log()
    merged, total = merge_attention(outputs, natural, base=LogBase.E)
    assert merged.item() == pytest.approx(2.5)
    assert total.item() == pytest.approx(math.log(8))
    merged, total = merge_attention(outputs, natural / math.log(2), base=LogBase.TWO)
    assert merged.item() == pytest.approx(2.5)
    assert total.item() == pytest.approx(3.0)
    wrong, _ = merge_attention(outputs, natural, base=LogBase.TWO)
    assert wrong.item() == pytest.approx(2.3504, abs=1e-4)


def test_r125_an_undeclared_base_is_refused() -> None:
    with pytest.raises(TypeError):
        merge_attention(torch.zeros(2, 1), torch.zeros(2))  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="LogBase"):
        merge_attention(torch.zeros(2, 1), torch.zeros(2), base="e")  # type: ignore[arg-type]


@pytest.mark.parametrize("base", LogBase)
@pytest.mark.parametrize("lse_of_empty", [-torch.inf, 0.0, torch.nan])
def test_r124_an_empty_shard_weighs_exactly_nothing(base: LogBase, lse_of_empty: float) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(6, 4, generator=generator)
    values = torch.randn(6, 4, 16, generator=generator)
    unit = math.log(2) if base is LogBase.TWO else 1.0
    shards = list(zip(scores.split([2, 4]), values.split([2, 4]), strict=True))
    outputs = [(part.softmax(0).unsqueeze(-1) * value).sum(0) for part, value in shards]
    known = [part.logsumexp(0) / unit for part, _ in shards]
    lse = torch.stack([*known, torch.full((4,), lse_of_empty)])
    outputs.append(torch.full((4, 16), torch.nan))
    empty = torch.tensor([False, False, True]).unsqueeze(1)
    merged, total = merge_attention(torch.stack(outputs), lse, base=base, empty=empty)
    torch.testing.assert_close(merged, (scores.softmax(0).unsqueeze(-1) * values).sum(0))
    torch.testing.assert_close(total, scores.logsumexp(0) / unit)


def test_rows_without_any_token_are_zero() -> None:
    outputs = torch.full((2, 3, 8), torch.nan, dtype=torch.bfloat16)
    merged, total = merge_attention(outputs, torch.full((2, 3), -torch.inf), base=LogBase.E)
    assert merged.dtype is torch.bfloat16
    assert not merged.any()
    assert total.isneginf().all()
