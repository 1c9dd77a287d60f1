"""`python -m hal`: a report fit for a bug report, also of an installation that is broken."""

from __future__ import annotations

import importlib
import io
import json
import mmap
from pathlib import Path

import pytest
from rich.console import Console

from hal import native
from hal.__main__ import main
from hal.cpu.telemetry import memory_info, resident_bytes
from hal.detect import Vendor, detect
from hal.environment import collect, torch_notices
from hal.torch_build import TorchBuild, read_version_file, torch_build

CPU_BUILD = TorchBuild("2.13.0+cpu")
ACME_BUILD = TorchBuild("2.13.0+acme1", {"acme": "1.0"})
PRESENT = Vendor("acme", "acme:Platform", ("libc.so.6",), ("/dev/null",), "acme")
ABSENT = Vendor("acme", "acme:Platform", ("libacme.so.1",), ("/dev/acme*",), "acme")


def rendered(environment) -> str:  # type: ignore[no-untyped-def]
    out = io.StringIO()
    environment.render(Console(file=out, width=200))
    return out.getvalue()


# ---- a working installation ----------------------------------------------------------------------
# --------------------------------------------------------------------------------------


def test_a_working_installation_has_no_problems() -> None:
    environment = collect("cpu")
    assert environment.problems == ()
    assert environment.platforms["cpu"] is None
    assert environment.library.api_version == native.API_VERSION
    assert "cpu" in environment.library.drivers


def test_the_platform_is_reported_with_reasons_and_memory() -> None:
    report = collect("cpu").platform
    assert report is not None
    assert report.capabilities is not None
    assert report.capabilities["pool_nesting"] in {"lifo", "fifo"}
    flags = [value for value in report.capabilities.values() if isinstance(value, dict)]
    assert flags
    assert all(flag["available"] or flag["reason"] for flag in flags)
    (memory,) = report.devices
    assert memory.total is not None
    assert memory.process_used is not None
    assert memory.process_used > 1 << 20


def test_the_host_budget_is_reported_with_its_source() -> None:
    host = collect("cpu").host_memory
    assert host is not None
    assert 0 < host.available <= host.total
    assert host.source


def test_extras_are_reported_with_versions() -> None:
    extras = collect("cpu").extras
    assert extras["test"]["pytest"] == pytest.__version__
    assert extras["rocm"].keys() == {"amdsmi"}


def test_the_report_is_json_and_text() -> None:
    environment = collect("cpu")
    assert json.loads(json.dumps(environment.as_dict()))["schema_version"] == 1
    text = rendered(environment)
    for part in ("accel-hal", "libhal", "Capabilities of cpu", "device 0", "budget", "pytest"):
        assert part in text


