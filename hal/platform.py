"""The platform interface: capabilities as data, and the few methods in which platforms differ."""

from __future__ import annotations

import abc
import enum
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from hal.errors import StateError, Unsupported

if TYPE_CHECKING:
    from hal.memory import MemoryInfo, TorchUsage
    from hal.native import Codec, Device
    from hal.pools import Pool
    from hal.process_checkpoint import ProcessCheckpoint


class PoolNesting(enum.Enum):
    """Which of two nested pool scopes gets an allocation: the innermost or the outermost."""

    LIFO = "lifo"
    FIFO = "fifo"


@dataclass(frozen=True)
class Flag:
    """A yes or no; every "no" carries a one-line reason, and a "yes" may carry a reservation."""

    available: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.available and not self.reason:
            raise ValueError("a capability that is missing needs a reason")

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        answer = "yes" if self.available else "no"
        return f"{answer} ({self.reason})" if self.reason else answer


@dataclass(frozen=True)
class Capabilities:
    """What a platform can do, as data; sizes in bytes."""

    name: str
    device_type: str
    """torch's device type, as in `torch.device(device_type)`."""
    device_name: str
    driver_version: str
    pool_nesting: PoolNesting
    nesting_found: str
    """"probed" (two nested pools, one allocation, looked where it landed) or "declared"."""
    flatten: Flag
    """Leaving the outer of two scopes while the inner one is open puts each allocation where it
    belongs, whatever the nesting order: probed.
    """
    granularity: int
    virtual_memory: Flag
    """Addresses outlive their memory, so that memory can sleep."""
    graph_pools: Flag
    """A captured graph's pool can sleep."""
    scrubs_discarded: Flag
    """Fresh physical memory is zero; where it is not, a wake zeroes what was discarded."""
    pinned_host: Flag
    free_is_truthful: Flag
    """The driver's free memory moves with what this process maps and releases."""
    host_access: Flag
    """The host can read and write mapped device addresses."""
    unified_memory: Flag
    """Device and host memory are the same physical memory."""
    rdma: Flag
    park: Flag
    """The driver can checkpoint its own state of the process."""

    def flags(self) -> dict[str, Flag]:
        """The yes/no capabilities by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Flag)}


class Platform(abc.ABC):
    """A vendor's platform: opens devices, makes pools on them and answers memory queries.

    Making one and asking `device_count` or `get_memory_info` creates no device context; `device`,
    `capabilities` and `create_pool` do.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._known: dict[int, Capabilities] = {}
        self._lock = threading.Lock()

    @classmethod
    def why_not(cls) -> str | None:
        """Why this platform cannot be used here, in one line that says what to do; None when it
        can.

        Cheap, and without a device context: `hal.detect` asks it before a process forks.
        """
        return None

    @classmethod
    def missing(cls) -> tuple[str, ...]:
        """One line for each piece that is not here: what was looked for, and what to install."""
        why_not = cls.why_not()
        return () if why_not is None else (why_not,)

    @classmethod
    def notices(cls) -> Iterable[str]:
        """What of this platform works here but is probably not meant, in lines."""
        return ()

    @abc.abstractmethod
    def device_count(self) -> int:
        """How many devices this process can see; 0 when there are none."""

    @abc.abstractmethod
    def get_memory_info(self, device: int = 0) -> MemoryInfo:
        """Memory of `device` from the best source that answers; a missing source never raises."""

    def torch_usage(
        self,
        device: int = 0,  # noqa: ARG002 - for the platforms that have an answer
    ) -> TorchUsage | None:
        """What torch holds outside the pools; None where torch caches nothing on this device."""
        return None

    @abc.abstractmethod
    def create_pool(self, tag: str, device: int = 0) -> Pool:
        """A new, empty pool whose segments carry `tag` for life."""

    def codec(self, name: str, kind: str) -> Codec:  # noqa: ARG002 - for platforms that have one
        """The codec with which backups are encoded where the device's memory is.

        `kind`: what is encoded, "" for bytes. Raises `Unsupported` with what to do.
        """
        raise Unsupported(f"compress={name!r}", self.name, "no codec works on its memory")

    def process_checkpoint(self) -> ProcessCheckpoint:
        """How the driver's own state of this process goes off the devices that are open; raises
        `Unsupported`, as where the capability `park` is "no".
        """
        raise Unsupported("parking", self.name, self.capabilities.park.reason)

    @abc.abstractmethod
    def _open(self, index: int) -> Device:
        """Open the native device."""

    @abc.abstractmethod
    def _capabilities(self, index: int) -> Capabilities:
        """Facts and probes of an opened device."""

    def device(self, index: int = 0) -> Device:
        """The opened native device, the same object for the life of the platform."""
        if not 0 <= index < max(self.device_count(), 1):
            raise StateError(
                f"{self.name} has {self.device_count()} device(s), there is no device {index}"
            )
        with self._lock:
            if index not in self._devices:
                self._devices[index] = self._open(index)
            return self._devices[index]

    def open_devices(self) -> Mapping[int, Device]:
        """The devices that were opened so far, by index."""
        with self._lock:
            return dict(self._devices)

    @property
    def capabilities(self) -> Capabilities:
        """What device 0 can do; probed once."""
        return self.capabilities_of(0)

    def capabilities_of(self, index: int) -> Capabilities:
        """What one device can do; probed once a device."""
        if index not in self._known:
            self._known[index] = self._capabilities(index)
        return self._known[index]

    def __repr__(self) -> str:
        return f"<hal platform {self.name}>"
