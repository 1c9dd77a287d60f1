"""Several ranks as real processes: a transition happens on all of them or on none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import ranks

Outcomes = dict[str, list[str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """How each scenario ended on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(ranks.main, (str(folder),), nprocs=2)
    each = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]
    return {name: [outcome[name] for outcome in each] for name in each[0]}


def test_r06_a_second_pause_touches_no_memory_on_any_rank(outcomes: Outcomes) -> None:
    assert outcomes["second_pause"] == ["done", "done"]


def test_r19_sleep_returns_when_every_rank_has_released(outcomes: Outcomes) -> None:
    assert outcomes["delayed"] == ["done", "done"]


def test_r19_the_late_rank_is_named(outcomes: Outcomes) -> None:
    assert outcomes["late"] == ["done", "done"]


def test_a_transition_that_one_rank_fails_is_undone_on_the_others(outcomes: Outcomes) -> None:
    assert outcomes["one_fails"] == ["done", "done"]
