"""Errors: typed, with fields, a message that says what to do, and whole after crossing a process
boundary.
"""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from hal import errors
from hal.errors import (
    AddressLostError,
    AsleepError,
    BackupCorrupted,
    DirtyError,
    DriverError,
    HalError,
    HostMemoryError,
    NoPlatformError,
    OutOfDeviceMemory,
    StateError,
    UnknownPlatformError,
    UnknownTagError,
    Unsupported,
    WorkspaceLocked,
    WorkspaceTooSmall,
)

GIB = 1 << 30

# error, what its message must contain
EXAMPLES = [
    (DriverError("map", 1, "bad handle", 4096, 0x7F00), ["map", "code 1", "bad handle", "0x7f00"]),
    (
        OutOfDeviceMemory("weights", 3 * GIB, GIB),
        ["weights", "3.00 GiB", "1.00 GiB", "wait_for_memory"],
    ),
    (OutOfDeviceMemory(None, 5, None), ["5 bytes", "unknown free"]),
    (HostMemoryError(2 * GIB, GIB, GIB), ["2.00 GiB", "limit 1.00 GiB", "raise the budget"]),
    (
        BackupCorrupted(0x1000, 4096, "checksum differs"),
        ["0x1000", "checksum differs", "discard()"],
    ),
    (AsleepError(["weights", "kv_cache"]), ["'kv_cache', 'weights'", "call wake_up()"]),
    (DirtyError(f"layer.{i}" for i in range(10)), ["layer.7", "and 2 more", "mark_loaded()"]),
    (UnknownTagError("wieghts", ["weights"]), ["'wieghts'", "known tags: weights"]),
    (AddressLostError(0x1000, 0x2000), ["0x1000", "0x2000", "allocate them again"]),
    (Unsupported("park", "cpu", "no driver state"), ["park", "cpu", "no driver state"]),
    (UnknownPlatformError("cud", ["cuda", "cpu"]), ["'cud'", "cuda, cpu", "HAL_PLATFORM"]),
    (
        NoPlatformError.of("'a'", {"a": "no driver", "b": "no device"}, "install a driver"),
        ["'a'", "a: no driver", "b: no device", "install a driver"],
    ),
    (
        WorkspaceLocked("decode", 2048, 1024, "mla_decode"),
        ["decode", "mla_decode", "2.00 KiB", "reserve()"],
    ),
    (
        WorkspaceTooSmall("decode", 2048, 1024, "max_num_seqs"),
        ["decode", "1.00 KiB", "max_num_seqs"],
    ),
]


def ids(example: object) -> str:
    return type(example).__name__ if isinstance(example, HalError) else ""


@pytest.mark.parametrize(("error", "parts"), EXAMPLES, ids=ids)
def test_message_says_what_is_wrong_and_what_to_do(error: HalError, parts: list[str]) -> None:
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES], ids=ids)
@pytest.mark.parametrize("transport", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_cross_process_boundaries_whole(error: HalError, transport) -> None:  # type: ignore[no-untyped-def]
    arrived = transport(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived).keys() == vars(error).keys()


@pytest.mark.parametrize("kind", [OutOfDeviceMemory, HostMemoryError])
def test_memory_errors_are_memory_errors(kind: type[HalError]) -> None:
    assert issubclass(kind, MemoryError)


@pytest.mark.parametrize("kind", [AsleepError, DirtyError])
def test_state_errors(kind: type[HalError]) -> None:
    assert issubclass(kind, StateError)


@pytest.mark.parametrize("kind", [UnknownTagError, UnknownPlatformError])
def test_wrong_names_are_value_errors(kind: type[HalError]) -> None:
    assert issubclass(kind, ValueError)


def test_every_error_has_the_root_and_a_contract() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == "hal.errors"
    ]
    assert len(kinds) >= 15
    for kind in kinds:
        assert issubclass(kind, HalError)
        assert kind.__doc__


def test_no_platform_error_is_a_group_and_stays_itself_when_split() -> None:
    error = NoPlatformError.of("'a'", {"a": "no driver", "b": "no device"}, "install a driver")
    assert error.reasons == {"a": "no driver", "b": "no device"}
    matched, rest = error.split(
        lambda inner: isinstance(inner, Unsupported) and inner.feature == "a"
    )
    assert isinstance(matched, NoPlatformError)
    assert matched.reasons == {"a": "no driver"}
    assert isinstance(rest, NoPlatformError)
    assert rest.reasons == {"b": "no device"}
