"""The ctypes binding of libhal: structures as in `native/c_api.h`, statuses turned into typed
errors.

ctypes releases the GIL in every call, and libhal never takes it, so no call here can deadlock with
an allocation that torch makes from another thread.
"""

from __future__ import annotations

import ctypes as c
import enum
import functools
import os
import struct
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import hal
from hal.errors import (
    AddressLostError,
    BackupCorrupted,
    BusyError,
    DriverError,
    HalError,
    HostMemoryError,
    InvalidArgument,
    OutOfDeviceMemory,
    StateError,
    Unsupported,
)

API_VERSION = 2
ALL_STREAMS = 0xFFFFFFFF
_UNKNOWN_BYTES = 2**64 - 1


class Kind(enum.IntEnum):
    """`hal_kind`: what a failure means, whatever the vendor calls it."""

    OK = 0
    OUT_OF_DEVICE_MEMORY = 1
    HOST_MEMORY = 2
    BUSY = 3
    DRIVER_ERROR = 4
    ADDRESS_LOST = 5
    BAD_STATE = 6
    INVALID = 7
    UNSUPPORTED = 8
    CORRUPT_BACKUP = 9


class Fact(enum.IntEnum):
    """`hal_fact`: bit numbers of the yes/no facts of a device."""

    VMM = 0
    PIN_HOST = 1
    SCRUBS = 2
    FREE_TRUTHFUL = 3
    HOST_ACCESS = 4
    UNIFIED_MEMORY = 5
    RDMA = 6
    PARK = 7


class SegmentState(enum.IntEnum):
    """`hal_segment_state`; FREED is what an order reports for a segment that is gone."""

    FREED = -1
    MAPPED = 0
    ASLEEP_BACKED = 1
    ASLEEP_DISCARDED = 2


class Action(enum.IntEnum):
    """`hal_action`: what sleep does to one segment; DROP_BACKUP is for one that sleeps already."""

    OFFLOAD = 1
    DISCARD = 2
    DROP_BACKUP = 3


class Backing(enum.IntEnum):
    """`hal_backing`: where backups live."""

    ANONYMOUS = 0
    FILE = 1
    PINNED = 2


class Status(c.Structure):
    """`hal_status`, filled by every call that can fail."""

    _fields_ = [
        ("kind", c.c_int32),
        ("code", c.c_int32),
        ("size", c.c_uint64),
        ("address", c.c_uint64),
        ("needed", c.c_uint64),
        ("available", c.c_uint64),
        ("limit", c.c_uint64),
        ("call", c.c_char * 32),
        ("text", c.c_char * 232),
    ]


class _Facts(c.Structure):
    _fields_ = [
        ("granularity", c.c_uint64),
        ("alignment", c.c_uint64),
        ("chunk", c.c_uint64),
        ("streams", c.c_uint32),
        ("yes", c.c_uint32),
        ("why_not", (c.c_char * 120) * len(Fact)),
        ("device_name", c.c_char * 64),
        ("device_uuid", c.c_char * 64),
        ("version", c.c_char * 48),
    ]


class Counters(c.Structure):
    """`hal_counters`: the ledger's books and the number of driver calls since open."""

    NAMES = (
        "segments mapped_bytes asleep_bytes handles mappings reservations reserved_bytes pools "
        "creates releases maps unmaps deferred_frees"
    ).split()
    _fields_ = [(name, c.c_uint64) for name in NAMES]

    def as_dict(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in self.NAMES}


class _Segment(c.Structure):
    _fields_ = [
        ("address", c.c_uint64),
        ("size", c.c_uint64),
        ("pool", c.c_uint64),
        ("serial", c.c_uint64),
        ("backup_bytes", c.c_uint64),
        ("state", c.c_int32),
        ("free_pending", c.c_int32),
    ]


class _Order(c.Structure):
    _fields_ = [
        ("address", c.c_uint64),
        ("serial", c.c_uint64),
        ("action", c.c_int32),
        ("first_range", c.c_uint32),
        ("range_count", c.c_uint32),
        ("nothing_live", c.c_int32),
        ("first_clean", c.c_uint32),
        ("clean_count", c.c_uint32),
        ("retain", c.c_int32),
        ("reserved", c.c_int32),
        ("copied_bytes", c.c_uint64),
        ("released_bytes", c.c_uint64),
        ("mapped_bytes", c.c_uint64),
        ("filled_bytes", c.c_uint64),
        ("unchanged_bytes", c.c_uint64),
        ("skipped", c.c_int32),
        ("state", c.c_int32),
    ]


