"""Sysman's structures, as `level_zero/zes_api.h` has them."""

from __future__ import annotations

import ctypes as c
from typing import ClassVar


class Struct(c.Structure):
    """A structure that names its own type to the driver."""

    stype_value: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.stype = self.stype_value


class DeviceProperties(Struct):
    stype_value = 0x1
    _fields_ = [
        ("stype", c.c_uint32),
        ("next", c.c_void_p),
        ("core_stype", c.c_uint32),
        ("core_next", c.c_void_p),
        ("core_numbers", c.c_uint8 * 80),
        ("uuid", c.c_uint8 * 16),
        ("name", c.c_char * 256),
        ("subdevices", c.c_uint32),
        ("texts", (c.c_char * 64) * 6),
    ]


class PciProperties(Struct):
    stype_value = 0x2
    _fields_ = [
        ("stype", c.c_uint32),
        ("next", c.c_void_p),
        ("address", c.c_uint32 * 4),
        ("speed", c.c_uint8 * 16),
        ("counters", c.c_uint8 * 3),
    ]


class MemoryProperties(Struct):
    stype_value = 0xB
    _fields_ = [
        ("stype", c.c_uint32),
        ("next", c.c_void_p),
        ("type", c.c_uint32),
        ("on_subdevice", c.c_uint8),
        ("subdevice", c.c_uint32),
        ("location", c.c_uint32),
        ("physical_size", c.c_uint64),
        ("bus", c.c_int32 * 2),
    ]


class MemoryState(Struct):
    stype_value = 0x1E
    _fields_ = [
        ("stype", c.c_uint32),
        ("next", c.c_void_p),
        ("health", c.c_uint32),
        ("free", c.c_uint64),
        ("size", c.c_uint64),
    ]


class ProcessState(Struct):
    stype_value = 0x16
    _fields_ = [
        ("stype", c.c_uint32),
        ("next", c.c_void_p),
        ("process", c.c_uint32),
        ("memory", c.c_uint64),
        ("shared", c.c_uint64),
        ("engines", c.c_uint32),
    ]


SIZES = {
    DeviceProperties: 776,
    PciProperties: 56,
    MemoryProperties: 48,
    MemoryState: 40,
    ProcessState: 48,
}
"""Sizes in bytes as the specification's headers have them."""
