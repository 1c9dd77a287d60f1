"""The plugin's options: vLLM's `additional_config["hal"]`, or `HAL_*` variables, which also carry
them to the workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from hal.core.backup import BackupOptions
from hal.errors import InvalidArgument

KEY = "hal"
"""The key of the options in vLLM's `additional_config`."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class PluginOptions:
    """How the plugin sleeps; the variable of an option is `HAL_` and its name in capitals."""

    retain: bool = True
    """Keep backups over a wake: weights that have not changed sleep again without a copy."""
    compress: str | None = None
    """The codec of the backups."""
    park: bool = False
    """Release the driver's own state too, once everything sleeps."""
    backing: str | None = None
    """Where backups live, as in `BackupOptions`."""
    budget: int | None = None
    """The most bytes that backups may take."""
    verify: bool = False
    """Check a checksum of every piece on the way back."""
    wait_for_memory: float = 0.0
    """Seconds for which a wake waits until the device has room."""
    debug: bool = False
    """Fill memory without contents with 0xFF at a wake."""
    scratch: bool = True
    """Take scratch that vLLM keeps outside its pools into the workspace tag."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The options that the variables state; the defaults for the others."""
        texts = {name: environment.get(_variable(name)) for name in _names()}
        return cls(**{n: _value(n, text) for n, text in texts.items() if text is not None})

    @classmethod
    def from_config(
        cls, chosen: Mapping[str, Any] | None, environment: Mapping[str, str] = os.environ
    ) -> Self:
        """The options of `additional_config["hal"]` over those of the environment."""
        given = dict(chosen or {})
        if unknown := sorted(set(given) - set(_names())):
            raise InvalidArgument(
                f"additional_config[{KEY!r}] has no option {', '.join(unknown)}; "
                f"there are {', '.join(_names())}"
            )
        values = {
            name: _value(name, str(value)) for name, value in given.items() if value is not None
        }
        base = cls.from_environment(environment)
        return cls(**{name: values.get(name, getattr(base, name)) for name in _names()})

    def to_environment(self) -> dict[str, str]:
        """The variables with which `from_environment` gives these options again."""
        pairs = ((name, getattr(self, name)) for name in _names())
        return {_variable(name): str(value) for name, value in pairs if value is not None}

    def backup(self) -> BackupOptions:
        """The part of it that a sleep manager takes."""
        return BackupOptions(
            budget=self.budget,
            retain=self.retain,
            compress=self.compress,
            backing=self.backing,
            verify=self.verify,
        )


def _names() -> list[str]:
    return [field.name for field in fields(PluginOptions)]


def _variable(name: str) -> str:
    return f"HAL_{name.upper()}"


def _value(name: str, text: str) -> Any:
    """The value of an option's text, by the type of its default."""
    default = next(f.default for f in fields(PluginOptions) if f.name == name)
    if isinstance(default, bool):
        return _flag(name, text)
    if isinstance(default, float):
        return float(text)
    if name == "budget":
        return int(text)
    return text or None


def _flag(name: str, text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise InvalidArgument(f"{_variable(name)}={text!r}: use 1 or 0")
