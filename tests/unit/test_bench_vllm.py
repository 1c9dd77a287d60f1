"""What `bench/vllm_sleep.py` makes of its runs: figures, targets, and a run that differs."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from conftest import ROOT

MIB = 1 << 20


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("vllm_sleep")


def run(first: float, later: float, *, pinned: int = 100, same: bool = True) -> dict[str, Any]:
    return {
        "checks": {"cycle 0": True, "cycle 1": same},
        "sleeps": [first, later, later],
        "wakes": [0.2, 0.2],
        "asleep": {"device_used": 1200 * MIB, "process_used": None, "pinned": pinned},
        "weight_bytes": 100,
        "events": [{"device_used": 600 * MIB}],
        "many": {"asleep": [5 * MIB] * 10},
    }


def figures(bench: ModuleType, name: str, found: dict[str, Any], stock: dict[str, Any]) -> Any:
    return {f.name.partition(": ")[2]: f for f in bench.figures_of(name, found, stock)}


def test_figures_stand_beside_the_stock_allocators(bench: ModuleType) -> None:
    found = figures(bench, "hal", run(0.9, 0.05), run(10.0, 0.25, pinned=129))
    assert found["first sleep"].value == pytest.approx(900)
    assert found["later sleep"].ratio == pytest.approx(0.2)
    assert found["host memory a byte kept"].against == pytest.approx(1.29)
    assert found["device memory a cycle"].value == 0
    assert all(figure.met is not False for figure in found.values())


def test_a_slow_sleep_and_a_round_that_differs_miss_their_targets(bench: ModuleType) -> None:
    found = figures(bench, "hal", run(0.9, 0.07, same=False), run(10.0, 0.25))
    missed = {name for name, figure in found.items() if figure.met is False}
    assert missed == {"later sleep", "rounds that differ"}


def test_a_parked_process_is_measured_by_what_the_device_lost(bench: ModuleType) -> None:
    found = run(0.9, 0.5)
    found["asleep"]["device_used"] = 617 * MIB
    assert figures(bench, "hal-park", found, {})["process parked"].met is False
    found["asleep"]["process_used"] = 12 * MIB
    assert figures(bench, "hal-park", found, {})["process parked"].met is True


def test_an_engine_that_did_not_start_has_no_figures(bench: ModuleType) -> None:
    assert figures(bench, "hal", {"checks": {}}, {}) == {}
