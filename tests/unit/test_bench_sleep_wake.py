"""The comparison with peers: its arithmetic, its table, and a small run on the host."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RunPython = Callable[..., subprocess.CompletedProcess[str]]
GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the folder of measurements."""
    monkeypatch.syspath_prepend(str(root / "bench"))
    return importlib.import_module


def cycles(sleep: list[float], wake: list[float], left: int, **more: float) -> dict[str, Any]:
    """Results of 24 GiB, of which 10 GiB more of the host are in use while asleep."""
    seen = {"device": left, "host": 30 * GIB, "cgroup": None}
    return {
        "bytes": 24 * GIB,
        "awake": {"device": 25 * GIB, "host": 6 * GIB, "cgroup": None},
        "cycles": [
            {"sleep_seconds": s, "wake_seconds": w, "asleep": seen, **more}
            for s, w in zip(sleep, wake, strict=True)
        ],
    }


def results(**changed: dict[str, Any]) -> dict[str, Any]:
    size = 24 * GIB / 1e9
    rate = {"out": [50e9], "in": [50e9]}
    found = {
        "link": rate,
        "ours/weights": cycles([size / 20, size / 50], [size / 50] * 2, 600 * MIB),
        "ours-retain/weights": cycles([size / 20, size / 600], [size / 50] * 2, 600 * MIB),
        "ours-park/weights": cycles([1.0], [1.0], 4 * MIB, park_seconds=0.7, unpark_seconds=0.4),
        "ours-ans/weights": {"skipped": "no codec"},
        "tms/weights": cycles([size / 2.5, size / 2], [size / 8] * 2, 700 * MIB),
        "cumem/weights": {"failed": "OSError: no library"},
        "link again": rate,
    }
    return found | changed


def verdicts(module: ModuleType, found: dict[str, Any]) -> dict[str, bool | None]:
    return {figure.name: figure.met for figure in module.figures_of(found)}


def test_what_was_measured_is_held_against_peers_and_link(
    bench: Callable[[str], ModuleType],
) -> None:
    met = verdicts(bench("sleep_wake"), results())
    assert met == dict.fromkeys(met, True)
    assert met.keys() >= {"ours: first sleep", "ours: wake", "ours: residual", "ours-park: park"}
    assert "ours-ans: wake" not in met, "it was skipped"


def test_every_target_can_be_missed(bench: Callable[[str], ModuleType]) -> None:
    size = 24 * GIB / 1e9
    slow = cycles([size / 10, size / 40], [size / 40] * 2, 800 * MIB, held=25 * GIB)
    parked = cycles([1.0], [1.0], 20 * MIB, park_seconds=0.9, unpark_seconds=0.6)
    changed = dict.fromkeys(("ours/weights", "ours-retain/weights", "ours-ans/weights"), slow)
    met = verdicts(bench("sleep_wake"), results(**changed, **{"ours-park/weights": parked}))
    assert met == dict.fromkeys(met, False)
    assert len(met) == 11


def test_without_peers_there_are_no_targets_of_a_device(
    bench: Callable[[str], ModuleType],
) -> None:
    found = {key: value for key, value in results().items() if key != "tms/weights"}
    met = verdicts(bench("sleep_wake"), found)
    assert met["ours: wake"] is None
    assert met["ours-park: park"] is True


def test_the_table_tells_what_was_skipped_and_what_failed(
    bench: Callable[[str], ModuleType],
) -> None:
    module = bench("sleep_wake")
    table = module.markdown(results(), module.figures_of(results()))
    assert "| ours | 20.0 GB/s | 50.0 GB/s | 50.0 GB/s | 600 MiB | 1.000 × the bytes |" in table
    assert "| ours-ans | skipped: no codec |" in table
    assert "| cumem | FAILED: OSError: no library |" in table


@pytest.mark.parametrize(
    ("dtype", "kind", "values"),
    [("bf16", torch.bfloat16, 1000), ("fp8", torch.float8_e4m3fn, 100), ("int8", torch.int8, 100)],
)
def test_weights_have_the_spread_of_their_type(
    bench: Callable[[str], ModuleType], dtype: str, kind: torch.dtype, values: int
) -> None:
    subjects = bench("subjects")
    tensor = subjects.empty(MIB, dtype, torch.device("cpu"))
    assert tensor.dtype is kind
    assert tensor.nbytes == MIB
    subjects.write(tensor.view(torch.uint8), dtype)
    assert len(tensor.float().unique()) > values
    deviation = tensor.float().std() / tensor.float().abs().max()
    assert 0.1 < deviation < 0.3


def test_a_library_is_found_by_the_name_of_its_file(bench: Callable[[str], ModuleType]) -> None:
    loaded = bench("subjects").loaded
    assert Path(loaded("libc.so")).is_file()
    assert loaded("libnothing") is None


def test_a_small_run_on_the_host(run_python: RunPython, root: Path, tmp_path: Path) -> None:
    done = run_python(
        str(root / "bench/sleep_wake.py"),
        *("--platform", "cpu", "--mib", "8", "--cycles", "2", "--parts", "weights"),
        *("--dtypes", "bf16", "--subjects", "ours", "ours-park", "cumem"),
        *("--json", "out.json", "--markdown", "out.md"),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"] is True
    assert report["environment"]["platform"]["name"] == "cpu"
    assert len(report["results"]["ours/weights"]["cycles"]) == 2
    assert (tmp_path / "out.md").read_text() in done.stdout
    assert "no target missed" in done.stdout
    assert "ours-park/weights: skipped: parking is not supported on cpu" in done.stdout
    assert "cumem/weights: skipped" in done.stdout
