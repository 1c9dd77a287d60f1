"""What of ROCm is missing, one line a piece, and which of several amdsmi packages is taken."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import RunPython
from hal.rocm import installation, kfd, smi, telemetry
from hal.rocm.kfd import Gpu
from hal.rocm.platform import RocmPlatform, _doubts
from hal.rocm.visibility import VisibleDevices
from hal.torch_build import TorchBuild

HIP_TORCH = TorchBuild("2.13.0+rocm7.2", {"hip": "7.2.53211"})
ONE = (Gpu("0000:03:00.0"),)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without ROCm, whatever this one has."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(installation.VARIABLE, raising=False)
    monkeypatch.setattr(kfd, "DEVICE_FILE", tmp_path / "dev-kfd")
    monkeypatch.setattr(kfd, "TOPOLOGY", tmp_path / "nodes")
    monkeypatch.setattr(installation, "loads", lambda name: False)
    monkeypatch.setattr(installation, "_bundled_runtimes", list)
    monkeypatch.setattr(installation, "torch_build", lambda: TorchBuild("2.13.0+cpu"))
    monkeypatch.setattr(smi, "installations", lambda: (tmp_path / "rocm",))
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "amdsmi"}
    yield
    sys.modules.pop("amdsmi", None)
    sys.modules.update(loaded)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is missing."""
    kfd.DEVICE_FILE.touch()
    monkeypatch.setattr(kfd, "gpus", lambda: ONE)
    monkeypatch.setattr(telemetry, "visible", lambda: VisibleDevices(ONE))
    monkeypatch.setattr(installation, "loads", lambda name: name == "libamdhip64.so.6")
    monkeypatch.setattr(installation, "torch_build", lambda: HIP_TORCH)


def add_package(root: Path, version: str, code: str = "") -> Path:
    """An amdsmi as a ROCm installation has it."""
    package = root / "share" / "amd_smi" / "amdsmi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code or f"WHERE = {str(root)!r}\n")
    (package / "_version.py").write_text(f'__version__ = "{version}"\n')
    return package


def test_each_missing_piece_is_one_line_with_what_was_looked_for_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smi, "versions", dict)
    gpu, runtime, torch, package = RocmPlatform.missing()
    assert "no AMD GPU was found, looked for" in gpu
    assert "amdgpu" in gpu
    assert "--device=/dev/kfd" in gpu
    assert "looked for libamdhip64.so.7, libamdhip64.so.6, libamdhip64.so" in runtime
    assert "install ROCm's package hip-runtime-amd" in runtime
    assert "torch 2.13.0+cpu (built for cpu) cannot use ROCm" in torch
    assert "amdsmi, for memory queries, was not found" in package
    assert "amd-smi-lib" in package
    assert all("\n" not in line for line in (gpu, runtime, torch, package))
    assert RocmPlatform.why_not() == "; ".join((gpu, runtime, torch)), "amdsmi is not needed"


def test_nothing_is_missing_where_all_is_installed(installed: None) -> None:
    assert RocmPlatform.missing() == ()
    assert RocmPlatform.why_not() is None
    assert list(RocmPlatform.notices()) == []


def test_a_device_file_without_permission(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != kfd.DEVICE_FILE)
    (line,) = RocmPlatform.missing()
    assert "may not open" in line
    assert "groups render and video" in line


def test_a_container_without_render_nodes(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kfd, "gpus", tuple)
    (line,) = RocmPlatform.missing()
    assert "--device=/dev/dri" in line


