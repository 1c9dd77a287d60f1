"""Memory queries of Intel GPUs over emulated cards: what is known, from whom, and what is not
believed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import support
from emulator import emuze
from emulator.platforms import emulated_xpu
from hal.memory import MemoryInfo
from hal.native import Device
from hal.xpu import identity, installation, sysman, telemetry, zes_structs
from hal.xpu.identity import Target, device_count, target_of
from hal.xpu.sysman import Card
from hal.xpu.visibility import Slot, render_nodes, visible_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import RunPython
    from emulator.emuze import EmulatedXpu

pytestmark = support.needs_level_zero()

MB, GB = 1 << 20, 1 << 30
TOTAL = 512 * MB
CARD = 1
"""The first card of these tests: other tests of the process may hold memory on card 0."""


@pytest.fixture
def emu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedXpu]:
    """One card, and this process as if it had asked nothing yet."""
    for variable in ("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ZES_ENABLE_SYSMAN", "1")  # the way that every loader has
    emulator = emulated_xpu()
    emulator.reset()
    emulator.set(first=CARD)
    telemetry.sysman.renew()
    monkeypatch.setattr(telemetry, "_verdicts", {})
    yield emulator
    emulator.reset()
    telemetry.sysman.renew()


@pytest.fixture
def opened(emu: EmulatedXpu) -> Iterator[Callable[..., Device]]:
    """Opens devices and lets them hold memory: `opened(index, held_bytes)`."""
    made: list[Device] = []

    def make(index: int = 0, held: int = 0) -> Device:
        device = Device("xpu", index)
        made.append(device)
        if held:
            device.allocate(device.create_pool("held").id, held)
        return device

    yield make
    emu.reset()
    for device in made:
        for segment in device.segments():
            device.free(segment.address)
        device.close()


def asked(device: Device | None = None, index: int = 0) -> MemoryInfo:
    telemetry.sysman.forget_readings()
    return telemetry.memory_info(target_of(index, device))


# -- figures


def test_layouts_are_the_specifications() -> None:
    assert {kind: ctypes.sizeof(kind) for kind in zes_structs.SIZES} == zes_structs.SIZES


def test_sysman_answers_with_figures_of_this_process(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    emu.set(CARD, taken=100 * MB)
    device = opened(0, 64 * MB)
    telemetry.probe_sources(0, device)
    info = asked(device)
    assert info == MemoryInfo(TOTAL, 348 * MB, 64 * MB, "sysman", True, tracked=64 * MB)


def test_a_source_that_was_not_tried_is_not_exact(opened: Callable[..., Device]) -> None:
    device = opened(0, 64 * MB)
    info = asked(device)
    assert (info.free, info.source, info.exact) == (448 * MB, "sysman", False)
    assert "not tried on an allocation yet" in info.reason


def test_a_pid_of_outside_is_unknown_never_zero(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    device = opened(0, 64 * MB)
    emu.set(CARD, sysman_processes=0, taken=10 * MB)
    info = asked(device)
    assert info.process_used is None
    assert "pid not visible" in info.reason
    assert info.process_at_least == 64 * MB


@pytest.mark.parametrize("reverse", [False, True])
def test_r89_cards_are_joined_by_pci_address_never_by_index(
    emu: EmulatedXpu, opened: Callable[..., Device], reverse: bool
) -> None:
    emu.set(cards=2)
    emu.set(CARD + 1, total=GB, taken=200 * MB)
    emu.set(sysman_reversed=int(reverse))
    assert asked(opened(0), 0).total == TOTAL
    second = asked(opened(1), 1)
    assert (second.total, second.free) == (GB, GB - 200 * MB)


def test_r89_an_unopened_device_among_several_is_not_guessed(emu: EmulatedXpu) -> None:
    emu.set(cards=2)
    info = asked(index=1)
    assert (info.total, info.free, info.source) == (None, None, "none")
    assert "is known once it is open" in info.reason


def test_a_device_without_an_address_is_joined_by_uuid(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    emu.fail("zeDevicePciGetPropertiesExt", times=emuze.FOR_EVER)
    device = opened(0)
    assert device.facts.device_uuid == f"01{'22' * 14}00"
    assert asked(device).total == TOTAL


def test_a_card_that_sysman_does_not_know(opened: Callable[..., Device]) -> None:
    opened(0)
    info = telemetry.memory_info(Target(0, "0000:99:00.0", 5 * MB, GB))
    assert "Sysman knows no card 0000:99:00.0" in info.reason
    assert (info.source, info.free) == ("books", GB - 5 * MB)


# -- figures that are not believed


def test_r90_free_that_equals_total_contradicts_what_is_mapped(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    device = opened(0, 128 * MB)
    emu.set(sysman_free=emuze.FREE_TOTAL)
    info = asked(device)
    assert not info.exact
    assert "CAP_SYS_ADMIN or CAP_PERFMON" in info.reason
    assert (info.source, info.free) == ("books", TOTAL - 128 * MB), "tracked bytes are used"
    assert (info.tracked, info.process_at_least) == (128 * MB, 128 * MB)


def test_r91_a_source_that_does_not_move_is_found_and_passed_over(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    device = opened(0)
    emu.set(sysman_free=emuze.FREE_FROZEN)
    assert asked(device).source == "sysman", "nothing contradicts it yet"
    telemetry.probe_sources(0, device)
    info = asked(device)
    assert "it is frozen" in info.reason
    assert (info.source, info.exact, info.free) == ("books", False, TOTAL)
    assert emu.used_bytes(CARD) == 0, "the probe gave its memory back"


def test_r92_nothing_free_on_an_idle_card_is_unknown(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    device = opened(0)
    emu.set(sysman_free=emuze.FREE_ZERO)
    info = asked(device)
    assert "this driver does not tell" in info.reason
    assert (info.source, info.free) == ("books", TOTAL)


def test_r92_a_card_that_is_really_full_is_believed(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    device = opened(0, TOTAL - 8 * MB)
    emu.set(CARD, taken=8 * MB)
    info = asked(device)
    assert (info.source, info.free) == ("sysman", 0)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"sysman_modules": 0}, "Sysman lists no memory module"),
        ({}, "this process may not ask: it needs CAP_SYS_ADMIN"),
    ],
)
def test_r93_without_an_answer_free_is_unknown_and_nothing_raises(
    emu: EmulatedXpu, opened: Callable[..., Device], broken: dict[str, int], said: str
) -> None:
    if broken:
        emu.set(**broken)
    else:
        emu.fail("zesMemoryGetState", code=emuze.NOT_PERMITTED, times=emuze.FOR_EVER)
    unopened = asked()
    assert (unopened.free, unopened.process_used, unopened.exact) == (None, None, False)
    assert said in unopened.reason
    device = opened(0, 64 * MB)
    telemetry.probe_sources(0, device)
    info = asked(device)
    assert (info.source, info.free, info.total) == ("books", TOTAL - 64 * MB, TOTAL)


def test_r82_a_query_that_fails_everywhere_raises_nothing(
    emu: EmulatedXpu, opened: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = opened(0)
    device.fail("memory_info", 1, emuze.NOT_READY, times=-1)
    monkeypatch.setattr(telemetry.sysman, "cards", lambda: 1 / 0)
    info = asked(device)
    device.clear_faults()
    assert (info.total, info.free, info.source) == (None, None, "none")
    assert "sysman: division by zero" in info.reason


def test_torchs_own_query_comes_second(
    emu: EmulatedXpu, opened: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    device = opened(0, 64 * MB)
    emu.set(sysman_modules=0)
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (300 * MB, TOTAL))
    info = asked(device)
    assert (info.source, info.free, info.exact) == ("torch", 300 * MB, False)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (TOTAL, TOTAL))
    assert asked(device).source == "books", "the same contradiction is noticed in any source"


# -- how Sysman is asked


def test_r95_readings_are_used_again_for_a_while(
    emu: EmulatedXpu, opened: Callable[..., Device]
) -> None:
    device = opened(0)
    asked(device)
    before = emu.calls("zesMemoryGetState")
    for _ in range(10):
        telemetry.memory_info(target_of(0, device))
    assert emu.calls("zesMemoryGetState") == before
    time.sleep(sysman.FRESH_SECONDS * 1.2)
    telemetry.memory_info(target_of(0, device))
    assert emu.calls("zesMemoryGetState") == before + 1


def test_r95_a_transition_asks_sysman_a_fixed_number_of_times(emu: EmulatedXpu) -> None:
    """However many segments there are."""
    from emulator.platforms import EmulatedXpuPlatform
    from hal.core import BackupOptions, SleepManager

    counts = []
    for segments in (2, 12):
        sleeper = SleepManager(EmulatedXpuPlatform(), backup=BackupOptions(backing="anonymous"))
        held = [support.fill(sleeper, "weights", seed) for seed in range(segments)]
        before = emu.calls("zesMemoryGetState")
        sleeper.sleep(level=1)
        sleeper.wake_up()
        counts.append(emu.calls("zesMemoryGetState") - before)
        del held
    assert counts[0] == counts[1]


INIT_ORDERS = """
import ctypes, os, sys
from emulator import emuze
from hal.native import Device
from hal.xpu import telemetry
from hal.xpu.identity import target_of
emu = emuze.EmulatedXpu(emuze.build())
if sys.argv[1] == "runtime first":
    device = Device("xpu")
