"""The scripts of a pipeline: usage, what they refuse, and how sections add up to a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import verdict
from constraints import missing
from hal.detect import survey

SCRIPTS = ("cuda", "cpu")


def run(
    root: Path, script: str, *arguments: str, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(root / f"ci/{script}.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_section_is_bad_usage(root: Path, tmp_path: Path, script: str) -> None:
    done = run(root, script, "verify", "nothing", env={"OUT": str(tmp_path / "out")})
    assert done.returncode == 2
    assert "there is no section 'nothing'; sections: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_machine_without_the_device_does_not_pass(root: Path, tmp_path: Path) -> None:
    if survey()["cuda"] is None:
        pytest.skip("this machine has the device")
    done = run(root, "cuda", "tests", env={"OUT": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("cuda cannot be used here: ")


@pytest.mark.parametrize(("status", "passed"), [(0, True), (3, False)])
def test_sections_add_up_to_a_verdict(
    root: Path, tmp_path: Path, status: int, passed: bool
) -> None:
    """The shell part, with sections of its own: logs, the last line, seconds and the status."""
    script = tmp_path / "run.sh"
    script.write_text(
        "set -euo pipefail\nplatform=cpu\nsections='good other'\n"
        f"source {root}/ci/common.sh\n"
        "find_python() { :; }\nrequire_platform() { :; }\n"
        "section_good() { section good printf 'one\\n== two ==\\n\\n'; }\n"
        f"section_other() {{ section other bash -c 'echo \"a\tb\" >&2; exit {status}'; }}\n"
        'run_sections "$@"\n'
    )
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(out)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (0 if passed else 1), done.stderr
    report = json.loads((out / "verdict.json").read_text())
    assert report["passed"] is passed
    assert [(s["name"], s["status"], s["said"]) for s in report["sections"]] == [
        ("good", 0, "two"),
        ("other", status, "a b"),
    ]
    assert "== good: printf" in (out / "log.txt").read_text()
    table = done.stdout.splitlines()[-3:]
    assert table[0] == f"cpu: {'passed' if passed else 'FAILED'}"
    assert table[1].split() == ["good", "passed", "0", "s", "two"]


def test_no_section_is_no_pass(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("")
    assert verdict.main("cpu", notes, tmp_path / "verdict.json") == 1


def test_constraints_leave_what_is_installed_alone() -> None:
    lines = ["# versions", "torch==2.13.0", "typing_extensions==4.16.0", "pytest-timeout==2.4.0"]
    assert list(missing(lines, ["Torch", "typing-extensions"])) == ["pytest-timeout==2.4.0"]
    assert len(list(missing(lines, []))) == 3
