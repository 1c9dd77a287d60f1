"""`hal verify` as its users run it: exit statuses, what is printed, and the defects it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from conftest import RunPython
from hal.core.cli import app
from hal.core.verify.breaks import BREAKS
from hal.core.verify.cases import all_cases

FEW = ("--requests", "24", "--cycles", "2")


@dataclass(frozen=True)
class Outcome:
    """What one run of the command did."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The JSON that `--json -` printed."""
        return json.loads(self.out)  # type: ignore[no-any-return]


def hal(*arguments: str) -> Outcome:
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


# ---- it passes -----------------------------------------------------------------------------------


def test_every_case_is_bit_exact_and_the_status_is_0() -> None:
    done = hal("verify", *FEW)
    assert done.status == 0, done.out
    for case in all_cases(2):
        assert re.search(rf"^{case.name} +bit-exact ", done.out, re.MULTILINE), done.out
    assert "bit-exact: 12 cases, 528 requests compared, 0 unstable" in done.out
    assert re.search(r"slept: weights [\d.]+ MiB, runtime .* kv_cache .* workspace", done.out)


@pytest.mark.parametrize("nesting", ["lifo", "fifo", "flatten"])
def test_every_nesting_order_is_bit_exact(nesting: str) -> None:
    done = hal("verify", *FEW, "--platform", "cpu", "--nesting", nesting, "--json", "-")
    assert done.status == 0, done.err
    level_1 = next(case for case in done.report["cases"] if case["name"] == "level-1")
    # With the fallback KV-init state stays outside: it is never put to sleep.
    assert ("runtime" in level_1["slept_bytes"]) is (nesting != "fifo")


@pytest.mark.parametrize("backing", ["anonymous", "pinned", "file"])
def test_every_backing_is_bit_exact(backing: str, tmp_path: Path) -> None:
    chosen = f"file:{tmp_path}" if backing == "file" else backing
    done = hal("verify", *FEW, "--case", "level-1", "--case", "cycles", "--backing", chosen)
    assert done.status == 0, done.out
    assert list(tmp_path.iterdir()) == []


def test_another_seed_is_another_verification_and_passes() -> None:
    done = hal("verify", *FEW, "--case", "level-2", "--seed", "11", "--json", "-")
    assert done.status == 0
    assert done.report["options"]["seed"] == 11


