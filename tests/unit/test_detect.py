"""Detection: drivers, the torch build, `HAL_PLATFORM`, entry points; reasons when nothing fits;
safe before fork.
"""

from __future__ import annotations

import importlib
import os
import textwrap
import threading
from pathlib import Path

import pytest

import hal
from hal.detect import HOST, VARIABLE, Vendor, candidates, survey

detection = importlib.import_module("hal.detect")

FAKE_PLATFORM = """
from hal.platform import Platform

class {cls}(Platform):
    name = "{name}"
    device_type = "cpu"

    @classmethod
    def why_not(cls):
        {why_not}

    def device_count(self): return 1
    def get_memory_info(self, device=0): raise NotImplementedError
    def create_pool(self, tag, device=0): raise NotImplementedError
    def _open(self, index): raise NotImplementedError
    def _capabilities(self, index): raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(detection, "_platforms", {})
    # No accelerator of this machine: what these tests say holds on every machine.
    absent = detection.Candidate("absent", "hal.absent.platform:AbsentPlatform")
    monkeypatch.setattr(detection, "_ACCELERATORS", (absent,))


class ThirdParty:
    """Distributions on sys.path that register platforms, as an installer would lay them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, why_not: str = "return None", *, target: str | None = None) -> str:
        module = f"fake_{name}_{self.folder.name}".replace("-", "_")
        code = FAKE_PLATFORM.format(cls="Fake", name=name, why_not=why_not)
        (self.folder / f"{module}.py").write_text(code)
        info = self.folder / f"hal_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hal-{name}\nVersion: 1.0\n")
        entry = target or f"{module}:Fake"
        (info / "entry_points.txt").write_text(f"[hal.platforms]\n{name} = {entry}\n")
        return module


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ThirdParty:
    monkeypatch.syspath_prepend(tmp_path)
    return ThirdParty(tmp_path)


def test_without_an_accelerator_it_is_the_host() -> None:
    assert hal.detect().name == HOST


def test_the_same_call_gives_the_same_platform() -> None:
    assert hal.detect() is hal.detect("cpu")


def test_a_named_platform_that_does_not_fit_says_why_for_each() -> None:
    with pytest.raises(hal.NoPlatformError, match="not part of this version") as caught:
        hal.detect("absent")
    assert caught.value.reasons.keys() == {"absent", "cpu"}
    assert "was not asked for" in caught.value.reasons["cpu"]
    assert "ask for one that fits: cpu" in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(hal.UnknownPlatformError, match=r"'cdua'.*absent, cpu") as caught:
        hal.detect("cdua")
    assert caught.value.known == ("absent", "cpu")


def test_the_environment_variable_names_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu")
    assert hal.detect().name == HOST
    monkeypatch.setenv(VARIABLE, "absent")
    with pytest.raises(hal.NoPlatformError, match="HAL_PLATFORM=absent"):
        hal.detect()
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(hal.UnknownPlatformError, match="nonsense"):
        hal.detect()
    monkeypatch.setenv(VARIABLE, "")
    assert hal.detect().name == HOST


def test_a_name_beats_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "absent")
    assert hal.detect("cpu").name == HOST


@pytest.mark.parametrize("name", [None, "cpu"])
def test_a_required_accelerator_that_is_not_there(name: str | None) -> None:
    with pytest.raises(hal.NoPlatformError, match="require_accelerator") as caught:
        hal.detect(name, require_accelerator=True)
    assert caught.value.reasons["cpu"] == "it is not an accelerator"
    assert "not part of this version" in caught.value.reasons["absent"]


def test_a_registered_platform_comes_before_the_host(third_party: ThirdParty) -> None:
    third_party.add("acme")
    assert list(candidates()) == ["absent", "acme", "cpu"]
    assert hal.detect().name == "acme"
    assert hal.detect(require_accelerator=True) is hal.detect("acme")


def test_a_registered_platform_that_does_not_fit_is_passed_over(third_party: ThirdParty) -> None:
    third_party.add("acme", "return 'no acme device'")
    assert hal.detect().name == HOST
    with pytest.raises(hal.NoPlatformError, match="no acme device"):
        hal.detect("acme")


