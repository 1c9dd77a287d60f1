"""Memory queries of NVIDIA GPUs over a fake NVML: what is known, from whom, and nothing made up."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from hal.cuda import telemetry
from hal.cuda.nvml import Nvml
from hal.cuda.visibility import Card, identify, kernel_driver_cards, visible_devices
from hal.errors import HalError, OutOfDeviceMemory
from hal.memory import MemoryInfo
from hal.torch_build import TorchBuild

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from fake_nvml import FakeNvml

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "emulator"))
fake_nvml = importlib.import_module("fake_nvml")

MB, GB = 1 << 20, 1 << 30
A = "GPU-aaaa1111-0000-0000-0000-000000000001"
B = "GPU-bbbb2222-0000-0000-0000-000000000002"
C = "GPU-bbbb3333-0000-0000-0000-000000000003"
SLICE = "MIG-cccc4444-0000-0000-0000-000000000004"
OTHER_SLICE = "MIG-dddd5555-0000-0000-0000-000000000005"
MEMORY, MEMORY_V1 = "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"
NEIGHBOUR = 40001


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def shut_nvml_down() -> None:
    """End every use that this process has made of NVML."""
    try:
        while True:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError_Uninitialized:
        return


@pytest.fixture
def machine(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A machine without cards, and this process as if it had asked nothing yet."""
    fake = fake_nvml.FakeNvml(library, tmp_path / "machine")
    fake.install(monkeypatch)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(telemetry, "kernel_driver_cards", tuple)
    telemetry._nvml.renew()
    yield fake
    telemetry._nvml.renew()
    shut_nvml_down()


@pytest.fixture
def card(machine: FakeNvml) -> FakeNvml:
    """One card of 40 GB, of which the driver keeps 1 and a neighbour has 10."""
    machine.card(A, total=40 * GB, reserved=1 * GB, used=10 * GB)
    machine.process(A, 10 * GB, pid=NEIGHBOUR)
    return machine


def broken_driver() -> tuple[int, int]:
    raise HalError("cuMemGetInfo_v2 failed with code 999")


# -- figures


def test_nvml_answers_with_figures_of_this_process(card: FakeNvml) -> None:
    card.process(A, 3 * GB)
    info = telemetry.memory_info(0, device_id=A, tracked=2 * GB)
    assert info == MemoryInfo(
        40 * GB, 29 * GB, 3 * GB, "nvml v2", True, reserved=1 * GB, tracked=2 * GB
    )


def test_r73_pid_hidden_by_a_container_is_unknown_never_zero(card: FakeNvml) -> None:
    info = telemetry.memory_info(0, device_id=A, tracked=3 * GB)
    assert info.process_used is None
    assert not info.exact
    assert info.reason.startswith("pid not visible")
    assert info.process_at_least == 3 * GB
    assert (info.free, info.total) == (29 * GB, 40 * GB)


def test_r73_foreign_pid_with_our_number_is_not_ours(card: FakeNvml) -> None:
    card.process(A, 1 * GB)  # another process has this number outside the container
    info = telemetry.memory_info(0, device_id=A, tracked=3 * GB)
    assert info.process_used is None
    assert "less than this process holds" in info.reason
    assert info.process_at_least == 3 * GB


@pytest.mark.parametrize("used", [0, None])
def test_r73_listed_without_a_figure_is_unknown_never_zero(
    card: FakeNvml, used: int | None
) -> None:
    card.process(A, used)
    info = telemetry.memory_info(0, device_id=A)
    assert (info.process_used, info.exact, info.free) == (None, False, 29 * GB)
    assert "NVML" in info.reason


def test_process_list_that_is_denied_leaves_the_rest_known(card: FakeNvml) -> None:
    card.fail(PROCESSES, fake_nvml.NO_PERMISSION)
    info = telemetry.memory_info(0, device_id=A)
    assert (info.free, info.process_used, info.exact) == (29 * GB, None, False)
    assert "Insufficient Permissions" in info.reason


