"""vLLM's entry points: `register` (group vllm.general_plugins) and `platform` (group
vllm.platform_plugins).

vLLM loads both in every process, some of them before a device has an owner, so nothing here
touches one.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator

from hal.core.integrations.vllm.logging import logger

_PACKAGE = "hal.core.integrations.vllm"
_PLATFORMS = "vllm.platform_plugins"


def register() -> None:
    """Make the backend known, and install where the parent process has activated the plugin."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as Factory
    except ImportError:
        logger().info("accel-hal: this vLLM has no sleep-mode backends; it stays as it is")
        return
    from hal.core.integrations.vllm.installation import BACKEND, install_if_active

    if BACKEND not in Factory._registry:  # noqa: SLF001 - it has no public question, and raises on a second
        Factory.register_backend(BACKEND, f"{_PACKAGE}.backend", "HalBackend")
    install_if_active()


def platform() -> str | None:
    """The dotted name of our class over the one built-in platform that is active; else None.

    None, too, where another package's platform owns the machine: vLLM takes at most one.
    """
    from vllm.platforms import builtin_platform_plugins

    from hal.core.integrations.vllm.vendors import VENDORS

    if any(_answers(point) for point in _other_platforms()):
        return None
    active = [name for name, probe in builtin_platform_plugins.items() if probe() is not None]
    vendor = VENDORS.get(active[0]) if len(active) == 1 else None
    return f"{_PACKAGE}.platforms.{vendor.platform_class}" if vendor else None


def _other_platforms() -> Iterator[importlib.metadata.EntryPoint]:
    """Other packages' platform plugins that vLLM is allowed to load."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = None if allowed is None else {name.strip() for name in allowed.split(",")}
    for point in importlib.metadata.entry_points(group=_PLATFORMS):
        if not point.value.startswith(_PACKAGE) and (names is None or point.name in names):
            yield point


def _answers(point: importlib.metadata.EntryPoint) -> bool:
    """Whether a plugin offers a platform here; one that fails offers none, as vLLM has it."""
    try:
        return point.load()() is not None
    except Exception as error:  # noqa: BLE001 - whatever another package's plugin raises
        logger().debug("platform plugin %s failed: %s", point.name, error)
        return False
