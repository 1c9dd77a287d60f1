"""Memory queries of AMD GPUs: the real amdsmi over a fake library, the kernel driver's files in a
folder, and which GPU is meant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emulator import fake_amdsmi
from emulator.fake_amdsmi import FakeGpu
from hal.memory import MemoryInfo
from hal.rocm import kfd, telemetry
from hal.rocm.kfd import Gpu
from hal.rocm.smi import LAG, Smi
from hal.rocm.telemetry import Target, memory_info
from hal.rocm.visibility import visible_devices

MIB = 1 << 20
GIB = 1 << 30
FIRST, SECOND = "0000:03:00.0", "0000:83:00.0"
VARIABLES = (
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "ROCM_HOME",
    "ROCM_PATH",
)


class Kernel:
    """The amdgpu driver's files as it lays them out in /sys."""

    def __init__(self, root: Path) -> None:
        self.nodes, self.processes, self.cards = (root / name for name in ("kfd", "proc", "drm"))
        self.nodes.mkdir()
        self.cards.mkdir()
        self.add_node({"cpu_cores_count": 8, "simd_count": 0})

    def add_node(self, properties: dict[str, int], kfd_id: int = 0) -> None:
        node = self.nodes / str(len(list(self.nodes.iterdir())))
        node.mkdir()
        lines = (f"{name} {value}" for name, value in properties.items())
        (node / "properties").write_text("\n".join(lines) + "\n")
        (node / "gpu_id").write_text(f"{kfd_id}\n")

    def add_gpu(
        self, address: str, unique_id: int, kfd_id: int, total: int = 0, used: int = 0
    ) -> None:
        bus = int(address.split(":")[1], 16)
        place = {"location_id": bus << 8, "domain": 0, "unique_id": unique_id}
        self.add_node({"simd_count": 304, **place}, kfd_id)
        device = self.cards.parent / "devices" / address
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{total}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
        card = self.cards / f"card{len(list(self.cards.iterdir()))}"
        card.mkdir()
        (card / "device").symlink_to(device)

    def add_process(self, pid: int, kfd_id: int, size: int) -> None:
        folder = self.processes / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"vram_{kfd_id}").write_text(f"{size}\n")


def forget_amdsmi() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "amdsmi"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of this machine, no library that another test has opened."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(telemetry, "_smi", Smi())
    forget_amdsmi()
    yield
    forget_amdsmi()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(tmp_path)
    monkeypatch.setattr(kfd, "TOPOLOGY", made.nodes)
    monkeypatch.setattr(kfd, "PROCESSES", made.processes)
    monkeypatch.setattr(kfd, "CARDS", made.cards)
    return made