def test_client_of_the_multi_process_service_finds_itself(card: FakeNvml) -> None:
    card.process(A, 5 * GB, mps=True)
    assert telemetry.memory_info(0, device_id=A).process_used == 5 * GB


def test_r78_driver_reserved_memory_is_not_used_and_the_basis_is_named(machine: FakeNvml) -> None:
    machine.card(A, total=24576 * MB, reserved=904 * MB, used=8 * MB)
    new = telemetry.memory_info(0, device_id=A)
    machine.fail(MEMORY, fake_nvml.FUNCTION_NOT_FOUND)
    old = telemetry.memory_info(0, device_id=A)
    assert (new.source, new.reserved) == ("nvml v2", 904 * MB)
    assert (old.source, old.reserved) == ("nvml v1", None)
    assert new.total == old.total == 24576 * MB
    assert new.free == old.free == (24576 - 912) * MB


def test_r78_deltas_never_mix_sources(card: FakeNvml) -> None:
    before = telemetry.memory_info(0, device_id=A)
    card.fail(MEMORY, fake_nvml.FUNCTION_NOT_FOUND)
    assert telemetry.memory_info(0, device_id=A).free_since(before) is None
    card.fail(MEMORY_V1, fake_nvml.NOT_SUPPORTED)
    by_driver = telemetry.memory_info(0, device_id=A, driver=lambda: (30 * GB, 39 * GB))
    assert by_driver.source == "driver"
    assert by_driver.free_since(before) is None


def test_r80_neighbour_that_allocates_does_not_change_our_figure(card: FakeNvml) -> None:
    card.process(A, 3 * GB)
    before = telemetry.memory_info(0, device_id=A, tracked=3 * GB)
    card.clear()
    card.card(A, total=40 * GB, reserved=1 * GB, used=12 * GB)
    card.process(A, 3 * GB)
    after = telemetry.memory_info(0, device_id=A, tracked=3 * GB)
    assert after.process_used == before.process_used == 3 * GB
    assert after.free_since(before) == -2 * GB


@pytest.mark.parametrize("neighbour", [2 * GB, 10 * GB], ids=["frees", "equal"])
def test_r81_neighbour_that_frees_or_stays_leaves_our_figure_exact(
    card: FakeNvml, neighbour: int
) -> None:
    card.process(A, 3 * GB)
    before = telemetry.memory_info(0, device_id=A)
    card.clear()
    card.card(A, total=40 * GB, reserved=1 * GB, used=neighbour)
    card.process(A, 3 * GB)
    after = telemetry.memory_info(0, device_id=A)
    assert after.exact
    assert after.process_used == before.process_used == 3 * GB
    assert after.free_since(before) == 10 * GB - neighbour


# -- sources


def test_r82_query_that_fails_everywhere_raises_nothing_and_hides_no_error(card: FakeNvml) -> None:
    card.fail(MEMORY, fake_nvml.GPU_IS_LOST)
    info = telemetry.memory_info(0, device_id=A, driver=broken_driver, tracked=GB)
    assert "unknown free" in str(OutOfDeviceMemory("kv_cache", 4 * GB, info.free))
    assert (info.total, info.free, info.process_used, info.exact) == (None, None, None, False)
    assert (info.source, info.process_at_least) == ("none", GB)
    assert "code 999" in info.reason
    assert "torch has not started CUDA" in info.reason


def test_driver_answers_when_nvml_does_not_support_the_query(card: FakeNvml) -> None:
    card.fail(MEMORY, fake_nvml.NOT_SUPPORTED)
    info = telemetry.memory_info(0, device_id=A, driver=lambda: (20 * GB, 39 * GB), tracked=GB)
    assert (info.source, info.free, info.total) == ("driver", 20 * GB, 39 * GB)
    assert (info.process_used, info.exact, info.process_at_least) == (None, False, GB)
    assert "NVML: Not Supported" in info.reason


def fake_torch(contexts: set[int], uuid: str) -> SimpleNamespace:
    def mem_get_info(index: int) -> tuple[int, int]:
        contexts.add(index)
        return 21 * GB, 39 * GB

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        mem_get_info=mem_get_info,
        get_device_properties=lambda index: SimpleNamespace(uuid=uuid.removeprefix("GPU-")),
    )
    private = SimpleNamespace(_cuda_hasPrimaryContext=contexts.__contains__)
    return SimpleNamespace(cuda=cuda, _C=private)