_ORDERED = "QQiIIiIIii"
"""The fields of an order before its results."""


class _Range(c.Structure):
    _fields_ = [("offset", c.c_uint64), ("size", c.c_uint64)]


class _Report(c.Structure):
    _fields_ = [
        ("copied_bytes", c.c_uint64),
        ("released_bytes", c.c_uint64),
        ("mapped_bytes", c.c_uint64),
        ("filled_bytes", c.c_uint64),
        ("unchanged_bytes", c.c_uint64),
        ("host_bytes", c.c_uint64),
        ("synchronize_seconds", c.c_double),
        ("host_seconds", c.c_double),
        ("copy_seconds", c.c_double),
        ("total_seconds", c.c_double),
        ("ended_asleep", c.c_int32),
        ("rolled_back", c.c_int32),
    ]


class _HostInfo(c.Structure):
    _fields_ = [("available", c.c_uint64), ("total", c.c_uint64), ("source", c.c_char * 32)]


class _ArenaOptions(c.Structure):
    _fields_ = [
        ("backing", c.c_int32),
        ("verify", c.c_int32),
        ("require_pinned", c.c_int32),
        ("reserved", c.c_int32),
        ("budget", c.c_uint64),
        ("directory", c.c_char_p),
        ("codec", c.c_char_p),
        ("codec_library", c.c_char_p),
        ("codec_kind", c.c_char_p),
    ]


class _ArenaStats(c.Structure):
    _fields_ = [
        ("held_bytes", c.c_uint64),
        ("used_bytes", c.c_uint64),
        ("pinned_bytes", c.c_uint64),
        ("chunks", c.c_uint64),
        ("fell_back", c.c_int32),
        ("direct_io", c.c_int32),
    ]


@dataclass(frozen=True)
class DeviceFacts:
    """What a driver reports of an opened device; sizes in bytes, `why_not` holds the reason of each
    "no".
    """

    granularity: int
    alignment: int
    chunk: int
    streams: int
    yes: frozenset[Fact]
    why_not: dict[Fact, str]
    device_name: str
    device_uuid: str
    version: str


class Segment(NamedTuple):  # there are thousands of them, and a tuple is made much faster
    """One range of device addresses in the ledger; `serial` tells apart two that had the same
    address.
    """

    address: int
    size: int
    pool: int
    serial: int
    backup_bytes: int
    state: SegmentState
    free_pending: bool

    @property
    def end(self) -> int:
        return self.address + self.size


class Order(NamedTuple):
    """What a transition shall do to one segment.

    `live`: (offset, size) ranges to keep; None: all of it. `clean`: ranges that a retained backup
    holds as they are. `retain`: the backup outlives the wake.
    """

    segment: Segment
    action: Action = Action.OFFLOAD
    live: tuple[tuple[int, int], ...] | None = None
    clean: tuple[tuple[int, int], ...] = ()
    retain: bool = False


class OrderResult(NamedTuple):
    """What a transition did to one segment, in bytes."""

    segment: Segment
    copied: int
    released: int
    mapped: int
    filled: int
    unchanged: int
    skipped: bool
    state: SegmentState


@dataclass(frozen=True)
class TransferReport:
    """What a transition did in all: bytes, seconds a phase, and how it ended."""

    orders: tuple[OrderResult, ...]
    copied: int
    released: int
    mapped: int
    filled: int
    unchanged: int
    host_bytes: int
    synchronize_seconds: float
    host_seconds: float
    copy_seconds: float
    total_seconds: float
    ended_asleep: bool
    rolled_back: bool


class TransferFailed(Exception):
    """Internal to hal: a transition's typed error with the report of how it ended."""

    def __init__(self, error: HalError, report: TransferReport) -> None:
        super().__init__(str(error))
        self.error, self.report = error, report


@dataclass(frozen=True)
class HostMemory:
    """Host memory this process may still take and its bound, in bytes, and who said so."""

    available: int
    total: int
    source: str


