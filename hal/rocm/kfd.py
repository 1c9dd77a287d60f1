"""What the amdgpu kernel driver says of its GPUs in /sys, without any library and for any process.

All sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEVICE_FILE = Path("/dev/kfd")
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
PROCESSES = Path("/sys/class/kfd/kfd/proc")
CARDS = Path("/sys/class/drm")


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one partition of one.

    `uuid` is as ROCR_VISIBLE_DEVICES takes it, "" where the card has none; `kfd_id` is the number
    that the kernel driver's own books have for it, None where they are not readable.
    """

    address: str
    uuid: str = ""
    kfd_id: int | None = None


@dataclass(frozen=True)
class Vram:
    """Device memory of a whole card."""

    total: int
    used: int


def gpus() -> tuple[Gpu, ...]:
    """Those that this process may open, in the order in which the ROCm runtime counts them."""
    nodes = sorted(TOPOLOGY.glob("*"), key=lambda node: int(node.name))
    return tuple(gpu for node in nodes if (gpu := _gpu(node)) is not None)


def _gpu(node: Path) -> Gpu | None:
    try:
        lines = (node / "properties").read_text().splitlines()
        kfd_id = int((node / "gpu_id").read_text())
    except (OSError, ValueError):
        return None  # a container's devices bound what can be read, and what can be used
    properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
    if int(properties.get("simd_count", "0")) == 0:
        return None  # a CPU
    unique = int(properties.get("unique_id", "0"))
    uuid = f"GPU-{unique:016x}" if unique else ""
    return Gpu(_address(properties), uuid, kfd_id)


def _address(properties: dict[str, str]) -> str:
    place, domain = int(properties.get("location_id", "0")), int(properties.get("domain", "0"))
    return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def same_address(one: str, other: str) -> bool:
    """Whether two PCI addresses are one: libraries write the domain with 4 or with 8 digits."""
    return ":" in one and one.lower().lstrip("0") == other.lower().lstrip("0")


def vram(gpu: Gpu) -> Vram:
    """The card's memory; raises `LookupError` where the kernel driver describes no such card."""
    for card in sorted(CARDS.glob("card*/device")):
        if same_address(card.resolve().name, gpu.address):
            total, used = (_number(card / f"mem_info_vram_{what}") for what in ("total", "used"))
            if total is not None and used is not None:
                return Vram(total, used)
    raise LookupError(f"no card in {CARDS} tells the memory of {gpu.address}")


def process_vram(gpu: Gpu, pid: int) -> int | None:
    """What a process has of the GPU's memory; None where the books do not show it.

    They number processes as they are numbered outside of containers.
    """
    return None if gpu.kfd_id is None else _number(PROCESSES / str(pid) / f"vram_{gpu.kfd_id}")


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
