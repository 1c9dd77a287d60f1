"""The report that belongs into a bug report: versions, the platform with its reasons, memory and
what is missing.

It works on an installation that is broken: what cannot be asked is listed under `problems`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform as system
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hal import native
from hal.detect import VARIABLE, VENDORS, Vendor, candidates, detect, survey
from hal.memory import MemoryInfo
from hal.platform import Capabilities, Flag, Platform
from hal.torch_build import TorchBuild, torch_build

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DISTRIBUTION = "accel-hal"
SCHEMA_VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True)
class LibraryReport:
    """The native library; its API version is None when it does not load."""

    path: str
    api_version: int | None
    drivers: tuple[str, ...]


@dataclass(frozen=True)
class PlatformReport:
    """The platform of this process; `devices` has the memory of each, by index."""

    name: str
    capabilities: dict[str, Any] | None
    devices: tuple[MemoryInfo, ...]


@dataclass(frozen=True)
class Environment:
    """What `python -m hal` prints; sizes in bytes, None where unknown."""

    versions: dict[str, str]
    """"accel-hal", "python", "torch" (with what it was built for) and "system"."""
    library: LibraryReport
    platforms: dict[str, str | None]
    """Every known platform: None when it fits here, else why not."""
    platform: PlatformReport | None
    host_memory: native.HostMemory | None
    """The most that backups may take now, within every cgroup limit."""
    extras: dict[str, dict[str, str | None]]
    """Every extra of the distribution: its packages and their versions, None when not installed."""
    notices: tuple[str, ...]
    """What works but is probably not meant, such as a torch build for another vendor."""
    problems: tuple[str, ...]
    """What is missing or broken; empty on a working installation."""
    schema_version: int = SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(self)

    def render(self, console: Console) -> None:
        """Print the report for people."""
        for title, rows in self._sections():
            if rows:
                console.print(table(title, rows))

    def _sections(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        yield "Versions", [*self.versions.items(), ("libhal", self._library_text())]
        yield "Platforms", [(name, why or "fits") for name, why in self.platforms.items()]
        if self.platform is not None:
            yield f"Capabilities of {self.platform.name}", _capability_rows(self.platform)
            yield "Device memory", _device_rows(self.platform)
        yield "Host memory for backups", _host_rows(self.host_memory)
        yield "Extras", [(name, _packages_text(found)) for name, found in self.extras.items()]
        yield "Notices", [("!", text) for text in self.notices]
        yield "Problems", [("x", text) for text in self.problems]

    def _library_text(self) -> str:
        if self.library.api_version is None:
            return f"not loaded ({self.library.path})"
        drivers = ", ".join(self.library.drivers)
        return f"API {self.library.api_version}, drivers: {drivers} ({self.library.path})"


def collect(platform_name: str | None = None) -> Environment:
    """Look at this process's environment; `platform_name` as in `hal.detect`. Never raises."""
    build = torch_build()
    problems = list(_missing_packages(build))
    library = _library(problems)
    is_loaded = library.api_version is not None
    return Environment(
        versions=_versions(build),
        library=library,
        platforms=survey(),
        platform=_platform(platform_name, problems, is_loaded=is_loaded),
        host_memory=_attempt(problems, "host memory", native.host_memory) if is_loaded else None,
        extras=_extras(),
        notices=(*torch_notices(build), *_platform_notices()),
        problems=tuple(problems),
    )


def torch_notices(build: TorchBuild | None, vendors: Sequence[Vendor] = VENDORS) -> Iterator[str]:
    """One line for each vendor whose driver and the torch build do not belong together."""
    if build is None:
        return
    for vendor in vendors:
        has_build = vendor.toolkit in build.toolkits
        if has_build and not vendor.driver_found():
            yield (
                f"{build} drives {vendor.platform} devices, but no {vendor.platform} driver was "
                f"found ({vendor.libraries[0]} and a device file): install it to use them"
            )
        elif not has_build and vendor.driver_found():
            yield (
                f"the {vendor.platform} driver is installed, but this is {build}: another install "
                "may have replaced the vendor's build. Install that build again, then "
                f"`pip install --no-deps {DISTRIBUTION}`, which leaves it alone (docs/install.md)"
            )