@dataclass(frozen=True)
class ArenaStats:
    """What an arena holds, in bytes."""

    held: int
    used: int
    pinned: int
    chunks: int
    fell_back: bool
    direct_io: bool


_POINTER = c.c_void_p
_U64, _I32, _U32, _SIZE = c.c_uint64, c.c_int32, c.c_uint32, c.c_size_t
_STATUS = c.POINTER(Status)

# name -> argument types before the trailing status; every one returns a hal_kind.
_CALLS: dict[str, tuple[Any, ...]] = {
    "hal_register_driver": (_POINTER,),
    "hal_load_driver": (c.c_char_p,),
    "hal_device_open": (c.c_char_p, _I32, c.c_char_p, c.POINTER(_POINTER)),
    "hal_device_close": (_POINTER,),
    "hal_device_facts": (_POINTER, c.POINTER(_Facts)),
    "hal_device_memory": (_POINTER, c.POINTER(_U64), c.POINTER(_U64)),
    "hal_device_set_margin": (_POINTER, _U64),
    "hal_granularity": (_POINTER, _U64, c.POINTER(_U64)),
    "hal_reserve": (_POINTER, _U64, _U64, _U64, c.POINTER(_U64)),
    "hal_unreserve": (_POINTER, _U64, _U64),
    "hal_create": (_POINTER, _U64, c.POINTER(_U64)),
    "hal_release": (_POINTER, _U64, _U64),
    "hal_map": (_POINTER, _U64, _U64, _U64),
    "hal_access": (_POINTER, _U64, _U64),
    "hal_unmap": (_POINTER, _U64, _U64),
    "hal_copy_to_host": (_POINTER, _POINTER, _U64, _U64, _U32),
    "hal_copy_to_device": (_POINTER, _U64, _POINTER, _U64, _U32),
    "hal_fill": (_POINTER, _U64, c.c_uint8, _U64, _U32),
    "hal_synchronize": (_POINTER, _U32),
    "hal_host_register": (_POINTER, _POINTER, _U64),
    "hal_host_unregister": (_POINTER, _POINTER, _U64),
    "hal_pool_create": (
        _POINTER,
        c.c_char_p,
        c.POINTER(_U64),
        c.POINTER(_POINTER),
        c.POINTER(_POINTER),
    ),
    "hal_pool_destroy": (_POINTER, _U64),
    "hal_pool_allocate": (_POINTER, _U64, _U64, c.POINTER(_U64)),
    "hal_free": (_POINTER, _U64),
    "hal_pool_take_error": (_POINTER, _U64),
    "hal_host_memory": (c.POINTER(_HostInfo),),
    "hal_arena_create": (_POINTER, c.POINTER(_ArenaOptions), c.POINTER(_POINTER)),
    "hal_arena_destroy": (_POINTER,),
    "hal_arena_prepare": (_POINTER, _U64),
    "hal_arena_check": (_POINTER, _U64),
    "hal_sleep": (
        _POINTER,
        _POINTER,
        c.POINTER(_Order),
        _SIZE,
        c.POINTER(_Range),
        _SIZE,
        c.POINTER(_Report),
    ),
    "hal_wake": (_POINTER, _POINTER, c.POINTER(_Order), _SIZE, _I32, c.POINTER(_Report)),
    "hal_fault_set": (_POINTER, c.c_char_p, _U64, _I32, c.c_int64),
    "hal_backup_flip_bit": (_POINTER, _U64, _U64),
    "hal_backup_read": (_POINTER, _U64, _U64, _U64, _POINTER),
}
_OTHERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hal_api_version": (_U32, ()),
    "hal_driver_names": (_SIZE, (c.c_char_p, _SIZE)),
    "hal_device_counters": (None, (_POINTER, c.POINTER(Counters))),
    "hal_segments": (_SIZE, (_POINTER, _U64, c.POINTER(_Segment), _SIZE)),
    "hal_arena_stats_of": (None, (_POINTER, c.POINTER(_ArenaStats))),
    "hal_arena_trim": (_U64, (_POINTER,)),
    "hal_fingerprint": (None, (_POINTER, _SIZE, c.POINTER(_U64), _POINTER)),
    "hal_fault_clear": (None, (_POINTER,)),
    "hal_fault_hits": (_U64, (_POINTER, c.c_char_p)),
}


