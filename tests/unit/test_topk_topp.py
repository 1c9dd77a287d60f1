"""Top-k and top-p: exact in plain torch, and the Triton kernel equal to it bit for bit.

The kernel runs where a device is, and in Triton's interpreter where Triton is installed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hal.core import BackupOptions, SleepManager
from hal.core.kernels import topk_topp
from hal.core.kernels.scratch import KernelScratch
from hal.core.kernels.topk_topp import (
    apply_top_k_top_p,
    draw_bits,
    reserve_topk_topp,
    sample_top_k_top_p,
)
from hal.core.workspace import WorkspaceManager
from hal.cpu.platform import CpuPlatform
from hal.errors import InvalidArgument
from triton_interpreter import interpreter_problem


@pytest.fixture(autouse=True)
def _fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_topp, "_scratch", KernelScratch("topk_topp"))


@pytest.fixture(params=["reference", "interpreted", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the logits are: on the host for the reference and the interpreter."""
    if request.param == "interpreted":
        if problem := interpreter_problem():
            pytest.skip(problem)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def fast_device(device: torch.device) -> torch.device:
    """The same without the interpreter, which takes minutes for a large vocabulary."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("too large for Triton's interpreter")
    return device


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kept_of(logits: Tensor, k: Tensor | None, p: Tensor | None, device: torch.device) -> Tensor:
    """The mask of what stays, on the host."""
    result = apply_top_k_top_p(
        logits.to(device, copy=True),
        k.to(device) if k is not None else None,
        p.to(device) if p is not None else None,
    )
    kept = result.cpu().isfinite()
    assert torch.equal(result.cpu()[kept], logits[kept]), "what stays is not changed"
    return kept


def oracle(row: Tensor, k: int | None, p: float | None) -> list[int]:
    """The indices that stay, by a sort and probabilities in float64."""
    order = sorted(range(len(row)), key=lambda index: (-float(row[index]), index))[: k or None]
    mass = row.double()[order].softmax(0).cumsum(0)
    if p is None or p >= 1:
        return sorted(order)
    reached = (mass >= float(torch.tensor(p))).nonzero()
    return sorted(order[: int(reached[0]) + 1])


def indices(kept: Tensor) -> list[int]:
    return kept.nonzero().flatten().tolist()


@dataclass(frozen=True)
class Rows:
    """Logits of one shape of distribution."""

    name: str
    make: Callable[[int], Tensor]


def _masked(vocabulary: int) -> Tensor:
    logits = randn(2, vocabulary)
    logits[:, torch.arange(vocabulary) % 9 != 0] = -torch.inf
    return logits


def _peaked(vocabulary: int) -> Tensor:
    logits = randn(2, vocabulary)
    logits[:, vocabulary // 3] = 14.0
    return logits


ROWS = (
    Rows("normal", lambda n: randn(2, n)),
    Rows("ties", lambda n: (randn(2, n) * 2).round() / 2),
    Rows("one peak", _peaked),
    Rows("masked", _masked),
    Rows("flat", lambda n: randn(2, n, scale=1e-3)),
    Rows("all equal", lambda n: torch.zeros(2, n)),
    Rows("huge", lambda n: randn(2, n, scale=1e30)),
)
LIMITS: tuple[tuple[int | None, float | None], ...] = (
    (5, None),
    (None, 0.9),
    (20, 0.9),
    (None, 1e-7),
    (1, 1.0),
    (400, 0.5),
)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows.name)
def test_what_stays_is_exact(
    device: torch.device, rows: Rows, limits: tuple[int | None, float | None]
) -> None:
    logits, (k, p) = rows.make(500), limits
    each_k = None if k is None else ints(k, k)
    each_p = None if p is None else torch.full((2,), p)
    kept = kept_of(logits, each_k, each_p, device)
    for row, stays in zip(logits, kept, strict=True):
        expected = [index for index in oracle(row, k, p) if row[index].isfinite()]
        assert indices(stays) == expected


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 1000, 4099])
def test_every_row_has_its_own_limits(device: torch.device, vocabulary: int) -> None:
    logits = randn(5, vocabulary)
    k = ints(3, 0, vocabulary, vocabulary + 7, -1)
    p = torch.tensor([1.0, 0.5, 1.0, 2.0, 0.0])
    kept = kept_of(logits, k, p, device)
    assert kept.sum(1)[0] == min(3, vocabulary)
    assert indices(kept[1]) == oracle(logits[1], None, 0.5)
    assert kept[2].all()
    assert kept[3].all()
    assert indices(kept[4]) == [int(logits[4].argmax())]


def test_the_lowest_index_wins_a_tie(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -0.0, 0.0]])
    assert indices(kept_of(logits, ints(4), None, device)[0]) == [1, 2, 3, 4]
    equal = torch.zeros(1, 10)
    assert indices(kept_of(equal, None, torch.tensor([0.25]), device)[0]) == [0, 1, 2]
    zeros = torch.tensor([[-0.0, 0.0, -1.0]])
    assert indices(kept_of(zeros, ints(1), None, device)[0]) == [0]


def test_nan_and_infinities(device: torch.device) -> None:
    logits = torch.tensor([[torch.nan, 1.0, torch.inf, -torch.inf, 2.0]])
    result = apply_top_k_top_p(logits.to(device, copy=True), ints(2).to(device), None).cpu()
    assert result.tolist() == [[-torch.inf, -torch.inf, torch.inf, -torch.inf, 2.0]]
    nothing = torch.full((1, 40), -torch.inf)
    assert not kept_of(nothing, ints(3), torch.tensor([0.5]), device).any()


def test_a_row_depends_on_no_other(device: torch.device) -> None:
    logits = randn(9, 3000)
    k, p = torch.full((9,), 30, dtype=torch.int32), torch.full((9,), 0.8)
    together = kept_of(logits, k, p, device)
    for row in (0, 4, 8):
        part = slice(row, row + 1)
        assert torch.equal(kept_of(logits[part], k[part], p[part], device)[0], together[row])


def test_r119_padded_and_transposed_rows(device: torch.device) -> None:
    vocabulary = 1000
    buffer = randn(4, vocabulary + 64).to(device)
    before = buffer.clone()
    k, p = torch.full((4,), 40, dtype=torch.int32).to(device), torch.full((4,), 0.9).to(device)
    expected = apply_top_k_top_p(before[:, :vocabulary].contiguous(), k, p)
    assert apply_top_k_top_p(buffer[:, :vocabulary], k, p).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:, :vocabulary], expected)
    assert torch.equal(buffer[:, vocabulary:], before[:, vocabulary:])
    columns = before[:, :vocabulary].t().contiguous()
    apply_top_k_top_p(columns.t(), k, p)
    assert torch.equal(columns.t(), expected)


def test_r120_a_token_with_most_of_the_mass(fast_device: torch.device) -> None:
    logits = randn(3, 32_000, scale=1.0)
    rest = logits.exp().sum(1) - logits[:, 777].exp()
    logits[:, 777] = (rest * 0.6 / 0.4).log()
    assert logits.softmax(1)[:, 777].sub(0.6).abs().max() < 1e-4
    kept = kept_of(logits, ints(50, 50, 50), None, fast_device)
    assert kept.sum(1).tolist() == [50, 50, 50]
    assert all(indices(kept[row]) == oracle(logits[row], 50, None) for row in range(3))
    nucleus = kept_of(logits, None, torch.full((3,), 0.9), fast_device)
    for row in range(3):
        order = logits[row].sort(descending=True, stable=True)
        mass = order.values.double().softmax(0).cumsum(0)
        count = int((mass < 0.9).sum()) + 1
        assert abs(int(nucleus[row].sum()) - count) <= 1, "the sum's last bits may differ"
        stays = order.indices[: int(nucleus[row].sum())]
        assert nucleus[row][stays].all()


def test_r122_rows_whose_values_are_nearly_all_alike(fast_device: torch.device) -> None:
    columns, k = 262_144, 2048
    logits = torch.ones(2, columns)
    logits[:, ::100] += torch.arange(0, columns, 100) * 1e-9
    logits[1, 5::7] = 0.5
    kept = kept_of(logits, ints(k, k), None, fast_device)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(kept, torch.zeros_like(kept).scatter_(1, order, True))


# -- sampling


def draw(
    logits: Tensor, k: Tensor | None, p: Tensor | None, draws: Tensor, device: torch.device
) -> list[int]:
    tokens = sample_top_k_top_p(
        logits.to(device),
        k.to(device) if k is not None else None,
        p.to(device) if p is not None else None,
        draws.to(device),
    )
    found: list[int] = tokens.tolist()
    return found


@pytest.mark.parametrize("limits", [(None, None), *LIMITS], ids=str)
def test_a_draw_is_the_inverse_of_what_is_kept(
    device: torch.device, limits: tuple[int | None, float | None]
) -> None:
    k, p = limits
    logits = randn(4, 500)
    draws = torch.tensor([0, 1 << 29, 1 << 30, (1 << 31) - 1])
    each_k = None if k is None else torch.full((4,), k)
    each_p = None if p is None else torch.full((4,), p)
    for row, token in enumerate(draw(logits, each_k, each_p, draws, device)):
        stays = oracle(logits[row], k, p)
        mass = logits[row].double()[stays].softmax(0).cumsum(0)
        place = int((mass <= float(draws[row]) / (1 << 31)).sum())
        assert token == stays[min(place, len(stays) - 1)]


def test_equal_seeds_draw_equal_tokens_in_any_batch(device: torch.device) -> None:
    logits, seeds = randn(8, 700), torch.arange(8)
    k, p = torch.full((8,), 50), torch.full((8,), 0.95)
    bits = draw_bits(seeds, torch.full((8,), 3))
    together = draw(logits, k, p, bits, device)
    assert draw(logits, k, p, bits, device) == together
    backwards = draw(logits.flip(0), k, p, bits.flip(0), device)
    assert backwards[::-1] == together
    assert draw(logits[5:6], k[5:6], p[5:6], bits[5:6], device) == together[5:6]


def test_draws_follow_the_probabilities() -> None:
    chances = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05])
    count = 4000
    bits = draw_bits(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    tokens = sample_top_k_top_p(chances.log().expand(count, 5), None, None, bits)
    found = tokens.bincount(minlength=5) / count
    assert (found - chances).abs().max() < 0.03
    assert found[2] == 0


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows.name)
def test_the_host_orders_no_more_than_k_needs(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's own result stays what a sort of all of it gives, whatever k its neighbours have."""
    logits = rows.make(1024).repeat(4, 1)
    logits[1] = torch.where(torch.arange(1024) % 2 == 0, 0.0, -0.0)
    logits[2, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf, 1e-40])
    k, p = ints(1, 64, 33, 5, 20, 100, 3, 8), torch.full((8,), 0.9)
    draws = draw_bits(torch.arange(8), torch.arange(8))

    few = sample_top_k_top_p(logits, k, p, draws)
    monkeypatch.setattr(topk_topp, "_places", lambda k, vocabulary: vocabulary)
    assert torch.equal(few, sample_top_k_top_p(logits, k, p, draws))


