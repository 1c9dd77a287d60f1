"""Which GPUs the HIP runtime will show this process, told without starting it: two variables in a
row, of which the second numbers what the first has left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal.rocm.kfd import Gpu, same_address

RUNTIME_LIST = "ROCR_VISIBLE_DEVICES"
"""Read by the ROCm runtime beneath HIP: numbers or UUIDs, of all GPUs."""
HIP_LISTS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Read by HIP, the second where the first is empty: numbers of the GPUs that the runtime shows, or
UUIDs.
"""

_INTEGER = re.compile(r"[+-]?\d+")
_UUID = re.compile(r"GPU-[0-9A-F]{1,16}")


@dataclass(frozen=True)
class VisibleDevices:
    """The GPUs in HIP's order; `reason` says what was left out of a list, `warning` what in the
    variables contradicts itself.
    """

    gpus: tuple[Gpu, ...]
    reason: str = ""
    warning: str = ""


def visible_devices(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> VisibleDevices:
    """What is left of the GPUs of this machine, which stand in the kernel driver's order."""
    shown, reason = _by_runtime(gpus, environment.get(RUNTIME_LIST))
    name = next((name for name in HIP_LISTS if environment.get(name)), None)
    if name is not None:
        shown, cut = _by_hip(shown, name, environment)
        reason = "; ".join(filter(None, [reason, cut]))
    return VisibleDevices(tuple(shown), reason, _contradiction(environment))


def _by_runtime(gpus: Sequence[Gpu], asked: str | None) -> tuple[list[Gpu], str]:
    """The list ends at its first invalid or repeated entry; an empty one hides every GPU."""
    if asked is None:
        return list(gpus), ""
    if not asked:
        return [], f"{RUNTIME_LIST} is empty, which hides every GPU"
    chosen: list[Gpu] = []
    for entry in asked.split(","):
        gpu = _named(entry, gpus)
        if gpu is None or gpu in chosen:
            why = "names a GPU again" if gpu else f"names none of the {len(gpus)} GPUs"
            return chosen, f"{RUNTIME_LIST}={asked!r} ends at {entry!r}, which {why}"
        chosen.append(gpu)
    return chosen, ""


def _named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    return _by_uuid(entry, gpus) if "G" in entry.upper() else _by_number(entry, gpus)


def _by_number(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    number = int(entry) if _INTEGER.fullmatch(entry.strip()) else -1
    return gpus[number] if 0 <= number < len(gpus) else None


def _by_uuid(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """A UUID, or as much of its beginning as only one GPU has."""
    wanted = entry.strip().upper()
    if not _UUID.fullmatch(wanted):
        return None
    found = [gpu for gpu in gpus if gpu.uuid.upper().startswith(wanted)]
    return found[0] if len(found) == 1 else None


def _by_hip(
    shown: Sequence[Gpu], name: str, environment: Mapping[str, str]
) -> tuple[list[Gpu], str]:
    asked = environment[name]
    # Both lists by UUID contradict each other on some releases: then only numbers are sure.
    find = _by_number if environment.get(RUNTIME_LIST) else _named
    chosen: list[Gpu] = []
    for entry in asked.split(","):
        gpu = find(entry, shown)
        if gpu is None:
            return chosen, _why_hip_ends(name, asked, entry, shown, environment)
        if gpu not in chosen:
            chosen.append(gpu)
    return chosen, ""


def _why_hip_ends(
    name: str, asked: str, entry: str, shown: Sequence[Gpu], environment: Mapping[str, str]
) -> str:
    first = environment.get(RUNTIME_LIST)
    of = f"the GPUs that {RUNTIME_LIST}={first!r} leaves" if first else "the GPUs of this machine"
    numbers = f"0 to {len(shown) - 1}" if shown else "none"
    return (
        f"{name}={asked!r} ends at {entry!r}: it takes numbers of {of}, {numbers}; "
        f"change {'one of the two' if first else 'it'}"
    )


def _contradiction(environment: Mapping[str, str]) -> str:
    used, ignored = (environment.get(name) for name in HIP_LISTS)
    if not used or not ignored or used == ignored:
        return ""
    return (
        f"{HIP_LISTS[0]}={used!r} is used and {HIP_LISTS[1]}={ignored!r} is not, although they "
        "differ: unset one of them"
    )


def identify(
    gpus: Sequence[Gpu], environment: Mapping[str, str], index: int, device_id: str | None
) -> Gpu:
    """The GPU that HIP numbers `index`, or that said its PCI address or UUID is `device_id`.

    What an opened device says is believed over `environment`, which may have changed since HIP has
    started. Raises `LookupError`.
    """
    if device_id is None:
        return _at(visible_devices(gpus, environment), index)
    for gpu in gpus:
        if same_address(gpu.address, device_id) or gpu.uuid.lower() == device_id.lower():
            return gpu
    return Gpu(device_id) if ":" in device_id else Gpu("", device_id)


def _at(visible: VisibleDevices, index: int) -> Gpu:
    if 0 <= index < len(visible.gpus):
        return visible.gpus[index]
    reason = visible.reason or f"{len(visible.gpus)} GPUs are visible"
    raise LookupError(f"device {index} is not identified: {reason}")