def library_path() -> Path:
    """The file of libhal: `HAL_LIBRARY`, else the one installed in this package.

    An editable install spreads the package over two folders: this file's and the one of what was
    built.
    """
    if chosen := os.environ.get("HAL_LIBRARY"):
        return Path(chosen)
    folders = [Path(__file__).parent, *map(Path, hal.__path__)]
    found = (folder / "libhal.so" for folder in folders if (folder / "libhal.so").is_file())
    return next(found, folders[0] / "libhal.so")


@functools.cache
def library() -> c.CDLL:
    """libhal, loaded once; raises `Unsupported` with what to do when it is missing or of another
    version.
    """
    path = library_path()
    try:
        lib = c.CDLL(str(path))
    except OSError as error:
        raise Unsupported("libhal", "this installation", f"{error}; reinstall accel-hal") from error
    for name, arguments in _CALLS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = _I32, [*arguments, _STATUS]
    for name, (result, arguments) in _OTHERS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, list(arguments)
    if (found := lib.hal_api_version()) != API_VERSION:
        raise Unsupported(
            "libhal",
            str(path),
            f"it has API version {found}, this package needs {API_VERSION}; reinstall accel-hal",
        )
    return lib


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _known(count: int) -> int | None:
    return None if count == _UNKNOWN_BYTES else count


def _free_bytes(status: Status) -> int | None:
    """What was free when device memory ran short; known only where the status has `needed` too."""
    return _known(status.available) if status.needed else None


def error_of(status: Status, *, tag: str | None = None) -> HalError:
    """The typed error that a failed status stands for."""
    call, text = _text(status.call), _text(status.text)
    what = f"{call}: {text}"
    makers: dict[Kind, Callable[[], HalError]] = {
        Kind.OUT_OF_DEVICE_MEMORY: lambda: OutOfDeviceMemory(
            tag, status.needed or status.size, _free_bytes(status), what
        ),
        Kind.HOST_MEMORY: lambda: HostMemoryError(
            _known(status.needed), _known(status.available), status.limit or None, what
        ),
        Kind.BUSY: lambda: BusyError(what),
        Kind.DRIVER_ERROR: lambda: DriverError(
            call, status.code, text, status.size, status.address
        ),
        Kind.ADDRESS_LOST: lambda: AddressLostError(status.address, status.needed),
        Kind.BAD_STATE: lambda: StateError(what),
        Kind.INVALID: lambda: InvalidArgument(what),
        Kind.UNSUPPORTED: lambda: Unsupported(call, "this platform", text),
        Kind.CORRUPT_BACKUP: lambda: BackupCorrupted(status.address, status.size, text),
    }
    return makers[Kind(status.kind)]()


def _call(name: str, *arguments: Any, tag: str | None = None) -> None:
    status = Status()
    if getattr(library(), name)(*arguments, c.byref(status)) != Kind.OK:
        raise error_of(status, tag=tag)


def driver_names() -> list[str]:
    """The drivers that are registered, built in or added."""
    lib = library()
    buffer = c.create_string_buffer(lib.hal_driver_names(None, 0) + 1)
    lib.hal_driver_names(buffer, len(buffer))
    return [name for name in _text(buffer.value).split(",") if name]


def load_driver(path: str | os.PathLike[str]) -> None:
    """Register the driver of a shared object that exports `hal_driver_entry` (see
    `native/driver.h`).
    """
    _call("hal_load_driver", os.fsencode(path))


def fingerprint_host_memory(
    blocks: c.c_void_p, count: int, keys: Sequence[int], digests: c.c_void_p
) -> None:
    """Fingerprint `count` (address, size) pairs, two uint64 each, of memory that the host reads.

    `keys`: the two of the rows and the two of the columns; `digests` gets two uint64 a block.
    """
    library().hal_fingerprint(blocks, count, (_U64 * 4)(*keys), digests)


def host_memory() -> HostMemory:
    """Host memory within every cgroup limit that binds this process."""
    info = _HostInfo()
    _call("hal_host_memory", c.byref(info))
    return HostMemory(info.available, info.total, _text(info.source))


@dataclass(frozen=True)
class Codec:
    """A codec of a device's driver: its name, the file that has it ("": the codec knows), and what
    kind of contents it encodes ("": bytes).
    """

    name: str
    library: str = ""
    kind: str = ""


