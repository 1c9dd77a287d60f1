"""`import torch_memory_saver` finds the drop-in, in this process and in those that it starts."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

import hal
from conftest import RunPython
from hal.core.integrations.torch_memory_saver import configure_subprocess, install
from hal.core.integrations.torch_memory_saver.install import DROP_IN, NAME

FOUND = f"import {NAME}; print({NAME}.__file__); {NAME}.{NAME}.pause()"
THE_DROP_IN = str(DROP_IN / NAME / "__init__.py")


def installed(code: str) -> str:
    return f"from hal.core.integrations.torch_memory_saver import install; install(); {code}"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A module search path on which another package of that name stands."""
    package = tmp_path / "site" / NAME
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"{NAME} = 'the original'\n")
    return package.parent


def path_with(folder: Path) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), inherited)))}


def test_the_drop_in_is_found_before_the_original(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(original), *sys.path])
    install()
    spec = PathFinder.find_spec(NAME, sys.path)
    assert spec is not None
    assert spec.origin == THE_DROP_IN
    before = list(sys.path)
    install()
    assert sys.path == before


def test_an_install_after_the_original_was_imported_is_refused(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [str(original), *sys.path]
    monkeypatch.setattr(sys, "path", before.copy())
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))
    sys.modules[NAME].__file__ = str(original / NAME / "__init__.py")
    with pytest.raises(hal.StateError, match="call install\\(\\) before anything imports it"):
        install()
    assert sys.path == before


def test_the_directory_for_other_launchers_is_printed(run_python: RunPython) -> None:
    done = run_python("-m", "hal.core.integrations.torch_memory_saver")
    assert done.stdout == f"{DROP_IN}\n", done.stderr


def test_a_subprocess_finds_it_too(
    run_python: RunPython, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path_with(original)["PYTHONPATH"])
    with configure_subprocess():
        done = run_python("-c", FOUND)
    assert done.stdout.strip() == THE_DROP_IN, done.stderr


def test_processes_that_multiprocessing_spawns_inherit_it(
    run_python: RunPython, tmp_path: Path
) -> None:
    main = tmp_path / "main.py"
    main.write_text(
        "import multiprocessing, sys\n"
        "def child(found):\n"
        f"    import {NAME}\n"
        f"    found.put({NAME}.__file__)\n"
        "if __name__ == '__main__':\n"
        f"    {installed('')}\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    found = spawn.Queue()\n"
        "    process = spawn.Process(target=child, args=(found,))\n"
        "    process.start()\n"
        "    print(found.get(timeout=100))\n"
        "    process.join()\n"
    )
    done = run_python(str(main))
    assert done.stdout.strip() == THE_DROP_IN, done.stderr


@pytest.mark.parametrize("before", [None, "", "/one", "/one:/two"])
def test_the_variable_is_put_back_and_what_stood_there_stays(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", before)
    with configure_subprocess():
        inside = os.environ["PYTHONPATH"].split(os.pathsep)
    assert inside == [str(DROP_IN), *filter(None, (before or "").split(os.pathsep))]
    assert os.environ.get("PYTHONPATH") == before


def test_what_launchers_preload_is_harmless(run_python: RunPython) -> None:
    """They put the library of the original's hook into the environment of training actors."""
    code = (
        f"from {NAME}.utils import get_binary_path_from_package as path; import os, sys; "
        "os.environ['LD_PRELOAD'] = str(path('torch_memory_saver_hook_mode_preload')); "
        "os.execv(sys.executable, [sys.executable, '-c', 'print(1 + 1)'])"
    )
    done = run_python("-c", installed(code))
    assert done.stdout.strip() == "2", done.stderr
    assert not done.stderr


SCENARIO = f"""
import torch
from {NAME} import {NAME}
from {NAME}.testing_utils import get_and_print_gpu_memory, get_device

{NAME}.hook_mode = "torch"
with {NAME}.region(enable_cpu_backup=True):
    kept = torch.full((20_000_000,), 10, dtype=torch.uint8, device=get_device())
with {NAME}.region(tag="given up"):
    given_up = torch.full((20_000_000,), 20, dtype=torch.uint8, device=get_device())
{NAME}.pause()
assert {NAME}.get_cpu_backup(kept)[:3].tolist() == [10, 10, 10]
assert get_and_print_gpu_memory("paused") >= 0
{NAME}.resume("given up")
assert given_up[:3].tolist() == [0, 0, 0]
{NAME}.resume()
assert kept[:3].tolist() == [10, 10, 10]
{NAME}.pause("given up")
print("ended while a tag is paused")
"""


def test_r46_a_process_may_end_while_tags_are_paused(run_python: RunPython, tmp_path: Path) -> None:
    done = run_python("-c", installed(f"exec({SCENARIO!r})"), env={"HAL_PLATFORM": "cpu"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ended while a tag is paused"
    assert not done.stderr


def test_r46_a_process_may_end_in_the_region_that_a_variable_opened(run_python: RunPython) -> None:
    code = installed(
        f"import torch; from {NAME} import {NAME} as saver; saver.pause(); saver.resume(); "
        "kept = torch.full((1000,), 7); saver.pause(); saver.resume(); print(kept.sum().item())"
    )
    variables = {"HAL_PLATFORM": "cpu", "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    done = run_python("-c", code, env=variables)
    assert done.stdout.strip() == "7000", done.stderr
    assert not done.stderr