def _platform_notices() -> Iterator[str]:
    for candidate in candidates().values():
        yield from candidate.notices()


def _attempt(problems: list[str], what: str, ask: Callable[[], _T]) -> _T | None:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - a report about broken installations lists whatever broke
        problems.append(f"{what}: {error if str(error) else type(error).__name__}")
        return None


def _versions(build: TorchBuild | None) -> dict[str, str]:
    return {
        DISTRIBUTION: _version(DISTRIBUTION) or "not installed (running from a source tree)",
        "python": system.python_version(),
        "torch": f"{build.version}, built for {build.kind}" if build else "not installed",
        "system": system.platform(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library(problems: list[str]) -> LibraryReport:
    path = str(native.library_path())
    library = _attempt(problems, "libhal", native.library)
    if library is None:
        return LibraryReport(path, None, ())
    return LibraryReport(path, library.hal_api_version(), tuple(native.driver_names()))


def _platform(name: str | None, problems: list[str], *, is_loaded: bool) -> PlatformReport | None:
    if pieces := _missing_pieces(name):
        problems += pieces
        return None
    platform = _attempt(problems, "platform", lambda: detect(name))
    if platform is None:
        return None
    if not is_loaded:
        return PlatformReport(platform.name, None, ())
    capabilities = _attempt(problems, "capabilities", lambda: platform.capabilities)
    devices = _attempt(problems, "device memory", lambda: _memory_of_devices(platform))
    return PlatformReport(
        platform.name, _plain(capabilities) if capabilities else None, devices or ()
    )


def _missing_pieces(name: str | None) -> list[str]:
    """One line for each piece that the platform asked for lacks; none where no platform is."""
    candidate = candidates().get(name or os.environ.get(VARIABLE, ""))
    return [f"{candidate.name}: {piece}" for piece in candidate.missing()] if candidate else []


def _memory_of_devices(platform: Platform) -> tuple[MemoryInfo, ...]:
    return tuple(platform.get_memory_info(index) for index in range(platform.device_count()))


def _plain(capabilities: Capabilities) -> dict[str, Any]:
    return asdict(capabilities) | {"pool_nesting": capabilities.pool_nesting.value}


def _missing_packages(build: TorchBuild | None) -> Iterator[str]:
    if build is None:
        yield "torch is not installed: install the build for your device first (docs/install.md)"
    for name, extra in _requirements():
        if extra is None and name != "torch" and _version(name) is None:
            yield f"{name} is not installed: pip install {name}"


def _extras() -> dict[str, dict[str, str | None]]:
    extras: dict[str, dict[str, str | None]] = {}
    for name, extra in _requirements():
        if extra is not None:
            extras.setdefault(extra, {})[name] = _version(name)
    return extras


def _requirements() -> Iterator[tuple[str, str | None]]:
    """(package, the extra that asks for it or None) of every requirement of this distribution."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", requirement)
        if name:
            yield name[0], extra[1] if extra else None


def table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """A titled list of names and texts."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    made.add_column(min_width=18, no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in rows:
        made.add_row(Text(name), Text(text))
    return made


def _capability_rows(platform: PlatformReport) -> list[tuple[str, str]]:
    return [(name, _value_text(value)) for name, value in (platform.capabilities or {}).items()]


def _value_text(value: Any) -> str:
    return str(Flag(**value)) if isinstance(value, dict) else str(value)


def _device_rows(platform: PlatformReport) -> list[tuple[str, str]]:
    return [(f"device {index}", _memory_text(info)) for index, info in enumerate(platform.devices)]


def _memory_text(info: MemoryInfo) -> str:
    doubt = "" if info.exact else f"; not exact: {info.reason}"
    return (
        f"{_size(info.total)} in all, {_size(info.free)} free, {_size(info.process_used)} used by "
        f"this process (from {info.source}{doubt})"
    )


def _host_rows(host: native.HostMemory | None) -> list[tuple[str, str]]:
    if host is None:
        return []
    return [("budget", f"{_size(host.available)} of {_size(host.total)} ({host.source})")]


def _packages_text(found: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or '(missing)'}" for name, version in found.items())


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.2f} GiB"