class Arena:
    """Host memory or a file that holds backups; owned by one manager."""

    def __init__(
        self,
        device: Device,
        backing: Backing = Backing.ANONYMOUS,
        *,
        directory: str | os.PathLike[str] | None = None,
        budget: int = 0,
        verify: bool = False,
        require_pinned: bool = False,
        codec: Codec | None = None,
    ) -> None:
        options = _ArenaOptions(
            backing=backing,
            verify=verify,
            require_pinned=require_pinned,
            budget=budget,
            directory=os.fsencode(directory) if directory is not None else None,
            codec=codec.name.encode() if codec else None,
            codec_library=codec.library.encode() if codec else None,
            codec_kind=codec.kind.encode() if codec else None,
        )
        self._handle = _POINTER()
        self.device, self.backing = device, backing
        _call("hal_arena_create", device.handle, c.byref(options), c.byref(self._handle))

    @property
    def handle(self) -> c.c_void_p:
        if not self._handle:
            raise StateError("this arena is closed")
        return self._handle

    def stats(self) -> ArenaStats:
        raw = _ArenaStats()
        library().hal_arena_stats_of(self.handle, c.byref(raw))
        return ArenaStats(
            raw.held_bytes,
            raw.used_bytes,
            raw.pinned_bytes,
            raw.chunks,
            bool(raw.fell_back),
            bool(raw.direct_io),
        )

    def prepare(self, size: int) -> None:
        """Take memory for `size` bytes of backups now instead of at the next sleep."""
        _call("hal_arena_prepare", self.handle, size)

    def check(self, size: int) -> None:
        """Raise `HostMemoryError` if `size` more bytes of backups do not fit; changes nothing."""
        _call("hal_arena_check", self.handle, size)

    def trim(self) -> int:
        """Give memory that holds no backup back to the system; returns bytes."""
        return int(library().hal_arena_trim(self.handle))

    def close(self) -> None:
        if self._handle:
            _call("hal_arena_destroy", self._handle)
            self._handle = _POINTER()


@dataclass(frozen=True)
class PoolEntries:
    """A native pool and the pair of entry points that torch's pluggable allocators take."""

    id: int
    tag: str
    allocate: int
    free: int


