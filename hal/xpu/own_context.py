"""Whether torch's kernels reach memory that is mapped in a context of the driver's own.

A kernel that does not reach it may fault and take the device away from its process, so the question
is put to a process of its own: `python -m hal.xpu.own_context INDEX`.
"""

from __future__ import annotations

import subprocess
import sys

REACHED = "torch reaches the memory"
_SECONDS = 180
_BYTES = 1 << 20
_VALUE = 7


def why_not_reached(index: int) -> str:
    """Why torch does not reach such memory on a device; "" when it does."""
    command = [sys.executable, "-m", "hal.xpu.own_context", str(index)]
    try:
        done = subprocess.run(  # noqa: S603 - this module, by the interpreter that runs
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the trial did not end ({error})"
    if done.returncode == 0 and REACHED in done.stdout:
        return ""
    last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return f"the trial failed ({last[0][:200]})"


def try_it(index: int) -> bool:
    """Let torch write what the driver reads, and read what the driver writes."""
    import ctypes

    import torch

    from hal.pools import storage_address, torch_device
    from hal.xpu.platform import XpuPlatform

    platform = XpuPlatform(trust_own_context=True)
    device = platform.device(index)
    with platform.create_pool("trial", index).use():
        tensor = torch.full(
            (_BYTES,), _VALUE, dtype=torch.uint8, device=torch_device(platform, index)
        )
    host = (ctypes.c_uint8 * _BYTES)()
    device.synchronize()
    device.copy_to_host(ctypes.addressof(host), storage_address(tensor), _BYTES)
    device.synchronize()
    was_written = bytes(host) == bytes([_VALUE]) * _BYTES
    device.fill(storage_address(tensor), _VALUE + 1, _BYTES)
    device.synchronize()
    return was_written and int(tensor.sum().item()) == (_VALUE + 1) * _BYTES


if __name__ == "__main__":
    reached = try_it(int(sys.argv[1]))
    sys.stdout.write(f"{REACHED}\n" if reached else "")
    raise SystemExit(0 if reached else 1)
