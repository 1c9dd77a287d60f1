"""Reports of the matrix: values, JUnit, comparison, and crashes that cost one cell."""

from __future__ import annotations

import gzip
import io
import json
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hal.core.verify.matrix import workers
from hal.core.verify.matrix.cells import Site
from hal.core.verify.matrix.compare import compare, lines, read
from hal.core.verify.matrix.junit import junit
from hal.core.verify.matrix.plan import MatrixOptions, make_plan
from hal.core.verify.matrix.report import CellResult, MatrixReport, Verdict
from hal.core.verify.matrix.table import Cell, Matrix
from hal.core.verify.matrix.terminal import summarize, verdict_line
from hal.core.verify.report import Finding, Gate
from hal.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]
MATRIX = Matrix.load(ROOT / "ci" / "matrix.toml")
CELLS = ("base", "sleep=level-2", "execution=graphs")


class Silent:
    def finished(self, result: CellResult) -> None: ...


def run(*cells: str, **options: Any) -> MatrixReport:
    chosen = MatrixOptions(platform="cpu", cells=cells, requests=8, jobs=0, bench=False, **options)
    return make_plan(chosen).run(Silent())


@pytest.fixture(scope="module")
def passed() -> MatrixReport:
    return run(*CELLS)


@pytest.fixture(scope="module")
def failed() -> MatrixReport:
    return run(*CELLS, break_name="stale-index")


def test_a_report_is_plain_values_with_a_version(passed: MatrixReport) -> None:
    report = json.loads(json.dumps(passed.as_dict()))
    assert (report["kind"], report["schema_version"]) == ("hal verify --matrix", 1)
    assert report["passed"] is True
    assert [cell["verdict"] for cell in report["cells"]] == ["passed", "passed", "unsupported"]
    base = report["cells"][0]
    assert base["compared"] == 8 * 5
    assert base["command"] == "hal verify --platform cpu --cell base --requests 8 --seed 0"
    assert base["timeline"][0]["transition"] == "sleep"
    assert set(base["timeline"][0]["mapped"]) == {"weights", "runtime", "kv_cache", "workspace"}
    assert report["cells"][2]["reason"] == "execution=graphs: the host has no device graphs"


def test_a_report_of_a_defect_names_it_and_how_to_see_it_again(failed: MatrixReport) -> None:
    report = failed.as_dict()
    assert report["passed"] is False
    base = report["cells"][0]
    assert base["verdict"] == "failed"
    assert base["reason"].startswith("requests: ")
    assert base["command"].endswith("--break stale-index")
    assert "FAILED: 2 of 2 cells" in verdict_line(failed)


def test_problems_with_the_set_fail_a_run_whose_cells_pass(passed: MatrixReport) -> None:
    assert passed.passed
    report = replace(passed, problems=("cell x has vanished",))
    assert not report.passed
    assert "1 problems with the set of cells" in verdict_line(report)
    assert not replace(passed, cells=passed.of(Verdict.UNSUPPORTED)).passed, "nothing ran"


def test_the_terminal_says_what_failed_and_what_could_not_run(failed: MatrixReport) -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    summarize(console, failed)
    text = console.export_text()
    assert "hal verify --platform cpu --cell sleep=level-2" in text
    assert "unsupported: execution=graphs: the host has no device graphs [1]" in text
    assert "FAILED: 2 of 2 cells" in text


# ---- JUnit ---------------------------------------------------------------------------------------


def test_junit_has_a_case_for_each_cell_and_one_for_the_set(failed: MatrixReport) -> None:
    suite = ElementTree.fromstring(junit(failed).encode()).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {*CELLS, "the set of cells"}
    failure = cases["base"].find("failure")
    assert failure is not None
    assert "--cell base" in (failure.text or "")
    skipped = cases["execution=graphs"].find("skipped")
    assert skipped is not None
    assert "no device graphs" in (skipped.get("message") or "")


def test_junit_survives_text_that_xml_cannot_hold(passed: MatrixReport) -> None:
    finding = Finding(Gate.BEHAVIOUR, "bad \x00 <byte> & more")
    cell = replace(passed.cells[0], verdict=Verdict.FAILED, findings=(finding,), reason="x")
    text = junit(replace(passed, cells=(cell,), problems=("a set",)))
    failures = [f.text for f in ElementTree.fromstring(text.encode()).iter("failure")]
    assert "bad � <byte> & more" in (failures[0] or "")
    assert failures[1] == "a set"


# ---- comparison ----------------------------------------------------------------------------------


def test_a_report_equals_itself(passed: MatrixReport) -> None:
    comparison = compare(passed.as_dict(), passed.as_dict())
    assert comparison.same
    assert comparison.agreeing == 3
    assert list(lines(comparison))[-1] == "no difference, 3 cells agree"


def test_what_differs_is_named_cell_by_cell(passed: MatrixReport, failed: MatrixReport) -> None:
    other = replace(failed, cells=failed.cells[1:])
    comparison = compare(passed.as_dict(), other.as_dict())
    found = [(d.cell, d.first, d.second) for d in comparison.differences]
    assert found == [("base", "passed", None), ("sleep=level-2", "passed", "failed")]
    text = list(lines(comparison))
    assert "requests differ" in text[2]
    assert text[-1] == "2 cells differ, 1 cells agree"


def test_reports_are_read_as_written_or_compressed(passed: MatrixReport, tmp_path: Path) -> None:
    text = json.dumps(passed.as_dict()).encode()
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text))
    assert read(tmp_path / "a.json") == read(tmp_path / "a.json.gz")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "no JSON"), ("[]", "no report"), ('{"kind": "hal verify"}', "no report")],
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=words):
        read(path)


# ---- processes -----------------------------------------------------------------------------------


def crash_on_level_2(site: Site, cell: Cell, requests: int) -> CellResult:
    """In place of a cell: a driver that takes the process with it."""
    if cell["sleep"] == "level-2":
        os._exit(11)
    return CellResult(cell.name, cell.values, "", Verdict.PASSED)


def test_a_crash_is_one_failed_cell_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "run_cell", crash_on_level_2)
    names = ("base", "sleep=level-2", "wake=cache-first", "sleep=kv-only")
    jobs = [workers.Job(MATRIX.parse(name), 8) for name in names]
    results = {result.name: result for result in workers.run(Site("cpu"), jobs, 1)}
    assert set(results) == set(names)
    assert [n for n, r in results.items() if r.verdict is Verdict.FAILED] == ["sleep=level-2"]
    assert "its process died" in results["sleep=level-2"].reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tier": "huge"}, "unknown tier 'huge'; tiers: quick, ci, full"),
        ({"cells": ("colour=red",)}, "no axis 'colour'"),
        ({"requests": 0}, "--requests must be at least 1"),
        ({"break_name": "nothing"}, "unknown break"),
        ({"matrix_file": Path("/nowhere.toml")}, "cannot be read"),
    ],
)
def test_a_bad_option_is_an_error_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make_plan(MatrixOptions(platform="cpu", **options))