class Device:
    """An opened device: its primitives, its ledger of segments, its transitions and its fault
    points.

    Addresses, handles and sizes are integers; sizes in bytes. Failures raise the errors of
    `hal.errors`.
    """

    def __init__(self, driver: str, index: int = 0, options: str = "") -> None:
        self._handle = _POINTER()
        self.driver, self.index = driver, index
        _call("hal_device_open", driver.encode(), index, options.encode(), c.byref(self._handle))
        self.facts = self._read_facts()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def handle(self) -> c.c_void_p:
        if not self._handle:
            raise StateError(f"device {self.driver}:{self.index} is closed")
        return self._handle

    @property
    def is_open(self) -> bool:
        return bool(self._handle)

    def close(self) -> None:
        """Close the device; `StateError` while it has segments."""
        if self._handle:
            _call("hal_device_close", self._handle)
            self._handle = _POINTER()

    def _read_facts(self) -> DeviceFacts:
        raw = _Facts()
        _call("hal_device_facts", self.handle, c.byref(raw))
        yes = frozenset(fact for fact in Fact if raw.yes >> fact & 1)
        why_not = {fact: _text(raw.why_not[fact].value) for fact in Fact if fact not in yes}
        return DeviceFacts(
            raw.granularity,
            raw.alignment,
            raw.chunk,
            raw.streams,
            yes,
            why_not,
            _text(raw.device_name),
            _text(raw.device_uuid),
            _text(raw.version),
        )

    # -- queries

    def memory(self) -> tuple[int, int]:
        """(free, total) device memory as the driver reports it."""
        free, total = _U64(), _U64()
        _call("hal_device_memory", self.handle, c.byref(free), c.byref(total))
        return free.value, total.value

    def set_margin(self, size: int) -> None:
        """Let pool allocations fail rather than leave less than `size` bytes of the device free."""
        _call("hal_device_set_margin", self.handle, size)

    def counters(self) -> Counters:
        counters = Counters()
        library().hal_device_counters(self.handle, c.byref(counters))
        return counters

    def segments(self, pool: int = 0) -> list[Segment]:
        """The ledger's segments of one pool (0: all), ordered by address."""
        lib, capacity = library(), 64
        while True:
            buffer = (_Segment * capacity)()
            count = lib.hal_segments(self.handle, pool, buffer, capacity)
            if count <= capacity:
                return [_segment(*raw) for raw in _rows(buffer)[:count]]
            capacity = count + 16

    # -- primitives

    def granularity(self, size: int) -> int:
        out = _U64()
        _call("hal_granularity", self.handle, size, c.byref(out))
        return out.value

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        out = _U64()
        _call("hal_reserve", self.handle, size, alignment, hint, c.byref(out))
        return out.value

    def unreserve(self, address: int, size: int) -> None:
        _call("hal_unreserve", self.handle, address, size)

    def create(self, size: int) -> int:
        out = _U64()
        _call("hal_create", self.handle, size, c.byref(out))
        return out.value

    def release(self, handle: int, size: int) -> None:
        _call("hal_release", self.handle, handle, size)

    def map(self, address: int, size: int, handle: int) -> None:
        _call("hal_map", self.handle, address, size, handle)

    def access(self, address: int, size: int) -> None:
        _call("hal_access", self.handle, address, size)

    def unmap(self, address: int, size: int) -> None:
        _call("hal_unmap", self.handle, address, size)

    def copy_to_host(self, host: int, address: int, size: int, stream: int = 0) -> None:
        """Queue a copy from the device to host address `host`; done after `synchronize(stream)`."""
        _call("hal_copy_to_host", self.handle, host, address, size, stream)

    def copy_to_device(self, address: int, host: int, size: int, stream: int = 0) -> None:
        """Queue a copy from host address `host` to the device; done after `synchronize(stream)`."""
        _call("hal_copy_to_device", self.handle, address, host, size, stream)

    def fill(self, address: int, value: int, size: int, stream: int = 0) -> None:
        _call("hal_fill", self.handle, address, value, size, stream)

    def synchronize(self, stream: int = ALL_STREAMS) -> None:
        _call("hal_synchronize", self.handle, stream)

    def host_register(self, host: int, size: int) -> None:
        _call("hal_host_register", self.handle, host, size)

    def host_unregister(self, host: int, size: int) -> None:
        _call("hal_host_unregister", self.handle, host, size)

    # -- pools

    def create_pool(self, tag: str) -> PoolEntries:
        pool, allocate, free = _U64(), _POINTER(), _POINTER()
        _call(
            "hal_pool_create",
            self.handle,
            tag.encode(),
            c.byref(pool),
            c.byref(allocate),
            c.byref(free),
        )
        return PoolEntries(pool.value, tag, allocate.value or 0, free.value or 0)

    def destroy_pool(self, pool: int) -> None:
        """Close a pool; its slot is used again after its last segment was freed."""
        _call("hal_pool_destroy", self.handle, pool)

    def allocate(self, pool: int, size: int, *, tag: str | None = None) -> int:
        address = _U64()
        _call("hal_pool_allocate", self.handle, pool, size, c.byref(address), tag=tag)
        return address.value

    def free(self, address: int) -> None:
        _call("hal_free", self.handle, address)

    def take_pool_error(self, pool: int, *, tag: str | None = None) -> HalError | None:
        """The first failure of the pool's allocation entry since the last call, or None."""
        status = Status()
        kind = library().hal_pool_take_error(self.handle, pool, c.byref(status))
        return None if kind == Kind.OK else error_of(status, tag=tag)

    # -- transitions

    def sleep(self, arena: Arena | None, orders: Sequence[Order]) -> TransferReport:
        """Offload and discard segments as one transaction; raises `TransferFailed`.

        Without an arena nothing can be offloaded.
        """
        raw, ranges = _raw_orders(orders)
        report, status = _Report(), Status()
        kind = library().hal_sleep(
            self.handle,
            arena.handle if arena else None,
            raw,
            len(orders),
            ranges,
            len(ranges),
            c.byref(report),
            c.byref(status),
        )
        return _finish(kind, status, report, raw, orders)

    def wake(
        self,
        arena: Arena | None,
        segments: Iterable[Segment],
        *,
        fill: int | None = None,
        retain: Container[int] = (),
    ) -> TransferReport:
        """Map and restore segments as one transaction; raises `TransferFailed`.

        `fill` is the byte for memory without contents; None: zero where the platform does not
        scrub. Backups of the segments whose serials are in `retain` outlive the wake.
        """
        orders = [Order(segment, retain=segment.serial in retain) for segment in segments]
        raw, _ = _raw_orders(orders)
        report, status = _Report(), Status()
        kind = library().hal_wake(
            self.handle,
            arena.handle if arena else None,
            raw,
            len(orders),
            -1 if fill is None else fill,
            c.byref(report),
            c.byref(status),
        )
        return _finish(kind, status, report, raw, orders)

    def read_backup(self, segment: Segment, offset: int, size: int, out: int) -> None:
        """Copy `size` bytes from `offset` on of a segment's backup to host address `out`.

        The backup is the one the segment sleeps with, or the one its last wake retained. Raises
        `StateError` where it does not have all of these bytes.
        """
        _call("hal_backup_read", self.handle, segment.address, offset, size, out)

    # -- fault points, for tests

    def fail(self, call: str, nth: int = 1, code: int = 0, times: int = 1) -> None:
        """Let the nth call from now of a primitive fail with a vendor code, `times` times (-1: for
        ever).
        """
        _call("hal_fault_set", self.handle, call.encode(), nth, code, times)

    def clear_faults(self) -> None:
        library().hal_fault_clear(self.handle)

    def fault_hits(self, call: str) -> int:
        return int(library().hal_fault_hits(self.handle, call.encode()))

    def flip_backup_bit(self, address: int, bit: int = 0) -> None:
        """Flip one bit of a sleeping segment's backup."""
        _call("hal_backup_flip_bit", self.handle, address, bit)


