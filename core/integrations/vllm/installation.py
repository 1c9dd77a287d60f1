"""Putting the plugin into vLLM's place for it, and taking it out again.

Active is what an engine's config asks for, in the front end; a variable carries that to the
processes that the front end starts, each of which installs for itself. Nothing here touches a
device.
"""

from __future__ import annotations

import atexit
import functools
import os
from typing import Any

import hal
from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.integrations.vllm.logging import logger
from hal.core.integrations.vllm.options import PluginOptions
from hal.core.integrations.vllm.vendors import VENDORS, Vendor
from hal.errors import StateError

BACKEND = "hal"
"""The name for `--sleep-mode-backend`."""
ACTIVE = "HAL_VLLM_ACTIVE"
"""The variable that tells a worker that its engine sleeps on this library; its value is a vendor's
name."""
WORKER_BASE = "HAL_VLLM_WORKER"
"""The variable with the worker class that ours is made over."""

_installed: HalMemAllocator | None = None


def is_wanted(vllm_config: Any) -> bool:
    """Whether an engine's config asks for sleep mode with this backend.

    By its name, or by options for it in `additional_config`: some versions of vLLM have the name
    in their config, and no argument to set it with.
    """
    model = vllm_config.model_config
    if model is None or not getattr(model, "enable_sleep_mode", False):
        return False
    named = getattr(model, "sleep_mode_backend", "") == BACKEND
    return named or _chosen(vllm_config) is not None


def activate(vllm_config: Any, vendor: Vendor) -> None:
    """Make this engine sleep on this library, in this process and those that it starts."""
    from hal.core.integrations.vllm import metrics, versions

    versions.require_known(vendor)
    options = PluginOptions.from_config(_chosen(vllm_config))
    vllm_config.model_config.sleep_mode_backend = BACKEND
    os.environ |= options.to_environment() | {ACTIVE: vendor.builtin}
    metrics.serve()
    install(vendor)


def _chosen(vllm_config: Any) -> Any:
    extra = getattr(vllm_config, "additional_config", None)
    return extra.get(BACKEND) if isinstance(extra, dict) else None


def deactivate() -> None:
    """Undo `activate`: the next engine of this process does not ask for this backend."""
    os.environ.pop(ACTIVE, None)
    uninstall()


def install_if_active() -> None:
    """Install in a process whose parent has activated the plugin."""
    if name := os.environ.get(ACTIVE):
        install(VENDORS[name])


def install(vendor: Vendor) -> None:
    """Hand our allocator out in place of vLLM's, and let the graph pool's rule know our name."""
    global _installed  # noqa: PLW0603 - vLLM, too, has one allocator a process
    if _installed is not None:
        return
    from hal.core.integrations.vllm.metrics import publish

    options = PluginOptions.from_environment()
    _installed = HalMemAllocator(
        lambda: hal.detect(vendor.hal_platform), options, on_report=publish
    )
    atexit.register(release_at_exit)
    if vendor.allocator:
        vendor.allocator_class().instance = _installed
    _extend_graph_pool_rule()
    logger().info("sleep mode runs on accel-hal (%s)", vendor.hal_platform)


def uninstall() -> None:
    """Take our allocator out, unless memory of an earlier engine still lives in it."""
    global _installed
    if _installed is None or _installed.get_current_usage():
        return
    ours, _installed = _installed, None
    ours.release_pools()
    for vendor in VENDORS.values():
        if vendor.allocator and _is_imported(vendor.allocator):
            singleton = vendor.allocator_class()
            if singleton.instance is ours:
                singleton.instance = None


def _is_imported(target: str) -> bool:
    import sys

    return target.partition(":")[0] in sys.modules


def allocator() -> HalMemAllocator:
    """The allocator of this process; `StateError` where the plugin is not installed."""
    if _installed is None:
        raise StateError(
            f"--sleep-mode-backend {BACKEND} needs the platform plugin of accel-hal, which is not "
            "active here: allow 'hal' in VLLM_PLUGINS, do not set VLLM_TARGET_DEVICE, and use no "
            "other platform plugin"
        )
    return _installed


def release_at_exit() -> None:
    """Drop the pools while torch's allocators still live."""
    if _installed is not None:
        _installed.release_pools()


@functools.cache
def _extend_graph_pool_rule() -> None:
    """Let vLLM's rule for offloading graph memory answer for our backend as for its own.

    The rule compares the backend's name, so it is asked about a view of the config in which the
    name is the one that it knows.
    """
    from vllm.config import VllmConfig

    rule = getattr(VllmConfig, "use_cumem_cudagraph_pool", None)
    if not isinstance(rule, property) or rule.fget is None:
        logger().info("this vLLM has no rule for graph memory; it stays on the device")
        return
    ask = rule.fget
    VllmConfig.use_cumem_cudagraph_pool = property(
        lambda config: ask(_Renamed(config) if is_wanted(config) else config), doc=rule.__doc__
    )


class _Renamed:
    """A view of a config, or of a part of it, in which the backend has vLLM's own name."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "sleep_mode_backend":
            return "cumem"
        value = getattr(self._inner, name)
        return _Renamed(value) if name == "model_config" and value is not None else value