def test_the_json_report_says_what_ran_where(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = hal("verify", *FEW, "--case", "double-sleep", "--json", str(path))
    assert done.status == 0
    assert "bit-exact: 2 cases" in done.out
    report = json.loads(path.read_text())
    assert report["kind"] == "hal verify"
    assert report["schema_version"] == 1
    assert report["passed"] is True
    assert [case["name"] for case in report["cases"]] == ["awake", "double-sleep"]
    assert report["cases"][1]["compared"] == 48
    assert report["options"]["requests"] == 24
    assert report["options"]["break"] is None
    assert report["options"]["execution"] == "eager"
    assert report["environment"]["platform"]
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["environment"]["capabilities"]["pool_nesting"] in ("lifo", "fifo")


# ---- it fails ------------------------------------------------------------------------------------

# break -> (gate, what names it) that its report must hold, all in the case named
NAMED = {
    "runtime-in-kv": [
        (
            "placement",
            "runtime.context_offsets belongs to the runtime pool and lies in the kv_cache",
        ),
        ("audit", "_initialise_kv"),
        ("contents", "runtime.context_offsets (runtime)"),
    ],
    "tag-from-scope": [
        ("placement", "runtime.lengths belongs to the runtime pool and lies in the kv_cache pool"),
        ("contents", "runtime.lengths (runtime)"),
        ("requests", "24 of 24 requests"),
    ],
    "fifo-no-fallback": [
        ("placement", "pages.0 belongs to the kv_cache pool and lies in the runtime pool"),
    ],
    "skip-restore": [
        ("contents", "(weights) does not hold the bytes that it slept with"),
        ("requests", "24 of 24 requests differ"),
    ],
    "bit-flip": [
        ("contents", "(weights) does not hold the bytes that it slept with"),
        ("requests", "requests differ from the awake round"),
    ],
    "bit-flip-file": [
        ("behaviour", "wake_up() raised BackupCorrupted"),
        ("behaviour", "(weights)"),
    ],
    "stale-index": [
        ("requests", "requests differ from the awake round"),
    ],
    "moved-tensor": [
        ("address", "runtime.context_offsets is at"),
    ],
    "kept-backups": [
        ("books", "host bytes"),
    ],
}


def test_every_break_has_a_test() -> None:
    """Those that show in a cell of the matrix alone have theirs in `test_matrix_gates`."""
    assert set(NAMED) == {name for name, entry in BREAKS.items() if entry.cell is None}


def test_a_break_of_a_cell_is_refused_without_it() -> None:
    done = hal("verify", *FEW, "--break", "reset-scales")
    assert done.status == 2
    assert "--cell kv=fp8" in done.err


@pytest.mark.parametrize("name", NAMED)
def test_a_break_is_caught_and_named(name: str) -> None:
    done = hal("verify", *FEW, "--case", "level-1", "--break", name, "--json", "-")
    assert done.status == 1, done.err
    report = done.report
    assert report["passed"] is False
    assert report["options"]["break"] == name
    level_1 = report["cases"][1]
    found = [(finding["gate"], finding["text"]) for finding in level_1["findings"]]
    for gate, text in NAMED[name]:
        assert any(gate == g and text in t for g, t in found), found
    named = [f for f in level_1["findings"] if f["tensor"]]
    assert all(f["segment"] and f["tag"] for f in named)
    assert f"FAILED: {2 - report['cases'][0]['passed']} of 2 cases" in done.err


def test_a_break_leaves_nothing_behind() -> None:
    for name in NAMED:
        hal("verify", *FEW, "--case", "level-1", "--break", name)
    assert hal("verify", *FEW, "--case", "level-1").status == 0


def test_a_flipped_bit_in_a_file_wakes_nothing() -> None:
    """The checksum finds it before the engine could."""
    report = hal(
        "verify", *FEW, "--case", "level-1", "--break", "bit-flip-file", "--json", "-"
    ).report
    level_1 = report["cases"][1]
    assert level_1["rounds"] == 1
    assert level_1["damaged"] == 0


def test_the_command_itself_fails_without_a_traceback(run_python: RunPython) -> None:
    done = run_python(
        "-m", "hal.core.cli", "verify", *FEW, "--case", "level-1", "--break", "bit-flip"
    )
    assert done.returncode == 1
    assert "contents: model." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


# ---- bad usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "nothing"], ["'nothing'", "level-1", "cycles"]),
        (["--break", "nothing"], ["'nothing'", *BREAKS, "help"]),
        (["--platform", "nothing"], ["'nothing'", "cpu"]),
        (["--nesting", "zigzag"], ["--nesting", "zigzag", "lifo", "flatten"]),
        (["--execution", "lazy"], ["--execution", "lazy", "eager", "graphs"]),
        (
            ["--execution", "graphs", "--platform", "cpu"],
            ["--execution graphs", "cpu", "no device graphs"],
        ),
        (["--backing", "tape"], ["'tape'", "anonymous", "file:DIR"]),
        (["--backing", "file:/nowhere/at/all"], ["/nowhere/at/all", "writable"]),
        (["--requests", "0"], ["--requests", "at least 1"]),
        (["--requests", "many"], ["--requests", "integer"]),
        (["--cycles", "-1"], ["--cycles", "at least 1"]),
        (["--device", "99"], ["no device 99"]),
        (["--device", "-1"], ["-1"]),
        (["--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
        (["--break", "tag-from-scope", "--nesting", "fifo"], ["tag-from-scope", "--nesting"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_bad_usage_is_one_clear_line_and_status_2(arguments: list[str], words: list[str]) -> None:
    done = hal("verify", *arguments)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("hal: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err


def test_an_unknown_command_is_bad_usage() -> None:
    done = hal("frobnicate")
    assert done.status == 2
    assert done.err == "hal: No such command 'frobnicate'.\n"


def test_no_command_shows_the_commands() -> None:
    done = hal()
    assert done.status == 2
    assert all(word in done.out for word in ("verify", "probe"))
    assert done.err == ""


def test_breaks_are_listed_one_a_line() -> None:
    done = hal("verify", "--break", "help")
    assert done.status == 0
    assert [line.split()[0] for line in done.out.splitlines()] == list(BREAKS)


def test_cases_are_listed_one_a_line() -> None:
    done = hal("verify", "--case", "help")
    assert done.status == 0
    assert [line.split()[0] for line in done.out.splitlines()] == [c.name for c in all_cases(20)]


# ---- probe ---------------------------------------------------------------------------------------


def test_probe_reports_the_platform() -> None:
    done = hal("probe", "--platform", "cpu", "--json")
    report = json.loads(done.out)
    assert report["platform"]["name"] == "cpu"
    assert done.status == (1 if report["problems"] else 0)


def test_probe_prints_tables_for_people() -> None:
    assert "Capabilities of cpu" in hal("probe", "--platform", "cpu").out
