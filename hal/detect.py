"""Which platform this process runs on: decided by drivers, the torch build and `HAL_PLATFORM`.

Nothing here opens a device or creates a device context, so that a process may detect and then fork.
"""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hal.errors import NoPlatformError, UnknownPlatformError
from hal.libraries import bundled, loads

if TYPE_CHECKING:
    from hal.platform import Platform

ENTRY_POINTS = "hal.platforms"
"""The entry-point group of other packages' platforms: `name = "module:PlatformClass"`."""

VARIABLE = "HAL_PLATFORM"
"""The environment variable that names the platform when `detect` is called without a name."""

HOST = "cpu"
"""The platform that is always there, taken when no accelerator fits."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vendor:
    """How a vendor's presence shows without asking its libraries."""

    platform: str
    """The platform's name."""
    target: str
    """Where its class is, as "module:Class"."""
    libraries: tuple[str, ...]
    """Names of the shared library that the vendor's driver installs: one that loads will do."""
    device_nodes: tuple[str, ...]
    """Patterns of the device files that its kernel driver makes."""
    toolkit: str
    """What `torch.version` calls the builds of torch that drive it."""

    bundled_in: tuple[str, ...] = ()
    """Packages that may bring the library in their `lib` folder, for themselves alone."""

    def driver_found(self) -> bool:
        """Whether a device file is there and the driver's library too, initialising nothing."""
        if not any(glob.glob(pattern) for pattern in self.device_nodes):
            return False
        return self._is_bundled() or any(map(loads, self.libraries))

    def _is_bundled(self) -> bool:
        """Whether a package brings the library."""
        stems = (name.partition(".so")[0] for name in self.libraries)
        return any(bundled(self.bundled_in, stem) for stem in stems)


VENDORS = (
    Vendor(
        platform="cuda",
        target="hal.cuda.platform:CudaPlatform",
        libraries=("libcuda.so.1",),
        device_nodes=("/dev/nvidia[0-9]*", "/dev/dxg"),
        toolkit="cuda",
    ),
    Vendor(
        platform="rocm",
        target="hal.rocm.platform:RocmPlatform",
        libraries=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
        device_nodes=("/dev/kfd", "/dev/dxg"),
        toolkit="hip",
        bundled_in=("torch", "_rocm_sdk_core"),
    ),
    Vendor(
        platform="xpu",
        target="hal.xpu.platform:XpuPlatform",
        libraries=("libze_loader.so.1",),
        device_nodes=("/dev/dri/renderD*", "/dev/dxg"),
        toolkit="xpu",
    ),
)


@dataclass(frozen=True)
class Candidate:
    """A platform that may fit; its class is imported only when it is asked for."""

    name: str
    target: str
    """Where its class is, as "module:Class"."""
    provider: str = ""
    """The distribution that registered it; "" for this package's own rooms."""

    def load(self) -> type[Platform]:
        """Import the platform's class."""
        module, _, attribute = self.target.partition(":")
        return cast("type[Platform]", getattr(importlib.import_module(module), attribute))

    def why_not(self) -> str | None:
        """Why this platform cannot be used here, in one line; None when it can."""
        try:
            return self.load().why_not()
        except ModuleNotFoundError as error:
            return self._why_not_importable(error)
        except Exception as error:  # noqa: BLE001 - whatever a platform's own code raises is its reason
            return f"{self.target} failed with {type(error).__name__}: {error}"

    def missing(self) -> tuple[str, ...]:
        """One line for each piece that this platform lacks here; empty when it can be used."""
        why_not = self.why_not()
        if why_not is None:
            return ()
        try:
            return self.load().missing()
        except Exception:  # noqa: BLE001 - then why_not() has said what a platform's own code raises
            return (why_not,)

    def notices(self) -> tuple[str, ...]:
        """What of this platform works here but is probably not meant."""
        try:
            return tuple(self.load().notices())
        except Exception:  # noqa: BLE001 - why_not() says what is broken
            return ()

    def _why_not_importable(self, error: ModuleNotFoundError) -> str:
        module = self.target.partition(":")[0]
        is_absent = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        if is_absent and not self.provider:
            return "it is not part of this version of accel-hal"
        return f"{self.target} cannot be imported: {error}"


