"""The measurements: their arithmetic, their verdicts, and small runs on the host and on an emulated
device.
"""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from emulator.platforms import EmulatedCudaPlatform
from hal.cpu.platform import CpuPlatform
from support import MIB, books

Import = Callable[[str], ModuleType]
RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Imports a module of the folder of measurements."""
    monkeypatch.syspath_prepend(str(root / "bench"))
    return importlib.import_module


# ---- figures -------------------------------------------------------------------------------------


def test_a_figure_is_held_against_the_median_of_its_reference(bench: Import) -> None:
    figure = bench("figures").Figure
    assert figure("sleep", "GB/s", (9.0, 10.0, 50.0), "copy", (1.0, 10.0, 10.0)).ratio == 1.0
    assert figure("sleep", "GB/s", (9.0,), "copy", (10.0,), at_least=0.9).met is True
    assert figure("sleep", "GB/s", (8.0,), "copy", (10.0,), at_least=0.9).met is False
    assert figure("wake", "ms", (100.0,), at_most=100.0).met is True
    assert figure("wake", "ms", (100.1,), at_most=100.0).met is False
    assert figure("wake", "ms", (100.1,)).met is None


def test_a_missed_target_fails_the_run_and_is_named(
    bench: Import, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = bench("figures")
    missed = figures.Figure("sleep", "GB/s", (8.0,), "copy", (10.0,), at_least=0.98)
    met = figures.Figure("wake", "ms", (9.0,), at_most=100.0)
    path = tmp_path / "report.json"
    assert figures.finish("transfer", CpuPlatform(), [missed, met], {"rounds": 1}, path) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "MISSED: sleep 0.800 (ratio ≥ 0.98)"
    report = json.loads(path.read_text())
    assert report["passed"] is False
    assert [figure["met"] for figure in report["figures"]] == [False, True]
    assert report["settings"] == {"rounds": 1}
    assert report["environment"]["platform"]["name"] == "cpu"
    assert figures.finish("transfer", CpuPlatform(), [met], {}, None) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "targets met: wake 9.00 ms"


# ---- transfers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [16 * MIB, 1024 * MIB, 24 * 1024 * MIB, 5 * MIB + 512])
def test_a_decoders_sizes_add_up(bench: Import, total: int) -> None:
    sizes = bench("transfer").decoder_sizes(total)
    assert sum(sizes) == total
    assert total < 1024 * MIB or len(set(sizes)) > 4


def test_the_host_is_measured_against_plain_copies(run_python: RunPython, root: Path) -> None:
    done = run_python(
        str(root / "bench/transfer.py"),
        *("--platform", "cpu", "--mib", "8", "--rounds", "2", "--json", "out.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "2 figures, no targets on this platform" in done.stdout


def test_a_device_with_its_own_memory_is_held_to_its_link(
    bench: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, size = bench("transfer"), 8 * MIB
    monkeypatch.setattr(transfer, "link_of", lambda platform, size: bench("links").HostLink(size))
    platform = EmulatedCudaPlatform()
    before = books(platform)
    steady, fresh = transfer.measure(platform, size, rounds=2, backing="pinned")
    figures = {figure.name: figure for figure in transfer.figures_of(size, steady, fresh)}
    bound = {name: figure.at_least for name, figure in figures.items() if figure.at_least}
    assert bound == {
        "sleep": 0.98,
        "wake": 0.98,
        "first sleep": 0.8,
    }
    assert all(figure.value > 0 for figure in figures.values())
    assert books(platform) == before


def test_weights_that_change_are_no_measurement(bench: Import) -> None:
    transfer, platform = bench("transfer"), CpuPlatform()
    with transfer.SleepManager(platform) as sleeper:
        weights = transfer.Weights(sleeper, 2 * MIB)
        weights.check()
        weights.tensors[-1][5] ^= 1
        with pytest.raises(RuntimeError, match="the rates mean nothing"):
            weights.check()


# ---- pools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [CpuPlatform, EmulatedCudaPlatform])
def test_pools_are_measured_and_given_back(bench: Import, make: type[CpuPlatform]) -> None:
    pools, platform = bench("pools"), make()
    before = books(platform)
    scale = pools.Scale(touched=7, small=40, kv_cache=4 * MIB, kv_piece=MIB, segment=4 * MIB)
    run = pools.Bench(platform, scale, rounds=1)
    parts = (pools.first_touch, pools.small_tensors, pools.kv_cache, pools.segment)
    figures = [figure for part in parts for figure in part(run)]
    assert len({figure.name for figure in figures}) == len(figures) == 11
    assert all(figure.value > 0 for figure in figures)
    assert books(platform) == before


def test_the_wake_of_a_kv_cache_has_a_target_on_accelerators(
    bench: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = bench("pools")
    tiny = pools.Scale(touched=1, small=1, kv_cache=4 * MIB, kv_piece=MIB, segment=MIB)
    monkeypatch.setattr(pools, "ACCELERATOR", tiny)
    woke, round_trip, at_once = pools.kv_cache(pools.Bench(EmulatedCudaPlatform(), tiny, rounds=1))
    assert woke.at_most == 100.0
    assert round_trip.value > woke.value
    assert at_once.at_most is None


# ---- cycles --------------------------------------------------------------------------------------


def test_cycles_look_at_a_devices_own_memory(bench: Import) -> None:
    cycles = bench("cycles")
    outcome = cycles.run(EmulatedCudaPlatform(), cycles=6, warm_up=2, backing="pinned")
    assert outcome.before == outcome.after
    assert outcome.device.growth == 0
    assert "device memory +0.000 MiB a cycle" in cycles.verdict(outcome)
    host = cycles.run(CpuPlatform(), cycles=6, warm_up=2, backing="anonymous")
    assert host.device is None


def test_a_page_of_device_memory_that_stays_is_not_clean(bench: Import) -> None:
    cycles = bench("cycles")
    books_, flat = cycles.Books({"segments": 1}, 5, 0), cycles.fit([0] * 100)
    kept = cycles.Outcome(books_, books_, (5, 5), flat, flat)
    one_page = cycles.fit([0] * 50 + [2 * MIB] * 50)
    assert kept.is_clean
    assert not cycles.Outcome(books_, books_, (5, 5), flat, one_page).is_clean
    assert cycles.verdict(cycles.Outcome(books_, books_, (5, 6), flat, flat)).startswith("NOT")
