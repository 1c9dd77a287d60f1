"""Every gate of a cell can fail, and faults end as they must: each defect is caught and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hal.core.verify.breaks import BREAKS
from hal.core.verify.history import HOST_ALLOWANCE, History, Line
from hal.core.verify.matrix.cells import Site, run_cell
from hal.core.verify.matrix.report import CellResult, Verdict
from hal.core.verify.matrix.table import Matrix
from hal.core.verify.report import Gate

MATRIX = Matrix.load(Path(__file__).resolve().parents[2] / "ci" / "matrix.toml")
REQUESTS = 12
NO_FAULTS = ("none", "host_register@sleep")
"""Of the axis: nothing, and what only pinned memory has."""
FAULTS = [value for value in MATRIX.axes["fault"] if value not in NO_FAULTS]
CAUGHT_BY = {
    "runtime-in-kv": {Gate.PLACEMENT, Gate.AUDIT, Gate.CONTENTS},
    "tag-from-scope": {Gate.PLACEMENT, Gate.CONTENTS, Gate.REQUESTS},
    "fifo-no-fallback": {Gate.PLACEMENT},
    "skip-restore": {Gate.CONTENTS, Gate.REQUESTS},
    "bit-flip": {Gate.CONTENTS, Gate.REQUESTS},
    "bit-flip-file": {Gate.BEHAVIOUR},
    "stale-index": {Gate.REQUESTS},
    "moved-tensor": {Gate.ADDRESS},
    "device-leak": {Gate.BOOKS, Gate.CREEP},
    "host-leak": {Gate.CREEP},
    "kept-backups": {Gate.BOOKS},
    "reset-scales": {Gate.CONTENTS, Gate.REQUESTS},
    "lost-adapters": {Gate.CONTENTS, Gate.REQUESTS},
    "stale-states": {Gate.REQUESTS},
    "half-awake": {Gate.FAULTS},
}


def run(cell: str, defect: str | None = None) -> CellResult:
    return run_cell(Site("cpu", break_name=defect), MATRIX.parse(cell), REQUESTS)


def test_every_break_and_every_gate_is_here() -> None:
    assert set(CAUGHT_BY) == set(BREAKS)
    assert set().union(*CAUGHT_BY.values()) == set(Gate)


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_break_fails_its_cell_at_its_gates(name: str) -> None:
    result = run(BREAKS[name].cell or "base", name)
    found = {finding.gate for finding in result.findings}
    assert result.verdict is Verdict.FAILED
    assert CAUGHT_BY[name] <= found, [str(finding) for finding in result.findings]
    assert result.reason


@pytest.mark.parametrize("cell", sorted({entry.cell for entry in BREAKS.values() if entry.cell}))
def test_the_same_cells_pass_without_the_break(cell: str) -> None:
    result = run(cell)
    assert result.verdict is Verdict.PASSED, [str(finding) for finding in result.findings]


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [value for value in MATRIX.axes["fault"] if value not in ("none", "host_register@sleep")],
)
def test_a_fault_at_every_position_is_survived(fault: str) -> None:
    result = run(f"fault={fault}")
    assert result.verdict is Verdict.PASSED, [str(finding) for finding in result.findings]
    assert result.faults > 0


def test_a_fault_that_is_never_reached_is_no_pass() -> None:
    cell = MATRIX.parse("base")
    unreached = replace(cell, values={**cell.values, "fault": "host_register@sleep"})
    result = run_cell(Site("cpu"), unreached, REQUESTS)
    assert "no call of host_register was there to fail" in result.reason


# ---- slopes --------------------------------------------------------------------------------------


def test_a_line_is_fitted_after_the_warm_up() -> None:
    assert Line.through([1] * 9) is None
    flat = Line.through([9_000_000, 8_000_000, *[5] * 10])
    assert flat is not None
    assert (flat.cycles, flat.slope, flat.error) == (8, 0.0, 0.0)
    rising = Line.through([1000 * cycle for cycle in range(30)])
    assert rising is not None
    assert rising.slope == pytest.approx(1000)
    assert "MiB a cycle over 20 cycles" in str(rising)


def test_device_memory_may_not_grow_by_a_byte_and_host_memory_by_a_little() -> None:
    history = History(None, {})
    history.device = [5] * 29 + [6]
    history.host = [cycle * HOST_ALLOWANCE // 40 for cycle in range(30)]
    assert [f.gate for f in history.creep()] == [Gate.CREEP]
    history.device = [5] * 30
    assert not list(history.creep())
    history.host = [cycle * HOST_ALLOWANCE // 10 for cycle in range(30)]
    assert ["host memory" in f.text for f in history.creep()] == [True]
