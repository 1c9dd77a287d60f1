"""The measurements of kernels: their arithmetic, and peers that are missing or fail."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console


@pytest.fixture
def cells(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "bench"))
    return importlib.import_module("kernel_cells")


def test_a_cell_is_held_against_a_copy_and_against_its_peers(cells: ModuleType) -> None:
    peers = (
        cells.measured_peer("fast", lambda: 50e-6),
        cells.Peer("slow", 300.0, measured=False),
    )
    cell = cells.Cell(
        "MLA decode", "triton", {"B": 64, "KV": 8192}, 100.0, 9.0, 400_000_000, 4e12, peers
    )
    assert cell.floor_microseconds == 100.0
    assert cell.share == 1.0
    assert cell.gigabytes_per_second == 4000.0
    found = cell.as_dict()
    assert found["times_faster"] == {"fast": pytest.approx(0.5), "slow": 3.0}
    assert found["sizes"] == {"B": 64, "KV": 8192}


def test_a_peer_that_fails_is_told_and_stops_nothing(cells: ModuleType) -> None:
    def broken() -> float:
        raise ImportError("no such library")

    peer = cells.measured_peer("vLLM", broken)
    cell = cells.Cell("sampler", "mask", {"B": 1, "k": None}, 10.0, 1.0, 1000, 1e9, (peer,), False)
    assert peer.why_not == "ImportError: no such library"
    assert cell.as_dict()["times_faster"] == {}
    text = io.StringIO()
    Console(file=text, width=200).print(cells.table_of([cell], "kernels"))
    assert "vLLM does not run" in text.getvalue()
    assert "NO" in text.getvalue()
    assert "k=" not in text.getvalue(), "a size that is not set is not shown"
