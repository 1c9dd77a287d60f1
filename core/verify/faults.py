"""Causes of failed transitions: a driver call that fails, and a device that others have filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hal.errors import DriverError, OutOfDeviceMemory
from hal.native import Device

CODE = 999
"""What a failing call returns: no vendor's code for too little memory, so a plain driver error."""
_LARGEST = 1 << 36


@dataclass
class Fault:
    """Whether the armed call came."""

    hit: bool = False


@contextmanager
def failing(device: Device, call: str, nth: int) -> Iterator[Fault]:
    """Let the nth call from now of a primitive fail once."""
    fault = Fault()
    device.clear_faults()
    before = device.fault_hits(call)
    device.fail(call, nth, CODE)
    try:
        yield fault
    finally:
        fault.hit = device.fault_hits(call) > before
        device.clear_faults()


@contextmanager
def all_memory_taken(device: Device) -> Iterator[None]:
    """Hold all free memory of the device in handles of its own, beside every pool."""
    held: list[tuple[int, int]] = []
    try:
        size = _LARGEST
        while size >= device.facts.granularity:
            try:
                held.append((device.create(size), size))
            except (OutOfDeviceMemory, DriverError):
                size //= 2
        yield
    finally:
        for handle, taken in held:
            device.release(handle, taken)