_ACCELERATORS = tuple(Candidate(vendor.platform, vendor.target) for vendor in VENDORS)
_HOST = Candidate(HOST, "hal.cpu.platform:CpuPlatform")


def candidates() -> dict[str, Candidate]:
    """Every known platform by name, in the order of detection; imports none of them."""
    found = {candidate.name: candidate for candidate in _ACCELERATORS}
    for candidate in _registered():
        if candidate.name in found or candidate.name == HOST:
            _log.warning(
                "platform %r of %s is ignored: the name is taken",
                candidate.name,
                candidate.provider,
            )
        else:
            found[candidate.name] = candidate
    return found | {HOST: _HOST}


def _registered() -> Iterator[Candidate]:
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        provider = point.dist.name if point.dist else "an unknown distribution"
        yield Candidate(point.name, point.value, provider)


def survey() -> dict[str, str | None]:
    """Every known platform in the order of detection: None when it fits here, else why not."""
    return {name: candidate.why_not() for name, candidate in candidates().items()}


def detect(name: str | None = None, *, require_accelerator: bool = False) -> Platform:
    """The platform of this process: the one named, else the first accelerator that fits, or `cpu`.

    `name` (or, without it, the environment variable `HAL_PLATFORM`) asks for one platform. The same
    call gives the same object for the life of the process. Raises `UnknownPlatformError` for a name
    that nothing provides and `NoPlatformError`, which says for every platform why not, when the
    named one does not fit or, with `require_accelerator`, when no accelerator does.
    """
    known = candidates()
    request = name or os.environ.get(VARIABLE, "")
    if not request:
        return _first_that_fits(known, require_accelerator=require_accelerator)
    if request not in known:
        raise UnknownPlatformError(request, known)
    if known[request].why_not() is not None or (require_accelerator and request == HOST):
        raise _does_not_fit(request, from_environment=not name, accelerator=require_accelerator)
    return _the_platform(known[request])


def _first_that_fits(known: dict[str, Candidate], *, require_accelerator: bool) -> Platform:
    reasons = {}
    for name, candidate in known.items():
        if name == HOST and require_accelerator:
            reasons[name] = "it is not an accelerator"
            continue
        why_not = candidate.why_not()
        if why_not is None:
            _warn_of_idle_drivers(name, reasons)
            return _the_platform(candidate)
        reasons[name] = why_not
    raise NoPlatformError.of(
        "this machine" if not require_accelerator else "require_accelerator=True",
        reasons,
        "install what is missing, or run on the host with detect('cpu')",
    )


def _warn_of_idle_drivers(taken: str, reasons: dict[str, str]) -> None:
    """Say so when a device is there and is not used: falling back to the host would look slow."""
    for vendor in VENDORS:
        if vendor.platform in reasons and vendor.driver_found():
            _log.warning(
                "a driver for %s is installed, but %s is used: %s",
                vendor.platform,
                taken,
                reasons[vendor.platform],
            )


def _does_not_fit(request: str, *, from_environment: bool, accelerator: bool) -> NoPlatformError:
    found = survey()
    usable = [name for name, why_not in found.items() if why_not is None]
    others = {name: why_not or "it fits, but was not asked for" for name, why_not in found.items()}
    own = "it is not an accelerator" if found[request] is None else others[request]
    asked = f"{VARIABLE}={request}" if from_environment else repr(request)
    return NoPlatformError.of(
        f"{asked} with require_accelerator=True" if accelerator else asked,
        {request: own} | {name: why for name, why in others.items() if name != request},
        f"install what is missing, or ask for one that fits: {', '.join(usable) or 'none does'}",
    )


_platforms: dict[tuple[int, str], Platform] = {}


def _the_platform(candidate: Candidate) -> Platform:
    """One object a process; a child made by fork gets its own: devices do not survive a fork."""
    key = os.getpid(), candidate.target
    if key not in _platforms:
        _platforms.setdefault(key, candidate.load()())
    return _platforms[key]