@pytest.fixture
def two_gpus(kernel: Kernel) -> Kernel:
    kernel.add_gpu(FIRST, 0xA1, 11, total=16 * GIB, used=1 * GIB)
    kernel.add_gpu(SECOND, 0xB2, 22, total=64 * GIB, used=2 * GIB)
    return kernel


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs the fake library with these GPUs."""

    def install(*gpus: FakeGpu, **options: object) -> None:
        monkeypatch.setenv("ROCM_PATH", str(fake_amdsmi.build()))
        for name, value in fake_amdsmi.environment(*gpus, **options).items():  # type: ignore[arg-type]
            monkeypatch.setenv(name, value)

    return install


# ---- amdsmi --------------------------------------------------------------------------------------


def test_amdsmi_answers_in_bytes(kernel: Kernel, smi: Callable[..., None]) -> None:
    smi(FakeGpu(FIRST, total_mib=196592, used_mib=1024), processes=((0, os.getpid(), 300 * MIB),))
    info = memory_info(Target(0, device_id=FIRST, tracked=64 * MIB))
    assert info == MemoryInfo(
        total=196592 * MIB,
        free=195568 * MIB,
        process_used=300 * MIB,
        source="amdsmi",
        exact=False,
        reason=LAG,
        tracked=64 * MIB,
    )


def test_the_older_call_answers_in_mib_and_is_told_apart(
    kernel: Kernel, smi: Callable[..., None]
) -> None:
    smi(FakeGpu(FIRST, total_mib=196592, used_mib=1024), refused=("amdsmi_get_gpu_memory_total",))
    info = memory_info(Target(0, device_id=FIRST))
    assert (info.source, info.total, info.free) == ("amdsmi", 196592 * MIB, 195568 * MIB)


def test_r85_the_gpu_is_joined_by_address_never_by_index(
    two_gpus: Kernel, smi: Callable[..., None]
) -> None:
    smi(FakeGpu(SECOND, total_mib=64), FakeGpu(FIRST, total_mib=16))
    assert memory_info(Target(0)).total == 16 * MIB
    assert memory_info(Target(1)).total == 64 * MIB
    assert memory_info(Target(0, device_id=SECOND)).total == 64 * MIB
    assert memory_info(Target(0, device_id="00000000:83:00.0")).total == 64 * MIB


def test_r85_the_gpu_is_joined_by_uuid_where_its_address_is_not_known(
    kernel: Kernel, smi: Callable[..., None]
) -> None:
    smi(FakeGpu(SECOND, "0xB2", total_mib=64), FakeGpu(FIRST, "0xA1", total_mib=16))
    assert memory_info(Target(0, device_id="GPU-00000000000000a1")).total == 16 * MIB
    missing = memory_info(Target(0, device_id="GPU-00000000000000c3"))
    assert missing.total is None
    assert "amdsmi lists 2 GPUs, none is GPU-00000000000000c3" in missing.reason


def test_r87_a_list_without_a_figure_asks_the_kernel_by_pid(
    two_gpus: Kernel, smi: Callable[..., None]
) -> None:
    smi(FakeGpu(FIRST), FakeGpu(SECOND), processes=((1, os.getpid(), 0),))
    assert memory_info(Target(1)).process_used is None, "0 in the list is no figure"
    two_gpus.add_process(os.getpid(), 22, 700 * MIB)
    assert memory_info(Target(1)).process_used == 700 * MIB
    assert memory_info(Target(0)).process_used is None, "the figure of another GPU"


def test_r87_a_list_that_fails_or_has_other_fields_asks_the_kernel_by_pid(
    two_gpus: Kernel, smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.add_process(os.getpid(), 11, 5 * MIB)
    smi(FakeGpu(FIRST), refused=("amdsmi_get_gpu_process_list",))
    assert memory_info(Target(0)).process_used == 5 * MIB
    amdsmi = sys.modules["amdsmi"]
    monkeypatch.setattr(
        amdsmi, "amdsmi_get_gpu_process_list", lambda handle: [{"pid": os.getpid()}]
    )
    assert memory_info(Target(0)).process_used == 5 * MIB
    monkeypatch.setattr(amdsmi, "amdsmi_get_gpu_process_list", lambda handle: [object()])
    assert memory_info(Target(0)).process_used == 5 * MIB


def test_r87_less_than_this_process_holds_is_another_process_s_figure(
    two_gpus: Kernel, smi: Callable[..., None]
) -> None:
    smi(FakeGpu(FIRST), processes=((0, os.getpid(), 10 * MIB),))
    info = memory_info(Target(0, tracked=20 * MIB))
    assert info.process_used is None
    assert info.process_at_least == 20 * MIB
    assert "less than this process holds" in info.reason


def test_a_process_that_nobody_lists_is_unknown_never_zero(
    two_gpus: Kernel, smi: Callable[..., None]
) -> None:
    smi(FakeGpu(FIRST), processes=((0, os.getpid() + 1, 10 * MIB),))
    info = memory_info(Target(0))
    assert info.process_used is None
    assert "pid not visible" in info.reason


# ---- after amdsmi --------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [34, 32])
def test_without_its_driver_amdsmi_gives_way_to_the_kernel_s_files(
    two_gpus: Kernel, smi: Callable[..., None], init: int
) -> None:
    smi(init=init)
    two_gpus.add_process(os.getpid(), 22, 3 * GIB)
    info = memory_info(Target(1))
    assert info == MemoryInfo(64 * GIB, 62 * GIB, 3 * GIB, "sysfs", True, info.reason)
    assert info.reason.startswith("amdsmi: ")
    assert str(init) in info.reason


def test_r73_the_kernel_s_files_without_this_pid_leave_its_use_unknown(two_gpus: Kernel) -> None:
    info = memory_info(Target(0, tracked=MIB))
    assert (info.source, info.process_used, info.exact) == ("sysfs", None, False)
    assert "in a container it has another number outside" in info.reason


def test_without_both_the_open_device_answers(kernel: Kernel) -> None:
    info = memory_info(Target(0, device_id=FIRST, driver=lambda: (3 * GIB, 4 * GIB)))
    assert (info.source, info.free, info.total) == ("driver", 3 * GIB, 4 * GIB)
    assert info.process_used is None
    assert not info.exact
    assert "sysfs: no card in" in info.reason


def test_r82_a_query_that_fails_everywhere_raises_nothing(kernel: Kernel) -> None:
    def fails() -> tuple[int, int]:
        raise RuntimeError("the device is lost")

    info = memory_info(Target(0, driver=fails, tracked=MIB))
    assert (info.total, info.free, info.process_used, info.tracked) == (None, None, None, MIB)
    for reason in ("amdsmi: ", "sysfs: ", "driver: the device is lost", "torch: "):
        assert reason in info.reason


def test_a_broken_package_is_a_reason_and_prints_nothing(
    two_gpus: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "nothing"))
    info = memory_info(Target(0))
    assert info.source == "sysfs"
    assert "KeyError: 'libamd_smi.so'" in info.reason, "what the package raises without its library"
    assert capfd.readouterr().out == ""
    assert "amdsmi" not in sys.modules


# ---- the kernel's list of GPUs -------------------------------------------------------------------


def test_gpus_are_those_of_the_kernel_in_the_order_of_their_nodes(two_gpus: Kernel) -> None:
    expected = (Gpu(FIRST, "GPU-00000000000000a1", 11), Gpu(SECOND, "GPU-00000000000000b2", 22))
    assert kfd.gpus() == expected
    for _ in range(9):
        two_gpus.add_node({"simd_count": 0})
    two_gpus.add_gpu("0000:c3:00.0", 0, 33)
    assert kfd.gpus() == (*expected, Gpu("0000:c3:00.0", "", 33)), "node 12 comes after node 2"


def test_a_gpu_that_this_container_may_not_open_is_none(two_gpus: Kernel) -> None:
    (two_gpus.nodes / "1" / "gpu_id").unlink()
    assert [gpu.address for gpu in kfd.gpus()] == [SECOND]


def test_address_of_a_function_in_another_domain(kernel: Kernel) -> None:
    kernel.add_node({"simd_count": 4, "location_id": 0x1234, "domain": 0x10}, 7)
    assert kfd.gpus() == (Gpu("0010:12:06.4", "", 7),)


# ---- visibility ----------------------------------------------------------------------------------

FOUR = tuple(Gpu(f"0000:{n:02x}:00.0", f"GPU-{n:016x}") for n in (0xA0, 0xA1, 0xB0, 0xC0))


def shown(**environment: str) -> list[int]:
    return [FOUR.index(gpu) for gpu in visible_devices(FOUR, environment).gpus]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "1,7,2"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "1,1,2"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000b0,gpu-00000000000000C0"}, [2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a,1"}, []),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "GPU-00000000000000b0"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1"}, [3]),
    ],
)
def test_visible_devices(environment: dict[str, str], expected: list[int]) -> None:
    assert shown(**environment) == expected


def test_r86_the_second_variable_numbers_what_the_first_leaves() -> None:
    assert shown(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="0") == [2]


@pytest.mark.parametrize("second", ["2", "GPU-00000000000000b0"])
def test_r86_a_second_variable_that_counts_all_gpus_is_named_with_the_first(second: str) -> None:
    environment = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": second}
    visible = visible_devices(FOUR, environment)
    assert visible.gpus == ()
    assert f"HIP_VISIBLE_DEVICES='{second}'" in visible.reason
    assert "ROCR_VISIBLE_DEVICES='2,3' leaves, 0 to 1" in visible.reason
    assert "change one of the two" in visible.reason


def test_r86_two_names_of_one_variable_that_differ_are_a_warning() -> None:
    environment = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}
    visible = visible_devices(FOUR, environment)
    assert visible.gpus == FOUR[:1]
    assert "HIP_VISIBLE_DEVICES='0' is used and CUDA_VISIBLE_DEVICES='1' is not" in visible.warning
    environment["CUDA_VISIBLE_DEVICES"] = "0"
    assert visible_devices(FOUR, environment).warning == ""


def test_a_device_that_is_not_visible_is_unknown_with_the_reason(
    two_gpus: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,5")
    assert memory_info(Target(0)).total == 16 * GIB
    info = memory_info(Target(1))
    assert info.total is None
    assert "HIP_VISIBLE_DEVICES='0,5' ends at '5'" in info.reason


def test_an_opened_device_is_believed_over_the_variables(
    two_gpus: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert memory_info(Target(0, device_id=SECOND)).total == 64 * GIB
