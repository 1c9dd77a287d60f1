"""The examples run as they are."""

from __future__ import annotations

from conftest import ROOT, RunPython


def test_the_custom_engine_wakes_bit_exact(run_python: RunPython) -> None:
    done = run_python(str(ROOT / "examples" / "custom_engine.py"), env={"HAL_PLATFORM": "cpu"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "bit-exact"
