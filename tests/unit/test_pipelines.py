"""The workflow files and the pipelines of the matrix: every script is there and is called."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import pipelines

ROOT = Path(__file__).resolve().parents[2]
FOUND = pipelines.pipelines()


@pytest.mark.parametrize("name", FOUND)
def test_a_pipeline_has_a_script_that_can_be_run_and_a_tier(name: str) -> None:
    script = ROOT / FOUND[name]["script"]
    assert os.access(script, os.X_OK)
    assert FOUND[name]["tier"] in ("quick", "ci", "full")
    assert FOUND[name]["labels"]


def test_every_vendor_has_a_pipeline() -> None:
    assert {"cpu", "cuda", "rocm", "xpu", "emulated"} <= set(FOUND)


def test_github_gets_one_job_a_vendor(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipelines.main(["github"]) == 0
    jobs = json.loads(capsys.readouterr().out)
    assert [job["vendor"] for job in jobs] == list(FOUND)
    workflow = (ROOT / ".github/workflows/verify.yml").read_text()
    for field in ("vendor", "script", "labels", "minutes", "tier"):
        assert f"${{{{ matrix.{field} }}}}" in workflow
        assert all(field in job for job in jobs)


def test_buildkite_gets_one_step_a_vendor(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipelines.main(["buildkite", "cpu", "rocm"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["command"] for step in steps] == ["ci/cpu.sh", "ci/rocm.sh"]
    assert [step["agents"]["queue"] for step in steps] == ["default", "rocm"]
    assert "ci/pipelines.py buildkite" in (ROOT / ".buildkite/pipeline.yml").read_text()


@pytest.mark.parametrize("arguments", [[], ["jenkins"], ["github", "tpu"]])
def test_bad_usage_says_what_there_is(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipelines.main(arguments) == 2
    assert "Pipelines: cpu, emulated, cuda" in capsys.readouterr().err