def test_platforms_are_imported_only_when_asked(third_party: ThirdParty) -> None:
    module = third_party.add("acme")
    assert hal.detect("cpu").name == HOST
    assert module not in detection.importlib.sys.modules


@pytest.mark.parametrize(
    ("why_not", "target", "reason"),
    [
        ("raise RuntimeError('boom')", None, "failed with RuntimeError: boom"),
        ("return None", "no_such_module:Fake", "cannot be imported: No module named"),
        ("return None", "hal.errors:Missing", "failed with AttributeError"),
    ],
)
def test_a_broken_registered_platform_is_a_reason(
    third_party: ThirdParty, why_not: str, target: str | None, reason: str
) -> None:
    third_party.add("acme", why_not, target=target)
    assert reason in (survey()["acme"] or "")
    assert hal.detect().name == HOST


def test_a_registered_platform_cannot_take_a_room(
    third_party: ThirdParty, caplog: pytest.LogCaptureFixture
) -> None:
    third_party.add("cpu")
    assert type(hal.detect()).__module__ == "hal.cpu.platform"
    assert "'cpu' of hal-cpu is ignored" in caplog.text


def test_a_room_with_a_missing_import_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = detection.Candidate("absent", "hal.environment_that_is_not:Platform")
    assert broken.why_not() == "it is not part of this version of accel-hal"
    monkeypatch.setattr(
        detection.importlib,
        "import_module",
        lambda _: (_ for _ in ()).throw(
            ModuleNotFoundError("No module named 'amd_tools'", name="amd_tools")
        ),
    )
    assert "No module named 'amd_tools'" in (broken.why_not() or "")


@pytest.mark.parametrize(
    ("nodes", "library", "found"),
    [
        (("/dev/nul[l]",), "libc.so.6", True),
        (("/dev/no-such-device*",), "libc.so.6", False),
        (("/dev/null",), "libno_such_driver.so.1", False),
    ],
)
def test_a_driver_is_found_by_device_file_and_library(
    nodes: tuple[str, ...], library: str, found: bool
) -> None:
    vendor = Vendor("acme", "acme:Platform", (library,), nodes, "acme")
    assert vendor.driver_found() is found


def test_a_library_that_a_package_brings_for_itself_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "brings").mkdir()
    (tmp_path / "brings" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    names = ("libno_such_driver.so.1",)
    vendor = Vendor("acme", "acme:Platform", names, ("/dev/null",), "acme", ("brings", "absent"))
    assert not vendor.driver_found()
    library = tmp_path / "brings" / "lib" / "libno_such_driver-1f2e.so.7"
    library.parent.mkdir()
    library.touch()
    assert vendor.driver_found()


def test_a_driver_that_is_not_used_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = Vendor(
        "absent", "hal.absent.platform:Platform", ("libc.so.6",), ("/dev/null",), "absent"
    )
    monkeypatch.setattr(detection, "VENDORS", (there,))
    assert hal.detect().name == HOST
    assert "a driver for absent is installed, but cpu is used" in caplog.text
    assert "not part of this version" in caplog.text


def test_detection_starts_no_thread_and_opens_nothing() -> None:
    before = threading.active_count(), _open_files()
    platform = hal.detect()
    survey()
    assert (threading.active_count(), _open_files()) == before
    assert platform._devices == {}


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_r84_detection_is_safe_before_fork(run_python) -> None:  # type: ignore[no-untyped-def]
    """The parent detects, its child opens the device; a later choice is honoured."""
    done = run_python(
        "-c",
        textwrap.dedent("""
        import os, sys
        import hal
        parent = hal.detect("cpu")
        pid = os.fork()
        if pid == 0:
            child = hal.detect("cpu")
            assert child is not parent, "devices do not survive a fork"
            pool = child.create_pool("weights")
            address = child.device().allocate(pool.id, 1 << 20)
            child.device().fill(address, 7, 1 << 20)
            child.device().synchronize()
            child.device().free(address)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert parent._devices == {}
        os.environ["HAL_PLATFORM"] = "nonsense"
        try:
            hal.detect()
        except hal.UnknownPlatformError:
            print("honoured")
    """),
    )
    assert done.stdout.strip() == "honoured", done.stderr
