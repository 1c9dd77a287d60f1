"""Typed errors as vLLM expects them: its own allocators raise RuntimeError, and its callers and
tests catch that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hal.errors import HalError


@contextmanager
def as_runtime_errors() -> Iterator[None]:
    """Let a typed error of this library be a RuntimeError, too, with type, fields and notes."""
    try:
        yield
    except HalError as error:
        raise _twin(error) from error


@contextmanager
def named_errors() -> Iterator[None]:
    """Put the type of a typed error into its text: between processes vLLM sends the text alone."""
    try:
        yield
    except HalError as error:
        name = type(error).__name__
        if error.args and not str(error.args[0]).startswith(name):
            error.args = (f"{name}: {error.args[0]}", *error.args[1:])
        raise


def _twin(error: HalError) -> HalError:
    own: Any = type(error)
    kind = _runtime_kind(own)
    if own is kind:
        return error
    twin = HalError.__new__(kind, *error.args)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    return twin


@functools.cache
def _runtime_kind(kind: type[HalError]) -> type[HalError]:
    """The type that is both; in another process it is the typed error alone."""
    if issubclass(kind, RuntimeError):
        return kind

    def reduce(self: HalError) -> tuple[Any, ...]:
        restore, (_, *contents) = HalError.__reduce__(self)
        return restore, (kind, *contents)

    parts = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce}
    return type(kind.__name__, (kind, RuntimeError), parts)
