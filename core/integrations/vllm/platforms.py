"""Platform classes over vLLM's own, one a vendor, made when vLLM asks for them by name.

Each keeps its base's enum, so that everything which asks what kind of platform this is gets the
answer of the base, and differs from it only where an engine's config asks for the backend `hal`.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, cast

from hal.core.integrations.vllm import installation
from hal.core.integrations.vllm.vendors import VENDORS, Vendor

WORKER = "hal.core.integrations.vllm.worker.HalWorker"
"""Our worker class, made over the one that the platform chose."""


class PlatformMixin:
    """Turns the plugin on when a config asks for it, and off when the next one does not."""

    hal_vendor: Vendor

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vLLM's own; then the allocator, and a worker whose sleep is a transaction."""
        cast("Any", super()).check_and_update_config(vllm_config)
        if not installation.is_wanted(vllm_config):
            installation.deactivate()
            return
        installation.activate(vllm_config, cls.hal_vendor)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls not in (WORKER, "auto"):
            os.environ[installation.WORKER_BASE] = parallel.worker_cls
            parallel.worker_cls = WORKER


class HostPlatformMixin(PlatformMixin):
    """Gives the host a sleep mode, which vLLM's own platform has not."""

    def is_sleep_mode_available(self) -> bool:
        """True: whether it is *our* sleep mode that is asked for shows in the whole config."""
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse vLLM's own sleep mode here, as without the plugin."""
        model = vllm_config.model_config
        if (
            model is not None
            and model.enable_sleep_mode
            and not installation.is_wanted(vllm_config)
        ):
            raise ValueError(
                "Sleep mode is not supported on current platform. "
                f"(accel-hal provides one: --sleep-mode-backend {installation.BACKEND})"
            )
        super().check_and_update_config(vllm_config)


def builtin_class_name(vendor: Vendor) -> str | None:
    """The dotted name of vLLM's own class for a vendor; None where that platform is not active."""
    import vllm.platforms

    probe = vllm.platforms.builtin_platform_plugins.get(vendor.builtin)
    return cast("str | None", probe()) if probe is not None else None


def platform_class(vendor: Vendor, base: type[Any]) -> type[Any]:
    """Our class over one of vLLM's."""
    mixin = HostPlatformMixin if base.device_type == "cpu" else PlatformMixin
    return type(
        vendor.platform_class,
        (mixin, base),
        {"__module__": __name__, "__doc__": base.__doc__, "hal_vendor": vendor},
    )


@functools.cache
def _of_this_machine(name: str) -> type[Any]:
    vendor = next((v for v in VENDORS.values() if v.platform_class == name), None)
    if vendor is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    target = builtin_class_name(vendor)
    if target is None:
        raise AttributeError(f"{name}: vLLM's own platform {vendor.builtin!r} is not active here")
    module, _, attribute = target.rpartition(".")
    return platform_class(vendor, getattr(importlib.import_module(module), attribute))


def __getattr__(name: str) -> Any:
    if name.startswith("Hal"):
        return _of_this_machine(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