def splitmix64(seed: int, step: int) -> int:
    """The generator's published form, on unsigned numbers."""
    mask = (1 << 64) - 1
    state = (seed + (step + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@given(st.integers(0, 2**62 - 1), st.integers(0, 1000))
def test_draw_bits_are_splitmix64s(seed: int, step: int) -> None:
    found = draw_bits(torch.tensor([seed]), torch.tensor([step])).item()
    assert found == splitmix64(seed, step) >> 33


def test_draw_bits_spread_over_their_range() -> None:
    bits = draw_bits(torch.arange(1000), torch.arange(1000))
    assert bits.min() >= 0
    assert bits.max() < 1 << 31
    assert len(bits.unique()) == 1000
    assert abs(float(bits.float().mean()) / (1 << 30) - 1) < 0.1


def test_a_row_without_a_token_gives_zero(device: torch.device) -> None:
    nothing = torch.full((2, 50), -torch.inf)
    assert draw(nothing, None, None, torch.tensor([5, 6]), device) == [0, 0]
    assert draw(nothing, ints(3, 3), None, torch.tensor([5, 6]), device) == [0, 0]
    assert draw(nothing, None, torch.tensor([0.5, 0.5]), torch.tensor([5, 6]), device) == [0, 0]


# -- arguments and scratch


@pytest.mark.parametrize(
    ("logits", "k", "p"),
    [
        (torch.zeros(2, 4, dtype=torch.float64), None, None),
        (torch.zeros(4), None, None),
        (torch.zeros(2, 4), ints(1), None),
        (torch.zeros(2, 4), torch.ones(2), None),
        (torch.zeros(2, 4), None, torch.ones(2, dtype=torch.float64)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    logits: Tensor, k: Tensor | None, p: Tensor | None
) -> None:
    with pytest.raises(InvalidArgument):
        apply_top_k_top_p(logits, k, p)
    with pytest.raises(InvalidArgument):
        sample_top_k_top_p(torch.zeros(2, 4), None, None, torch.zeros(3, dtype=torch.int64))


def test_empty_batches_and_no_limits_do_nothing(device: torch.device) -> None:
    assert apply_top_k_top_p(torch.zeros(0, 9, device=device), None, None).shape == (0, 9)
    logits = randn(2, 9).to(device)
    assert torch.equal(apply_top_k_top_p(logits.clone(), None, None), logits)
    assert topk_topp.cached_scratch_bytes(logits.device) == 0


def test_the_reservation_is_rows_times_vocabulary() -> None:
    workspace = WorkspaceManager("cpu")
    size = reserve_topk_topp(workspace, vocabulary=1024, max_num_seqs=2, num_speculative_tokens=3)
    assert size == 8 * 1024 * 4
    at_most = reserve_topk_topp(workspace, vocabulary=1024, max_num_seqs=4096)
    assert at_most == topk_topp.HOST_ROWS * 1024 * 4


def test_without_a_reservation_a_buffer_of_its_own_serves_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            apply_top_k_top_p(randn(2, 64), ints(3, 3), None)
    assert len(caplog.records) == 1
    assert "topk_topp takes" in caplog.text
    assert topk_topp.cached_scratch_bytes(torch.device("cpu")) == 2 * 64 * 4


def test_a_batch_beyond_the_reservation_is_served_too(caplog: pytest.LogCaptureFixture) -> None:
    workspace = WorkspaceManager("cpu")
    reserve_topk_topp(workspace, vocabulary=64, max_num_seqs=2)
    workspace.lock()
    held = workspace.report().bytes
    for _ in range(2):
        kept = kept_of(randn(8, 64), torch.full((8,), 3), None, torch.device("cpu"))
    assert kept.sum(1).eq(3).all()
    assert workspace.report().bytes == held
    assert len(caplog.records) == 1


def test_a_workspace_can_be_named(device: torch.device) -> None:
    workspace = WorkspaceManager(device, debug=True)
    logits = randn(2, 200).to(device)
    apply_top_k_top_p(logits, ints(3, 3).to(device), None, workspace=workspace)
    assert logits.isfinite().sum() == 6
    assert workspace.report().slots[0].high_water_owner == "topk_topp"
    assert topk_topp.cached_scratch_bytes(logits.device) == 0
    assert not workspace.findings


@pytest.fixture
def sleeper() -> Iterator[SleepManager]:
    backup = BackupOptions(backing="anonymous")
    with SleepManager(CpuPlatform(), backup=backup, debug=True) as made:
        yield made


def test_a_burst_of_160_requests_leaves_the_scratch_as_it_is(sleeper: SleepManager) -> None:
    workspace = WorkspaceManager.of(sleeper)
    reserve_topk_topp(workspace, vocabulary=2000, max_num_seqs=64)
    assert not workspace.lock()
    held = workspace.report().slots

    def burst() -> list[int]:
        tokens: list[int] = []
        for start, count in ((0, 64), (64, 64), (128, 32)):
            seeds = torch.arange(start, start + count)
            bits = draw_bits(seeds, torch.zeros_like(seeds))
            limits = 1 + seeds % 80, 0.5 + (seeds % 5) / 10
            tokens += sample_top_k_top_p(randn(count, 2000, seed=start), *limits, bits).tolist()
        return tokens

    before = burst()
    sizes = [(slot.slot, slot.bytes) for slot in held]
    assert [(slot.slot, slot.bytes) for slot in workspace.report().slots] == sizes
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert burst() == before
    assert [(slot.slot, slot.bytes) for slot in workspace.report().slots] == sizes
    assert topk_topp.cached_scratch_bytes(torch.device("cpu")) == 0
    assert not workspace.findings