def _rows(array: Any) -> list[tuple[int, ...]]:
    """The fields of every structure in a ctypes array; far faster than reading them one by one."""
    codes = {c.c_uint64: "Q", c.c_uint32: "I", c.c_int32: "i"}
    layout = "".join(codes[field[1]] for field in array._type_._fields_)
    return list(struct.iter_unpack(layout, bytes(array)))


def _segment(  # the fields of `_Segment`, in its order
    address: int,
    size: int,
    pool: int,
    serial: int,
    backup_bytes: int,
    state: int,
    free_pending: int,
) -> Segment:
    return Segment(
        address, size, pool, serial, backup_bytes, SegmentState(state), bool(free_pending)
    )


def _raw_orders(orders: Sequence[Order]) -> tuple[Any, Any]:
    ranges: list[bytes] = []
    rows, results = [], bytes(c.sizeof(_Order) - struct.calcsize(_ORDERED))

    def listed(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
        first = len(ranges)
        ranges.extend(struct.pack("QQ", *pair) for pair in pairs)
        return first, len(ranges) - first

    for segment, action, live, clean, retain in orders:
        key = segment.address, segment.serial, action
        kept, known = listed(live or ()), listed(clean)
        rows.append(
            struct.pack(_ORDERED, *key, *kept, live is not None and not live, *known, retain, 0)
            + results
        )
    raw = (_Order * len(orders)).from_buffer_copy(b"".join(rows))
    return raw, (_Range * len(ranges)).from_buffer_copy(b"".join(ranges))


def _finish(
    kind: int, status: Status, report: _Report, raw: Any, orders: Sequence[Order]
) -> TransferReport:
    results = tuple(
        OrderResult(
            order.segment,
            copied,
            released,
            mapped,
            filled,
            unchanged,
            bool(skipped),
            SegmentState(state),
        )
        for (*_, copied, released, mapped, filled, unchanged, skipped, state), order in zip(
            _rows(raw), orders, strict=True
        )
    )
    value = TransferReport(
        results,
        report.copied_bytes,
        report.released_bytes,
        report.mapped_bytes,
        report.filled_bytes,
        report.unchanged_bytes,
        report.host_bytes,
        report.synchronize_seconds,
        report.host_seconds,
        report.copy_seconds,
        report.total_seconds,
        bool(report.ended_asleep),
        bool(report.rolled_back),
    )
    if kind != Kind.OK:
        raise TransferFailed(error_of(status), value)
    return value
