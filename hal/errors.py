"""The typed errors of the platform layer; every message says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self


def _bytes(count: int | None) -> str:
    if count is None:
        return "an unknown number of bytes"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


class HalError(Exception):
    """The root of every error this library raises on purpose; crosses process boundaries whole."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by message and fields: the constructors take other arguments than the message."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[HalError], args: tuple[Any, ...], fields: dict[str, Any]) -> HalError:
    error = HalError.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class DriverError(HalError):
    """A vendor call failed; `code` and `text` are the vendor's own."""

    def __init__(self, call: str, code: int, text: str, size: int = 0, address: int = 0) -> None:
        self.call, self.code, self.text, self.size, self.address = call, code, text, size, address
        where = f" at {address:#x}" if address else ""
        amount = f" for {_bytes(size)}" if size else ""
        super().__init__(f"{call} failed with code {code} ({text}){amount}{where}")


class OutOfDeviceMemory(HalError, MemoryError):
    """Device memory does not suffice; nothing was changed. Sizes are bytes, `None` when unknown."""

    def __init__(
        self, tag: str | None, needed: int | None, free: int | None, detail: str = ""
    ) -> None:
        self.tag, self.needed, self.free = tag, needed, free
        free_text = "unknown" if free is None else _bytes(free)
        super().__init__(
            f"out of device memory{f' for {tag!r}' if tag else ''}: {_bytes(needed)} needed, "
            f"{free_text} free{f' ({detail})' if detail else ''}; free memory on the device and "
            "call again, or wait for it with wait_for_memory=seconds"
        )


class HostMemoryError(HalError, MemoryError):
    """Host memory, backup storage or its budget does not suffice; nothing was changed."""

    def __init__(
        self,
        needed: int | None,
        available: int | None,
        limit: int | None = None,
        detail: str = "",
    ) -> None:
        self.needed, self.available, self.limit = needed, available, limit
        bound = f", limit {_bytes(limit)}" if limit else ""
        super().__init__(
            f"not enough host memory for backups: {_bytes(needed)} needed, {_bytes(available)} "
            f"available{bound}{f' ({detail})' if detail else ''}; raise the budget, discard more "
            "tags, or back up to a file with BackupOptions(backing='file:DIR')"
        )


class BackupCorrupted(HalError):
    """A backup's checksum differs from the one taken when it was written; nothing was restored."""

    def __init__(self, address: int, size: int, text: str) -> None:
        self.address, self.size, self.text = address, size, text
        super().__init__(
            f"the backup of segment {address:#x} ({_bytes(size)}) is corrupted: {text}; its tag "
            "stays asleep, discard() it and load its contents again"
        )


class BusyError(HalError):
    """The device or the engine is busy; nothing was changed."""


class StateError(HalError):
    """The call does not fit the state; nothing was changed."""


class AsleepError(StateError):
    """Memory that the call needs is asleep."""

    def __init__(self, tags: Iterable[str], detail: str = "") -> None:
        self.tags = tuple(sorted(tags))
        names = ", ".join(repr(tag) for tag in self.tags) or "everything"
        super().__init__(f"asleep: {names}{f' ({detail})' if detail else ''}; call wake_up() first")


