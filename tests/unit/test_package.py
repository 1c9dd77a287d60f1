"""The package: lazy, typed, one wheel for all, and free of torch until it is needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hal


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "code",
    [
        "import hal",
        "import hal; hal.detect; hal.HalError; hal.PoolNesting.FIFO; hal.MemoryInfo; dir(hal)",
        "import hal; hal.__version__",
        "import hal.native, hal.environment, hal.torch_build",
    ],
)
def test_importing_hal_imports_no_torch(run_python, code: str) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", f"{code}; import sys; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_every_public_name_is_there() -> None:
    for name in hal.__all__:
        assert getattr(hal, name) is not None
        assert name in dir(hal)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hal.nonsense  # noqa: B018


def test_detect_stays_the_function_after_its_module_is_imported() -> None:
    module = importlib.import_module("hal.detect")
    assert hal.detect is module.detect


def test_the_version_is_the_distributions(project: dict[str, Any]) -> None:
    assert hal.__version__ == project["project"]["version"]


def test_core_is_installed_inside_hal() -> None:
    core = importlib.import_module("hal.core")
    assert core.__name__ == "hal.core"
    assert (Path(core.__file__ or "").parent / "tags.py").is_file()


def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="hal")
    assert command.value == "hal.core.cli:app"
    assert callable(command.load())


def test_the_run_time_dependencies_are_three(project: dict[str, Any]) -> None:
    assert project["project"]["dependencies"] == ["torch>=2.11", "rich", "typer"]


def test_the_extras_are_the_documented_ones(project: dict[str, Any], root: Path) -> None:
    extras = project["project"]["optional-dependencies"]
    assert {"cuda", "kernels", "rocm", "xpu", "vllm", "test", "dev"} <= extras.keys()
    text = (root / "docs/install.md").read_text()
    for extra in extras:
        assert f"`{extra}`" in text


def test_everything_that_is_tested_with_is_pinned(project: dict[str, Any], root: Path) -> None:
    pins = (root / "ci/constraints.txt").read_text()
    pinned = {_normal(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    extras = project["project"]["optional-dependencies"]
    needed = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
        *extras["test"],
        *extras["dev"],
    ]
    names = {_normal(re.match(r"[\w.-]+", need)[0]) for need in needed}  # type: ignore[index]
    assert names <= pinned
    assert "torch==2.13.0\n" in pins


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from this tree."""
    out = tmp_path_factory.mktemp("dist")
    for kind in ("--wheel", "--sdist"):
        build = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(out)]
        done = subprocess.run([*build, str(root)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_one_wheel_serves_every_python(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert re.fullmatch(r"accel_hal-[\d.]+-py3-none-\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"hal/libhal.so", "hal/py.typed", "hal/core/cli.py"} <= set(names)
    assert "hal/include/hal/driver.h" in names
    assert len(names) == len(set(names))
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"hal"}
    assert not [name for name in names if name.endswith(".cpp") or "/native/" in name]


def test_the_sdist_carries_everything_once(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"core/cli.py", "hal/native/ledger.cpp", "CMakeLists.txt", "LICENSE"} <= set(names)
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith(("hal/core/", ".venv", "build"))]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
