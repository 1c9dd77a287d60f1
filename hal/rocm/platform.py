"""The `rocm` platform: AMD GPUs through HIP's virtual memory and torch's memory pools."""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from hal.capabilities import capabilities_from
from hal.memory import MemoryInfo, TorchUsage
from hal.native import Device, Fact
from hal.platform import Capabilities, Flag, Platform, PoolNesting
from hal.pools import probe_nesting
from hal.rocm import installation, telemetry

if TYPE_CHECKING:
    from hal.torch_pool import TorchPool

_UNVERIFIED = "by the same calls as on CUDA; not verified on AMD hardware"

_ADVISED = (6, 3, 42134)
"""The HIP version of ROCm 6.3.4; 6.3.2 and 6.3.3 carry the same number."""

_FEW_FILES = 65536

_log = logging.getLogger(__name__)


class RocmPlatform(Platform):
    """AMD GPUs; torch's builds for them call their device type "cuda".

    `chunk` is the largest physical piece in bytes (default: 256 MiB). `release` is how memory gets
    back to the device while its addresses stay: "plain", "placeholder" (the range is given up and
    reserved again) or "anon-remap" (inaccessible memory is mapped over it); by default the first of
    them that a trial at opening proves.
    """

    name: ClassVar[str] = "rocm"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, *, chunk: int | None = None, release: str | None = None) -> None:
        super().__init__()
        options = {"chunk": chunk, "release": release}
        self._options = ";".join(f"{k}={v}" for k, v in options.items() if v is not None)
        self._count: int | None = None

    @classmethod
    def why_not(cls) -> str | None:
        """What is missing for this platform; None when it can be used."""
        return installation.why_not()

    @classmethod
    def missing(cls) -> tuple[str, ...]:
        return installation.missing()

    @classmethod
    def notices(cls) -> Iterator[str]:
        yield from installation.notices()

    def device_count(self) -> int:
        # The visible lists count until a device is open; a change after that comes too late, as in
        # HIP itself.
        return len(telemetry.visible().gpus) if self._count is None else self._count

    def get_memory_info(self, device: int = 0) -> MemoryInfo:
        opened = self._devices.get(device)
        if opened is None:
            return telemetry.memory_info(telemetry.Target(device))
        target = telemetry.Target(
            device,
            device_id=opened.facts.device_uuid or None,
            driver=opened.memory,
            tracked=opened.counters().mapped_bytes,
        )
        return telemetry.memory_info(target)

    def torch_usage(self, device: int = 0) -> TorchUsage:
        from hal.torch_memory import torch_memory
        from hal.torch_pool import usage_outside

        memory, _ = torch_memory(self.device_type)
        return usage_outside(memory, self.device(device))

    def create_pool(self, tag: str, device: int = 0) -> TorchPool:
        from hal.torch_memory import torch_memory
        from hal.torch_pool import TorchPool

        return TorchPool(self.device(device), tag, *torch_memory(self.device_type))

    def _open(self, index: int) -> Device:
        import torch  # noqa: F401 - it loads the runtime that it brings, and there must be one alone

        shown = telemetry.visible()
        device = Device("rocm", index, self._options)
        self._count = len(shown.gpus)
        for warning in filter(None, [shown.warning, *_doubts(device.facts.version)]):
            _log.warning("%s", warning)
        return device

    def _capabilities(self, index: int) -> Capabilities:
        facts = self.device(index).facts
        if Fact.VMM not in facts.yes:
            no = Flag(False, facts.why_not[Fact.VMM])
            return capabilities_from(self, index, PoolNesting.LIFO, "declared", no)
        order = probe_nesting(self, index)
        return capabilities_from(self, index, order, "probed", Flag(True, _UNVERIFIED))


def _doubts(version: str) -> Iterator[str]:
    """What the driver's version text, as in "HIP 7.2.26015 (release: plain)", calls for."""
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < _ADVISED:
        yield (
            f"{version} is older than ROCm 6.3.4, the oldest with which memory is known to sleep "
            "and wake; update ROCm"
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ("placeholder" in version or "anon-remap" in version) and files < _FEW_FILES:
        yield (
            f"{version}: releases of this kind keep a file open for each mapping, and this process "
            f"may open {files}; raise it with ulimit -n"
        )
