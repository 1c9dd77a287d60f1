"""What a verification found, as values; `as_dict` is the schema of `--json`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.core.verify.history import History

SCHEMA_VERSION = 1


class Gate(enum.Enum):
    """What a finding fell short of."""

    REQUESTS = "requests"
    """Tokens and log-probabilities equal the awake reference, bit for bit, and all are finite."""
    CONTENTS = "contents"
    """Registered weights and runtime tensors hold the bytes that they slept with."""
    PLACEMENT = "placement"
    """Registered tensors lie in the pool that they belong to."""
    ADDRESS = "address"
    """Registered tensors wake where they slept."""
    AUDIT = "audit"
    """Nothing but KV payload lies in the KV pool."""
    BOOKS = "books"
    """Mapped bytes, handles, reservations and host bytes are as before; asleep, none is mapped."""
    CREEP = "creep"
    """Over cycles, neither device memory nor host memory grows."""
    FAULTS = "faults"
    """A failed transition leaves what it found, and succeeds once the cause is gone."""
    BEHAVIOUR = "behaviour"
    """The engine and the manager did what the step asked for."""


@dataclass(frozen=True)
class Finding:
    """One difference, with the names that lead to its cause; None where they do not apply."""

    gate: Gate
    text: str
    tensor: str | None = None
    tag: str | None = None
    segment: int | None = None
    """The address of the segment that holds the tensor."""
    requests: tuple[int, ...] = ()
    """The first requests that differ."""

    def as_dict(self) -> dict[str, Any]:
        segment = None if self.segment is None else f"{self.segment:#x}"
        return {
            "gate": self.gate.value,
            "text": self.text,
            "tensor": self.tensor,
            "tag": self.tag,
            "segment": segment,
            "requests": list(self.requests),
        }

    def __str__(self) -> str:
        address = "" if self.segment is None else f"{self.segment:#x}"
        where = f", in segment {address}" if address not in self.text else ""
        return f"{self.gate.value}: {self.text}{where}"


@dataclass(frozen=True)
class CaseResult:
    """How a case went. `compared`, `damaged` and `unstable` count requests over all its rounds."""

    name: str
    description: str
    rounds: int
    compared: int
    damaged: int
    unstable: int
    slept: Mapping[str, int]
    """Tag -> bytes of device memory that its sleeps released, the most of any one sleep."""
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()
    """What was warned of, but for warnings that had to come."""
    history: History | None = None
    """Memory over its cycles; None where the engine was not even made."""

    @property
    def passed(self) -> bool:
        return not self.findings and not self.damaged

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": self.description,
            "passed": self.passed,
            "rounds": self.rounds,
            "compared": self.compared,
            "damaged": self.damaged,
            "unstable": self.unstable,
            "slept_bytes": dict(self.slept),
            "seconds": round(self.seconds, 3),
            "findings": [finding.as_dict() for finding in self.findings],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class VerifyReport:
    """The verdict: every case bit-exact, on which machine, and with which options."""

    cases: tuple[CaseResult, ...]
    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    seconds: float
    schema_version: int = field(default=SCHEMA_VERSION, kw_only=True)

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes, times in seconds."""
        return {
            "kind": "hal verify",
            "schema_version": self.schema_version,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "environment": dict(self.environment),
            "options": dict(self.options),
            "cases": [case.as_dict() for case in self.cases],
        }