class DirtyError(StateError):
    """Contents were discarded and not loaded again."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        shown = ", ".join(self.names[:8]) + (
            f" and {len(self.names) - 8} more" if len(self.names) > 8 else ""
        )
        super().__init__(
            f"discarded and not loaded again: {shown}; load the contents and call mark_loaded(), "
            "or keep them over the sleep with preserve()"
        )


class InvalidArgument(HalError, ValueError):
    """An argument that no call of this kind takes; nothing was changed."""


class HookError(HalError):
    """A hook of the engine raised; `hook` is its name and the cause is chained."""

    def __init__(self, hook: str, phase: str, cause: BaseException) -> None:
        self.hook, self.phase = hook, phase
        outcome = "the sleep was cancelled" if phase == "before_sleep" else "it stays asleep"
        super().__init__(
            f"{phase} hook {hook!r} raised {type(cause).__name__}: {cause}; {outcome}, repair the "
            "cause and call again"
        )


class GroupError(HalError):
    """Other ranks failed a transition that this rank had done; it was undone here too."""

    def __init__(self, transition: str, failed: Mapping[int, str]) -> None:
        self.transition, self.failed = transition, dict(failed)
        texts = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.failed.items()))
        super().__init__(
            f"{transition} failed on {len(self.failed)} rank(s) and was undone on the others: "
            f"{texts}; repair the cause and call again on every rank"
        )


class UnknownTagError(HalError, ValueError):
    """A tag that no pool carries; nothing was changed."""

    def __init__(self, tag: str, known: Iterable[str]) -> None:
        self.tag, self.known = tag, tuple(sorted(known))
        super().__init__(f"unknown tag {tag!r}; known tags: {', '.join(self.known) or 'none yet'}")


class AddressLostError(HalError):
    """A reserved address range was lost: its segment is unusable, others are intact."""

    def __init__(self, wanted: int, got: int) -> None:
        self.wanted, self.got = wanted, got
        super().__init__(
            f"the address range at {wanted:#x} was lost (the driver offered {got:#x}); free the "
            "tensors in it and allocate them again"
        )


class ProcessLost(HalError):
    """A parked process that the driver cannot restore: the one end without a way back."""


class Unsupported(HalError):
    """The platform cannot do this, and why."""

    def __init__(self, feature: str, platform: str, why: str) -> None:
        self.feature, self.platform, self.why = feature, platform, why
        super().__init__(f"{feature} is not supported on {platform}: {why}")


class UnknownPlatformError(HalError, ValueError):
    """A platform name that neither this package nor an installed one provides."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, tuple(known)
        super().__init__(
            f"unknown platform {name!r}; known platforms: {', '.join(self.known)}; check the name "
            "given to detect() or in HAL_PLATFORM, or install the package that provides it"
        )


class NoPlatformError(ExceptionGroup[Unsupported], HalError):
    """No platform fits a request; holds one `Unsupported` for each platform, saying why not."""

    @classmethod
    def of(cls, request: str, reasons: Mapping[str, str], advice: str) -> Self:
        """The error for `request`; `reasons` maps each platform's name to why it does not fit."""
        errors = [Unsupported(name, "this machine", why) for name, why in reasons.items()]
        told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        return cls(f"no platform fits {request} ({told}); {advice}", errors)

    @property
    def reasons(self) -> dict[str, str]:
        """The platform's name -> why it does not fit."""
        return {e.feature: e.why for e in self.exceptions if isinstance(e, Unsupported)}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.exceptions)

    def derive(self, excs: Sequence[Unsupported], /) -> NoPlatformError:  # type: ignore[override]
        """What `except*` leaves of this group is still this error."""
        return NoPlatformError(self.message, excs)


class WorkspaceLocked(HalError):
    """A workspace would have to grow after it was locked; only this call fails. Sizes are bytes."""

    def __init__(self, name: str, needed: int, have: int, caller: str) -> None:
        self.name, self.needed, self.have, self.caller = name, needed, have, caller
        super().__init__(
            f"workspace {name!r} is locked at {_bytes(have)} and {caller} needs {_bytes(needed)}; "
            "reserve() its largest need before lock()"
        )


class WorkspaceTooSmall(HalError):
    """A workspace is smaller than a kernel needs; raised before the launch. Sizes are bytes."""

    def __init__(self, name: str, needed: int, have: int, setting: str) -> None:
        self.name, self.needed, self.have, self.setting = name, needed, have, setting
        super().__init__(
            f"workspace {name!r} has {_bytes(have)} and {_bytes(needed)} are needed; raise "
            f"{setting}"
        )