def test_torch_answers_last_and_only_with_a_context_that_is_there(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.fail(MEMORY, fake_nvml.NOT_SUPPORTED)
    contexts = {0}
    monkeypatch.setitem(sys.modules, "torch", fake_torch(contexts, A))
    info = telemetry.memory_info(0, driver=broken_driver)
    assert (info.source, info.free, info.total) == ("torch", 21 * GB, 39 * GB)
    assert telemetry.memory_info(1, driver=broken_driver).source == "none"
    assert contexts == {0}


def test_without_nvidia_ml_py_the_driver_answers_and_the_reason_says_what_to_install(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    info = telemetry.memory_info(0, device_id=A, driver=lambda: (20 * GB, 39 * GB))
    assert info.source == "driver"
    assert "install accel-hal[cuda]" in info.reason


# -- MIG


@pytest.fixture
def sliced(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A 40 GB card that may not be asked, and its one slice of 20 GB, named in the visible list."""
    machine.card(B, bus="00000000:02:00.0", total=40 * GB, used=1 * GB, mig=True)
    machine.slice(B, SLICE, total=20 * GB, reserved=16 * MB, used=4 * GB)
    machine.fail(MEMORY, fake_nvml.NO_PERMISSION, device=B)
    machine.fail(PROCESSES, fake_nvml.NO_PERMISSION, device=B)
    machine.process(SLICE, 4 * GB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE)
    return machine


@pytest.mark.parametrize(
    "device_id", [None, B, SLICE, "GPU-" + SLICE[4:], SLICE[4:].upper().replace("-", "")]
)
def test_r74_slice_is_asked_whatever_cuda_calls_the_device(
    sliced: FakeNvml, device_id: str | None
) -> None:
    info = telemetry.memory_info(0, device_id=device_id)
    assert (info.total, info.free) == (20 * GB, 16 * GB - 16 * MB)
    assert (info.process_used, info.source, info.exact) == (4 * GB, "nvml v2", True)


def test_r74_denied_slice_falls_back_to_the_driver(sliced: FakeNvml) -> None:
    sliced.fail(MEMORY, fake_nvml.NO_PERMISSION)
    info = telemetry.memory_info(0, driver=lambda: (15 * GB, 19 * GB))
    assert (info.source, info.free, info.total) == ("driver", 15 * GB, 19 * GB)
    assert info.process_used is None
    assert "Insufficient Permissions" in info.reason


def test_r74_denied_without_a_driver_is_unknown(sliced: FakeNvml) -> None:
    sliced.fail(MEMORY, fake_nvml.NO_PERMISSION)
    info = telemetry.memory_info(0)
    assert (info.total, info.free, info.source) == (None, None, "none")


def test_r74_slice_that_is_not_named_is_unknown_when_there_are_several(
    sliced: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced.slice(B, OTHER_SLICE, total=10 * GB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-nothing")
    info = telemetry.memory_info(0, device_id=B)
    assert info.total is None
    assert "name it in CUDA_VISIBLE_DEVICES" in info.reason


def test_slices_that_changed_are_looked_up_again(sliced: FakeNvml) -> None:
    assert telemetry.memory_info(0).total == 20 * GB
    sliced.fail(MEMORY, fake_nvml.GPU_IS_LOST)
    assert telemetry.memory_info(0).source == "none"
    sliced.clear()
    sliced.card(B, total=40 * GB, mig=True)
    sliced.card(A, total=30 * GB)
    sliced.slice(B, SLICE, total=10 * GB)
    assert telemetry.memory_info(0).total == 10 * GB


# -- which devices


CARDS = (
    Card(A, "00000000:01:00.0", "H200"),
    Card(B, "00000000:02:00.0", "H200"),
    Card(C, "00000000:03:00.0", "H200"),
)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, (A, B, C)),
        ("", ()),
        (" ", ()),
        ("NoDevFiles", ()),
        ("-1", ()),
        ("2,1", (C, B)),
        (" 2, 0", (C, A)),
        ("0,2,-1,1", (A, C)),
        ("0,7,1", (A,)),
        ("0,,1", (A,)),
        ("1,0,1", ()),
        ("+1", (B,)),
        ("0x1,1", (A, B)),
        ("1abc", (B,)),
        ("abc", ()),
        (",1", ()),
        ("1;0", (B,)),
        (f"{C},{A}", (C, A)),
        ("GPU-aaaa", (A,)),
        ("GPU-bbbb", ()),
        ("GPU-bbbb2,GPU-bbbb3", (B, C)),
        ("GPU-", ()),
        ("GPU-AAAA1111", (A,)),
        ("gpu-aaaa1111", ()),
        ("GPU-aaaaxyz", ()),
        ("GPU-aaaa-", (A,)),
        (f"GPU-{A[4:].replace('-', '')}", (A,)),
        (f"{A}x", (A,)),
        (A.removeprefix("GPU-"), ()),
        (f"{A} ", (A,)),
        (f" {A}", ()),
        (f"MIG-{A[4:]}", (A,)),
        (f"{A},GPU-nothing,{B}", (A,)),
        (f"{A},GPU-aaaa", ()),
        (f"{A},1", (A,)),
        (f"1,{A}", (B,)),
    ],
)
def test_visible_list_is_read_as_cuda_reads_it(asked: str | None, expected: object) -> None:
    """Seen with the 580.159 driver on one card; what takes several is by the programming guide."""
    environment = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    visible = visible_devices(CARDS, environment)
    assert visible.uuids == expected
    if len(visible.uuids) < (asked or "").count(",") + 1:
        assert "CUDA_VISIBLE_DEVICES" in visible.reason


def test_cards_whose_uuid_is_not_told_are_told_apart() -> None:
    cards = [Card("GPU-????????", f"0000:0{bus}:00.0", "H200") for bus in (1, 2)]
    assert len(visible_devices(cards, {"CUDA_VISIBLE_DEVICES": "1,0"}).uuids) == 2
    assert len(visible_devices(cards, {"CUDA_VISIBLE_DEVICES": "1,1"}).uuids) == 0


def test_mig_device_is_the_only_device() -> None:
    cards = (CARDS[0], Card(B, "00000000:02:00.0", "H200", (SLICE, OTHER_SLICE)))
    assert visible_devices(cards, {}).uuids == (SLICE,)
    for asked, expected in (
        ("0", (A,)),
        ("0,1", (SLICE,)),
        (OTHER_SLICE, (OTHER_SLICE,)),
        (f"{OTHER_SLICE},{SLICE}", (OTHER_SLICE,)),
        (f"MIG-{B}/1/0", ()),
    ):
        assert visible_devices(cards, {"CUDA_VISIBLE_DEVICES": asked}).uuids == expected


def test_mig_device_of_an_unknown_card_is_not_guessed() -> None:
    cards = (
        Card(A, "00000000:01:00.0", "H100", (SLICE,)),
        Card(B, "00000000:02:00.0", "H200", (OTHER_SLICE,)),
    )
    assert visible_devices(cards, {}).uuids == (None,)
    assert visible_devices(cards[:1] + CARDS[1:], {}).uuids == (SLICE,)
    assert visible_devices(cards, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).uuids == (SLICE,)


def test_card_in_mig_mode_without_slices_is_no_device() -> None:
    cards = (CARDS[0], Card(B, "00000000:02:00.0", "H200", ()))
    assert visible_devices(cards, {}).uuids == (A,)


@pytest.fixture
def mixed(machine: FakeNvml) -> FakeNvml:
    """A slow card first on the bus, a fast one second: CUDA numbers them the other way round."""
    machine.card(B, bus="00000000:02:00.0", name="H200", total=141 * GB)
    machine.card(A, bus="00000000:01:00.0", name="T4", total=16 * GB)
    return machine


def test_r76_opened_device_is_joined_by_uuid_never_by_index(mixed: FakeNvml) -> None:
    assert telemetry.memory_info(0, device_id=B).total == 141 * GB
    assert telemetry.memory_info(1, device_id=A).total == 16 * GB
    assert telemetry.memory_info(0, device_id="0000:02:00.0").total == 141 * GB
    assert telemetry.memory_info(0, device_id=B.removeprefix("GPU-")).total == 141 * GB


def test_r76_unknown_order_is_said_not_guessed(
    mixed: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = telemetry.memory_info(0)
    assert info.total is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in info.reason
    assert telemetry.device_count() == 2
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert telemetry.memory_info(0).total == 16 * GB


@pytest.mark.parametrize(
    ("asked", "totals"),
    [
        (f"{B},{A}", [141, 16]),
        (f"{A},GPU-nothing,{B}", [16]),
        ("GPU-bbbb", [141]),
        (f"{A},{A}", []),
    ],
)
def test_r76_named_cards_are_those_of_the_list_up_to_its_first_invalid_entry(
    mixed: FakeNvml, monkeypatch: pytest.MonkeyPatch, asked: str, totals: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert telemetry.device_count() == len(totals)
    found = [telemetry.memory_info(index).total for index in range(len(totals))]
    assert found == [total * GB for total in totals]
    assert telemetry.memory_info(len(totals)).total is None


def test_r76_what_torch_opened_is_believed_over_the_environment(
    mixed: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(set(), B))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", A)
    assert telemetry.memory_info(0).total == 141 * GB


def test_unknown_device_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="no device GPU-nothing"):
        identify(CARDS, {}, 0, "GPU-nothing")


def test_cards_that_this_process_may_not_use_are_not_counted(card: FakeNvml) -> None:
    card.card(B, bus="00000000:02:00.0", total=40 * GB)
    card.fail("nvmlDeviceGetHandleByIndex_v2", fake_nvml.NO_PERMISSION, device=A)
    assert telemetry.device_count() == 1
    assert telemetry.memory_info(0, device_id=B).total == 40 * GB


def test_kernel_driver_describes_cards_without_nvml(tmp_path: Path) -> None:
    for bus, uuid in (("0000:02:00.0", B), ("0000:01:00.0", A)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 83\nGPU UUID: \t {uuid}\nGPU Excluded:\t No\n"
        )
    assert kernel_driver_cards(tmp_path) == (
        Card(A, "0000:01:00.0", "NVIDIA H200"),
        Card(B, "0000:02:00.0", "NVIDIA H200"),
    )
    assert kernel_driver_cards(tmp_path / "absent") == ()


# -- threads, forks and strangers


def in_child(question: Callable[[], object]) -> object:
    """What `question` answers in a forked child; "timeout" when it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, json.dumps(question()).encode())
        os._exit(0)
    os.close(writer)
    timer = threading.Timer(20, os.kill, (child, 9))
    timer.start()
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    timer.cancel()
    return json.loads(answer) if answer else "timeout"


def test_r84_child_after_fork_asks_anew(card: FakeNvml) -> None:
    card.process(A, 3 * GB)

    def ask() -> list[object]:
        info = telemetry.memory_info(0, device_id=A)
        return [info.source, info.free, info.process_used]

    assert ask() == ["nvml v2", 29 * GB, 3 * GB]
    assert in_child(ask) == ["nvml v2", 29 * GB, 3 * GB]
    assert ask() == ["nvml v2", 29 * GB, 3 * GB]


def test_r84_child_of_a_fork_inside_a_query_does_not_hang(card: FakeNvml) -> None:
    telemetry._nvml._lock.acquire()  # as if another thread were opening NVML
    try:
        assert in_child(lambda: telemetry.memory_info(0, device_id=A).free) == 29 * GB
    finally:
        telemetry._nvml._lock.release()


def test_r84_changed_visible_list_is_honoured_before_cuda_starts(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.card(B, bus="00000000:02:00.0", total=50 * GB)
    assert (telemetry.device_count(), telemetry.memory_info(0).total) == (2, 40 * GB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (telemetry.device_count(), telemetry.memory_info(0).total) == (1, 50 * GB)
    assert telemetry.memory_info(0, device_id=A).total == 40 * GB


def test_r84_queries_load_neither_cuda_nor_torch(
    card: FakeNvml, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    script = (
        "import sys\n"
        "from hal.cuda import telemetry\n"
        "assert telemetry.device_count() == 1\n"
        "assert telemetry.memory_info(0).total == 40 << 30\n"
        "print('torch' in sys.modules, 'libcuda' in open('/proc/self/maps').read())\n"
    )
    found = run_python("-c", script, env=card.environment())
    assert found.stdout.split() == ["False", "False"], found.stderr


def test_shutdown_by_another_user_of_nvml_is_survived(card: FakeNvml) -> None:
    assert telemetry.memory_info(0, device_id=A).source == "nvml v2"
    shut_nvml_down()
    assert telemetry.memory_info(0, device_id=A).source == "nvml v2"
    shut_nvml_down()
    assert telemetry.device_count() == 1


def test_threads_share_one_nvml(card: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = pynvml.nvmlInit
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (opened.append(1), real()))
    nvml, answers, start = Nvml(), [], threading.Barrier(8)

    def ask() -> None:
        start.wait()
        answers.extend(nvml.memory(0, A, None).free for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [29 * GB] * 160
    assert len(opened) == 1


# -- why not


@pytest.fixture
def usable(card: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A machine on which nothing is missing."""
    monkeypatch.setattr(telemetry, "DRIVER", "libc.so.6")
    monkeypatch.setattr(
        telemetry, "torch_build", lambda: TorchBuild("2.11.0+cu130", {"cuda": "13.0"})
    )
    return card


def test_why_not_is_none_when_nothing_is_missing(usable: FakeNvml) -> None:
    assert telemetry.why_not() is None
    assert telemetry.device_count() == 1


@pytest.mark.parametrize("code", [fake_nvml.DRIVER_NOT_LOADED, fake_nvml.LIBRARY_NOT_FOUND])
def test_why_not_without_the_nvidia_driver(usable: FakeNvml, code: int) -> None:
    usable.fail("nvmlInitWithFlags", code)
    assert telemetry.device_count() == 0
    assert "install its driver" in (telemetry.why_not() or "")


def test_why_not_without_cards(usable: FakeNvml) -> None:
    usable.clear()
    assert "no NVIDIA GPU was found" in (telemetry.why_not() or "")


@pytest.mark.parametrize("asked", ["", "-1", "GPU-nothing", "0,0"])
def test_why_not_names_the_variable_that_hides_all_cards(
    usable: FakeNvml, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert f"CUDA_VISIBLE_DEVICES={asked!r}" in (telemetry.why_not() or "")
    assert telemetry.device_count() == 0


def test_why_not_in_a_container_that_has_nvml_but_not_cuda(
    usable: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "DRIVER", "libno-such-driver.so.1")
    assert "capability 'compute'" in (telemetry.why_not() or "")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (None, "torch is not installed"),
        (TorchBuild("2.13.0+cpu"), "torch 2.13.0+cpu (built for cpu) cannot use CUDA"),
        (TorchBuild("2.13.0+rocm7.2", {"hip": "7.2"}), "cannot use CUDA; install a CUDA build"),
    ],
)
def test_why_not_with_a_torch_that_cannot_use_the_gpu(
    usable: FakeNvml, monkeypatch: pytest.MonkeyPatch, build: TorchBuild | None, text: str
) -> None:
    monkeypatch.setattr(telemetry, "torch_build", lambda: build)
    assert text in (telemetry.why_not() or "")


def test_cards_are_counted_without_nvidia_ml_py(
    usable: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(telemetry, "kernel_driver_cards", lambda: CARDS[:2])
    assert telemetry.device_count() == 2
    assert telemetry.why_not() is None
    monkeypatch.setattr(telemetry, "kernel_driver_cards", tuple)
    assert "install accel-hal[cuda]" in (telemetry.why_not() or "")