def test_r86_gpus_that_the_variables_hide(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = VisibleDevices((), "HIP_VISIBLE_DEVICES='7' ends at '7'")
    monkeypatch.setattr(telemetry, "visible", lambda: hidden)
    why_not = RocmPlatform.why_not() or ""
    assert "none of the 1 AMD GPUs is visible: HIP_VISIBLE_DEVICES='7' ends at '7'" in why_not
    assert "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES" in why_not


def test_r86_contradicting_variables_are_a_notice(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = VisibleDevices(ONE, warning="two variables differ")
    monkeypatch.setattr(telemetry, "visible", lambda: shown)
    assert list(RocmPlatform.notices()) == ["two variables differ"]


def test_a_runtime_that_torch_brings_is_enough_and_is_not_loaded(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(installation, "loads", lambda name: bool(asked.append(name)))
    monkeypatch.setattr(installation, "_bundled_runtimes", lambda: [Path("libamdhip64.so")])
    assert RocmPlatform.why_not() is None
    assert asked == [], "a second instance beside torch's would be there for good"


def test_the_runtimes_that_packages_bring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    package = tmp_path / "_rocm_sdk_core"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lib" / "libamdhip64.so.7").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert installation._bundled_runtimes() == [package / "lib" / "libamdhip64.so.7"]


def test_a_named_runtime_that_does_not_load(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(installation.VARIABLE, "/nowhere/libamdhip64.so")
    assert RocmPlatform.why_not() == (
        "HAL_LIBAMDHIP64='/nowhere/libamdhip64.so' names no library that loads"
    )


def test_torch_that_is_not_there(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "torch_build", lambda: None)
    assert "torch is not installed" in (RocmPlatform.why_not() or "")


PROBE = """
import sys
from hal.__main__ import main
sys.exit(main(["--platform", "rocm"]))
"""


def test_the_report_on_a_machine_without_rocm(run_python: RunPython) -> None:
    if RocmPlatform.why_not() is None:
        pytest.skip("this machine has ROCm")
    done = run_python("-c", PROBE, env={"COLUMNS": "500"})
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    problems = [line for line in done.stdout.splitlines() if "x " in line and "rocm: " in line]
    assert len(problems) >= 3, done.stdout


# ---- amdsmi --------------------------------------------------------------------------------------


def test_the_package_of_the_installation_comes_before_that_of_the_environment(
    tmp_path: Path,
) -> None:
    add_package(tmp_path / "rocm", "26.1.0")
    assert str(tmp_path / "rocm") == smi.import_package().WHERE


def test_a_package_that_fails_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(tmp_path / "rocm", "6.0", "print('no library'); raise KeyError('libamd_smi.so')")
    add_package(tmp_path / "other", "26.1.0")
    monkeypatch.setattr(smi, "installations", lambda: (tmp_path / "rocm", tmp_path / "other"))
    assert str(tmp_path / "other") == smi.import_package().WHERE


def test_packages_that_all_fail_are_all_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(tmp_path / "rocm", "6.0", "print('no library'); raise KeyError('libamd_smi.so')")
    monkeypatch.setattr(smi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(smi.NoAnswerError, match=r"rocm fails with KeyError: 'libamd_smi.so'"):
        smi.import_package()
    assert "amdsmi" not in sys.modules
    assert capsys.readouterr().out == ""


def test_the_package_that_torch_has_imported_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(tmp_path / "rocm", "26.1.0")
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    assert smi.import_package() is smi


def test_both_versions_are_told(installed: None, tmp_path: Path) -> None:
    add_package(tmp_path / "rocm", "26.1.0")
    versions = smi.versions()
    assert versions[f"amdsmi of {tmp_path / 'rocm'}"] == "26.1.0"
    assert "amdsmi of this environment" in versions
    (notice,) = RocmPlatform.notices()
    assert f"amdsmi of {tmp_path / 'rocm'} has version 26.1.0; amdsmi of this" in notice
    assert "amdsmi" not in sys.modules, "to tell versions imports nothing"


# ---- the version of HIP --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_old"),
    [
        ("HIP 5.3.10000 (release: plain)", True),
        ("HIP 6.3.42133 (release: plain)", True),
        ("HIP 6.3.42134 (release: plain)", False),
        ("HIP 7.2.26015 (release: plain)", False),
        ("HIP 10.0.1 (release: plain)", False),
    ],
)
def test_releases_below_6_3_4_are_warned_of(version: str, is_old: bool) -> None:
    assert any("older than ROCm 6.3.4" in doubt for doubt in _doubts(version)) == is_old


def test_releases_that_keep_files_open_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "hal.rocm.platform.resource.getrlimit"
    monkeypatch.setattr(limit, lambda which: (1024, 1 << 20))
    (doubt,) = _doubts("HIP 7.2.26015 (release: placeholder)")
    assert "may open 1024; raise it with ulimit -n" in doubt
    assert list(_doubts("HIP 7.2.26015 (release: plain)")) == []
    monkeypatch.setattr(limit, lambda which: (1 << 20, 1 << 20))
    assert list(_doubts("HIP 7.2.26015 (release: placeholder)")) == []