info = telemetry.memory_info(target_of(0, None))
print(info.total, emu.calls("zesInit"), emu.calls("zeInit") > 0, info.reason, sep="|")
if sys.argv[1] == "sysman first":
    device = Device("xpu")
info = telemetry.memory_info(target_of(0, device))
print(info.source)
print(os.environ.get("ZES_ENABLE_SYSMAN"))
"""


def has_zes_init() -> bool:
    return hasattr(ctypes.CDLL(os.environ.get("HAL_LIBZE") or sysman.LOADER), "zesInit")


@pytest.fixture
def run_emulated(run_python: RunPython, root: Path) -> Callable[..., list[str]]:
    start = f"import sys; sys.path.insert(0, {str(root / 'tests')!r})\n"

    def run(code: str, *arguments: str, **environment: str) -> list[str]:
        done = run_python("-c", start + code, *arguments, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("order", ["runtime first", "sysman first"])
def test_r95_the_legacy_way_is_taken_where_the_environment_asks_for_it(
    run_emulated: Callable[..., list[str]], order: str
) -> None:
    first, source, variable = run_emulated(INIT_ORDERS, order, ZES_ENABLE_SYSMAN="1")
    total, zes_inits, has_core, _ = first.split("|")
    assert (total, zes_inits, has_core) == (str(TOTAL), "0", "True"), "zesInit would conflict"
    assert (source, variable) == ("sysman", "1")


@pytest.mark.parametrize("order", ["runtime first", "sysman first"])
def test_r95_otherwise_sysman_is_initialized_by_its_own_call(
    run_emulated: Callable[..., list[str]], order: str
) -> None:
    first, source, variable = run_emulated(INIT_ORDERS, order, ZES_ENABLE_SYSMAN="0")
    total, zes_inits, has_core, reason = first.split("|")
    assert variable == "0", "the variable is never changed under a runtime that has started"
    if has_zes_init():
        assert total == str(TOTAL)
        assert int(zes_inits) >= 1, "newer loaders try a driver before they use it"
        assert has_core == str(order == "runtime first"), "Sysman alone starts no runtime"
        assert source == "sysman"
    else:
        assert (total, source) == ("None", "books")
        assert "the Level Zero loader is older than 1.9 and has no zesInit; update libze1" in reason


def test_a_failed_initialization_is_a_reason_and_tried_again(emu: EmulatedXpu) -> None:
    emu.fail("zesDevicePciGetProperties", code=emuze.NOT_PERMITTED)
    assert "zesDevicePciGetProperties failed with 0x70010000" in asked().reason
    assert asked().total == TOTAL


def test_a_missing_loader_is_a_reason(emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_LIBZE", "/nowhere/libze_loader.so.1")
    assert "the Level Zero loader cannot be loaded" in asked().reason


def test_a_forked_child_asks_anew(emu: EmulatedXpu) -> None:
    asked()
    held = threading.Lock()
    telemetry.sysman._lock = held
    held.acquire()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if telemetry.sysman._lock.acquire(blocking=False) else 1)
    _, status = os.waitpid(pid, 0)
    held.release()
    assert os.waitstatus_to_exitcode(status) == 0


def test_queries_from_many_threads(emu: EmulatedXpu) -> None:
    seen: list[int | None] = []

    def ask() -> None:
        seen.extend([telemetry.memory_info(Target(0)).total for _ in range(20)])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [TOTAL] * 120


# -- tiles


def card(index: int = 0, tiles: int = 1, *, integrated: bool = False) -> Card:
    return Card(index + 1, f"0000:3{index}:00.0", f"{index:032x}", "GPU", tiles, integrated)


@pytest.mark.parametrize(
    ("cards", "environment", "expected"),
    [
        ([card(tiles=2)], {}, [(0, 0), (0, 1)]),
        ([card(tiles=2)], {"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}, [(0, 0), (0, 1)]),
        ([card(tiles=2)], {"ZE_FLAT_DEVICE_HIERARCHY": "COMBINED"}, [(0, 0), (0, 1)]),
        ([card(tiles=2)], {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [(0, None)]),
        (
            [card(0, 2), card(1, 2)],
            {"ZE_AFFINITY_MASK": "0.0,0.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"},
            [(0, 0), (0, 1)],
        ),
        ([card(0, 2), card(1, 2)], {"ZE_AFFINITY_MASK": "3,0"}, [(1, 1), (0, 0)]),
        ([card(0), card(1)], {"ZE_AFFINITY_MASK": "1"}, [(1, None)]),
        ([card(0), card(1)], {"ZE_AFFINITY_MASK": "7,x"}, []),
        ([card(0, integrated=True), card(1)], {}, [(1, None)]),
        ([card(0, integrated=True)], {}, [(0, None)]),
    ],
)
def test_r96_masks_and_hierarchies_decide_what_a_device_is(
    cards: list[Card], environment: dict[str, str], expected: list[tuple[int, int | None]]
) -> None:
    slots = visible_slots(cards, environment)
    assert slots == tuple(Slot(cards[index], tile) for index, tile in expected)


@pytest.mark.parametrize("hierarchy", ["FLAT", "COMBINED"])
def test_r96_tiles_have_totals_of_their_own_that_add_up_to_the_cards(
    emu: EmulatedXpu,
    opened: Callable[..., Device],
    monkeypatch: pytest.MonkeyPatch,
    hierarchy: str,
) -> None:
    emu.set(CARD, tiles=2)
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", hierarchy)
    assert device_count(telemetry.sysman) == 2
    tiles = [opened(0, 64 * MB), opened(1)]
    infos = [asked(device, index) for index, device in enumerate(tiles)]
    assert [info.total for info in infos] == [TOTAL // 2, TOTAL // 2]
    assert [info.free for info in infos] == [TOTAL // 2 - 64 * MB, TOTAL // 2]
    assert sum(info.total or 0 for info in infos) == TOTAL
    assert all(info.process_used is None for info in infos)
    assert "counts what processes use by card" in infos[0].reason


def test_r96_a_card_is_the_sum_of_its_tiles(
    emu: EmulatedXpu, opened: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    emu.set(CARD, tiles=2)
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")
    assert device_count(telemetry.sysman) == 1
    info = asked(opened(0))
    assert (info.total, info.free) == (TOTAL, TOTAL)


def test_r96_a_tile_that_a_mask_hides_from_view_is_unknown(
    emu: EmulatedXpu, opened: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone behind a mask, a tile does not say which one it is."""
    emu.set(CARD, tiles=2)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    info = asked(opened(0))
    assert "which tile of card 0000:3b:00.0 this device is, is not known" in info.reason
    assert (info.source, info.total) == ("books", TOTAL // 2)
    assert not info.exact


# -- detection


def test_devices_are_counted_without_a_runtime(emu: EmulatedXpu) -> None:
    emu.set(cards=3)
    emu.set(CARD, integrated=1)
    assert device_count(telemetry.sysman) == 2


def test_render_nodes_of_other_vendors_do_not_count(tmp_path: Path) -> None:
    for node, vendor in (("renderD128", "0x8086"), ("renderD129", "0x10de"), ("card0", "0x8086")):
        (tmp_path / node / "device").mkdir(parents=True)
        (tmp_path / node / "device" / "vendor").write_text(f"{vendor}\n")
    assert render_nodes(tmp_path) == ["renderD128"]


def test_without_sysman_render_nodes_are_counted(
    emu: EmulatedXpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_LIBZE", "/nowhere/libze_loader.so.1")
    monkeypatch.setattr(identity, "render_nodes", lambda: ["renderD128", "renderD129"])
    assert device_count(telemetry.sysman) == 2


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has nothing of what XPU needs."""
    for variable in (installation.DRIVERS, "HAL_LIBZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(installation, "render_nodes", list)
    monkeypatch.setattr(installation, "LOADER", "libze_loader_absent.so.1")
    monkeypatch.setattr(installation, "GPU_DRIVER", "libze_gpu_absent.so.1")


@pytest.mark.usefixtures("nothing")
def test_every_missing_piece_has_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, loader, driver, torch_line = installation.missing()
    assert gpu.startswith("no Intel GPU (looked for vendor 0x8086 in /sys/class/drm): install")
    assert loader.endswith("(looked for libze_loader_absent.so.1): install libze1 or level-zero")
    assert driver.startswith("no Level Zero GPU driver (looked for libze_gpu_absent.so.1): install")
    assert torch_line.startswith("no torch for XPU (found torch ")
    assert all("\n" not in line and len(line) < 140 for line in installation.missing())
    monkeypatch.setenv("HAL_LIBZE", "/nowhere/libze.so")
    assert "looked for HAL_LIBZE=/nowhere/libze.so" in installation.missing()[1]


@pytest.mark.usefixtures("nothing")
def test_a_gpu_that_cannot_be_opened_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installation, "render_nodes", lambda: ["renderD128"])
    monkeypatch.setattr(installation, "_DEVICE_NODES", tmp_path)
    assert "add this user to the group render" in installation.missing()[0]
    (tmp_path / "renderD128").touch()
    assert "Intel GPU" not in installation.missing()[0]


@pytest.mark.usefixtures("nothing")
def test_hal_probe_lists_the_pieces_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hal.core import cli

    with pytest.raises(SystemExit) as ended:
        cli.app(["probe", "--platform", "xpu"])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    problems = [line for line in lines if line.startswith("x ")]
    assert len(problems) == 4, "each in one line"
    assert all("xpu: no " in line and ": install" in line for line in problems)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.8.10+xpu", "it was made for another torch and does not match torch 2.13.0+cpu; uninst"),
        ("2.13.1+xpu", "it matches torch 2.13.0+cpu"),
        (None, ""),
    ],
)
def test_an_installed_extension_is_reported_and_compared(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    metadata = importlib.import_module("importlib.metadata")

    def lookup(name: str) -> str:
        if name != installation.EXTENSION or version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", lookup)
    monkeypatch.setattr(
        installation, "torch_build", lambda: SimpleNamespace(version="2.13.0+cpu", kind="cpu")
    )
    notices = list(installation.notices(1))
    assert len(notices) == (version is not None)
    assert said in "".join(notices)


def test_r62_several_devices_are_told_of_cached_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(installation.CACHED_HANDLES, raising=False)
    assert not any("oneCCL" in line for line in installation.notices(1))
    (notice,) = (line for line in installation.notices(2) if "oneCCL" in line)
    assert "set CCL_ZE_CACHE_OPEN_IPC_HANDLES=0" in notice
    monkeypatch.setenv(installation.CACHED_HANDLES, "0")
    assert not any("oneCCL" in line for line in installation.notices(2))


def test_notices_of_the_platform_reach_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.environment import collect

    monkeypatch.setattr(installation, "notices", lambda _: iter(["an extension is installed"]))
    assert "an extension is installed" in collect("cpu").notices


def test_queries_load_neither_torch_nor_a_runtime(run_emulated: Callable[..., list[str]]) -> None:
    code = """
from emulator import emuze
emu = emuze.EmulatedXpu(emuze.build())
from hal.xpu.platform import XpuPlatform
platform = XpuPlatform()
platform.device_count(), platform.get_memory_info(), XpuPlatform.missing()
print("torch" in sys.modules, emu.calls("zeContextCreate"))
"""
    assert run_emulated(code) == ["False 0"]
