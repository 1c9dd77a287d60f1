"""The `cpu` platform: the embedded default, on which everything can be tried without an
accelerator.
"""

from __future__ import annotations

from typing import ClassVar

from hal.capabilities import capabilities_from
from hal.cpu.telemetry import memory_info
from hal.errors import Unsupported
from hal.host_pool import HostPool, ScopeStack
from hal.memory import MemoryInfo
from hal.native import Codec, Device
from hal.platform import Capabilities, Flag, Platform, PoolNesting
from hal.pools import probe_nesting


class CpuPlatform(Platform):
    """Host memory as the device.

    The options reproduce hazards of other platforms: `nesting` is the order of the caching
    allocator, `claims` an order to report instead of the probed one, `tag_from_scope` takes a
    segment's tag from the open scope, `capacity` bounds device memory in bytes, `dirty` is a byte
    that fresh memory is filled with.
    """

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"

    def __init__(
        self,
        nesting: PoolNesting = PoolNesting.LIFO,
        *,
        claims: PoolNesting | None = None,
        tag_from_scope: bool = False,
        capacity: int | None = None,
        dirty: int | None = None,
        granularity: int | None = None,
    ) -> None:
        super().__init__()
        self._scopes = ScopeStack(nesting, tag_from_scope=tag_from_scope)
        self._claims = claims
        options = {"capacity": capacity, "dirty": dirty, "granularity": granularity}
        self._options = ";".join(f"{k}={v}" for k, v in options.items() if v is not None)

    @classmethod
    def why_not(cls) -> str | None:
        """None: the host is always there."""
        return None

    def device_count(self) -> int:
        return 1

    def get_memory_info(self, device: int = 0) -> MemoryInfo:
        return memory_info(self.device(device))

    def create_pool(self, tag: str, device: int = 0) -> HostPool:
        return HostPool(self.device(device), tag, self._scopes)

    def codec(self, name: str, kind: str) -> Codec:
        if name != "zstd":
            raise Unsupported(f"compress={name!r}", self.name, "its codec is 'zstd'")
        return Codec(name, kind=kind)

    def _open(self, index: int) -> Device:
        return Device(self.name, index, self._options)

    def _capabilities(self, index: int) -> Capabilities:
        order, found = (
            (self._claims, "declared") if self._claims else (probe_nesting(self, index), "probed")
        )
        graphs = Flag(False, "the host has no device graphs")
        return capabilities_from(self, index, order, found, graphs)