def test_the_command_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--platform", "cpu"]) == 0
    assert "Capabilities of cpu" in capsys.readouterr().out
    assert main(["--platform", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["platform"]["name"] == "cpu"


# ---- a broken one --------------------------------------------------------------------------------
# ------------------------------------------------------------------------------------------------


def test_an_unknown_platform_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--platform", "nonsense"]) == 1
    assert "unknown platform 'nonsense'" in capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_it_works_without_libhal(run_python, options: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-m", "hal", *options, env={"HAL_LIBRARY": "/nowhere/libhal.so"})
    assert done.returncode == 1
    assert "/nowhere/libhal.so" in done.stdout
    assert "reinstall accel-hal" in done.stdout
    assert "Traceback" not in done.stderr


HIDE = """
import importlib.machinery, runpy, sys

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != {package!r}:
            return importlib.machinery.PathFinder.find_spec(name, path, target)

sys.meta_path = [
    Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path
]
sys.argv = ["hal"]
runpy.run_module("hal", run_name="__main__")
"""


@pytest.mark.parametrize("package", ["torch", "rich"])
def test_it_works_without_a_package(run_python, package: str) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", HIDE.format(package=package))
    assert "Traceback" not in done.stderr
    assert "accel-hal" in done.stdout
    if package == "torch":
        assert done.returncode == 1
        assert "torch is not installed" in done.stdout


# ---- torch builds --------------------------------------------------------------------------------
# ------------------------------------------------------------------------------------------------


def test_a_replaced_torch_build_is_noticed() -> None:
    (notice,) = torch_notices(CPU_BUILD, [PRESENT])
    assert "a acme driver is installed" in notice or "acme driver is installed" in notice
    assert "built for cpu" in notice
    assert "pip install --no-deps accel-hal" in notice


def test_another_vendors_build_is_noticed() -> None:
    other = TorchBuild("2.13.0+other", {"other": "2.0"})
    (notice,) = torch_notices(other, [PRESENT])
    assert "built for other 2.0" in notice


def test_a_missing_driver_is_noticed() -> None:
    (notice,) = torch_notices(ACME_BUILD, [ABSENT])
    assert "no acme driver was found" in notice


@pytest.mark.parametrize(
    ("build", "vendor"), [(ACME_BUILD, PRESENT), (CPU_BUILD, ABSENT), (None, PRESENT)]
)
def test_what_belongs_together_is_not_noticed(build: TorchBuild | None, vendor: Vendor) -> None:
    assert list(torch_notices(build, [vendor])) == []


def test_notices_reach_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = importlib.import_module("hal.environment")
    monkeypatch.setattr(environment, "torch_notices", lambda _: iter(["replaced"]))
    assert collect("cpu").notices == ("replaced",)
    assert "replaced" in rendered(collect("cpu"))


def test_the_torch_build_is_the_installed_one() -> None:
    import torch

    build = torch_build()
    assert build is not None
    assert build.version == torch.__version__
    assert build.toolkits == {
        name: value
        for name in ("cuda", "hip", "rocm", "xpu")
        if (value := getattr(torch.version, name, None))
    }


def test_a_version_file_is_read_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "version.py"
    file.write_text(
        "from typing import Optional\n__version__ = '2.11.0+rocm7.2'\ndebug = False\n"
        "cuda: Optional[str] = None\ngit_version = 'abc'\nhip: Optional[str] = '7.2.1'\n"
        "raise SystemExit\n"
    )
    build = read_version_file(file)
    assert build == TorchBuild("2.11.0+rocm7.2", {"hip": "7.2.1"})
    assert str(build) == "torch 2.11.0+rocm7.2 (built for hip 7.2.1)"
    assert read_version_file(tmp_path / "missing.py") == TorchBuild("unknown")


# ---- host memory as the device -------------------------------------------------------------------
# -----------------------------------------------------------------------------------


def test_process_used_follows_what_is_touched() -> None:
    size = 64 << 20
    before, source, doubt = resident_bytes()
    with mmap.mmap(-1, size) as held:
        held.write(b"x" * size)
        after, _, _ = resident_bytes()
    assert before is not None
    assert after is not None
    assert (source, doubt) == ("smaps_rollup", "")
    assert after - before > 0.9 * size


def test_statm_stands_in_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("100 25 10 1 0 20 0\n")
    used, source, doubt = resident_bytes(tmp_path)
    assert used == 25 * 4096
    assert source == "statm"
    assert "approximate" in doubt


@pytest.mark.parametrize("files", [{}, {"smaps_rollup": "nonsense", "statm": "1"}])
def test_unknown_is_none_with_a_reason_and_never_zero(
    tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    used, _, reason = resident_bytes(tmp_path)
    assert used is None
    assert "unknown" in reason


def test_memory_of_the_host_device() -> None:
    device = detect("cpu").device()
    info = memory_info(device)
    assert info.total is not None
    assert info.free is not None
    assert 0 < info.free <= info.total
    assert info.exact == (not info.reason)
    assert "cpu driver" in info.source


def test_a_query_that_fails_is_none_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device = detect("cpu").device()
    device.fail("memory_info", code=5)
    try:
        info = memory_info(device)
    finally:
        device.clear_faults()
    assert (info.total, info.free, info.exact) == (None, None, False)
    assert "total and free are unknown" in info.reason
    assert info.process_used is not None
