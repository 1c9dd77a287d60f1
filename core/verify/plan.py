"""From options to a verification: platform, engine and cases; a mistake in them shows here."""

from __future__ import annotations

import importlib.metadata
import platform as system
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from hal.core.backup import BackupOptions, default_directory, open_arena
from hal.core.verify.breaks import Break, choose_break
from hal.core.verify.cases import Case, choose
from hal.core.verify.engine import Execution
from hal.core.verify.report import VerifyReport
from hal.core.verify.requests import ROUND, Request, workload
from hal.core.verify.runner import Observer, run_cases
from hal.core.verify.state import EngineConfig
from hal.core.verify.subject import Setup, Subject
from hal.core.verify.timing import Stopwatch
from hal.detect import HOST, candidates, detect
from hal.errors import InvalidArgument, Unsupported
from hal.platform import Platform, PoolNesting

Order = Literal["lifo", "fifo", "flatten"]


@dataclass(frozen=True)
class VerifyOptions:
    """What `hal verify` was asked for; None means the platform's own."""

    platform: str | None = None
    nesting: Order | None = None
    requests: int = ROUND
    cycles: int = 20
    backing: str | None = None
    execution: Execution = "eager"
    cases: tuple[str, ...] = ()
    break_name: str | None = None
    device: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """A verification that is ready to run."""

    options: VerifyOptions
    setup: Setup
    cases: tuple[Case, ...]
    subject_type: type[Subject] = Subject

    @property
    def requests(self) -> tuple[Request, ...]:
        return workload(self.options.requests, self.setup.engine.shape, self.options.seed)

    @property
    def served(self) -> int:
        """Requests that all rounds serve together."""
        return self.options.requests * sum(case.rounds for case in self.cases)

    def run(self, observer: Observer) -> VerifyReport:
        """Run it; every difference is in the report, none raises."""
        with Stopwatch() as watch:
            results = run_cases(self._make, self.requests, self.cases, observer)
        options = asdict(self.options)
        options["break"] = options.pop("break_name")
        return VerifyReport(results, environment(self.setup), options, watch.seconds)

    def _make(self) -> Subject:
        return self.subject_type(self.setup)


def make_plan(options: VerifyOptions) -> Plan:
    """Resolve the options; raises a `HalError` that says which one is wrong."""
    _require_positive("requests", options.requests)
    _require_positive("cycles", options.cycles)
    cases = choose(options.cases, options.cycles)
    defect = choose_break(options.break_name) if options.break_name else None
    if defect and defect.cell:
        raise InvalidArgument(
            f"--break {defect.name} shows in a cell of the matrix: add --cell {defect.cell}"
        )
    platform = _platform(options, defect)
    setup = Setup(
        platform,
        options.device,
        _backing(options, defect),
        nesting="flatten" if options.nesting == "flatten" else "auto",
        execution=options.execution,
        engine=EngineConfig(seed=options.seed),
    )
    _require_graphs(setup)
    _try_backing(setup)
    return Plan(options, setup, cases, defect.subject if defect else Subject)


def _backing(options: VerifyOptions, defect: Break | None) -> str | None:
    """The backing asked for, else the one that a break shows with."""
    if options.backing or defect is None:
        return options.backing
    return f"file:{default_directory()}" if defect.backing == "file" else defect.backing


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise InvalidArgument(f"--{name} must be at least 1, not {value}")


def _platform(options: VerifyOptions, defect: Break | None) -> Platform:
    """The platform asked for, opened; a break may need one of its own."""
    if defect and defect.host_options is not None:
        if options.platform not in (None, HOST) or options.nesting:
            raise InvalidArgument(
                f"--break {defect.name} brings its own allocator on {HOST}; leave out --nesting "
                "and any other --platform"
            )
        return _host_platform(**defect.host_options)
    platform = detect(options.platform)
    platform.device(options.device)
    return _with_order(platform, options.nesting, options.device)


def _host_platform(**options: Any) -> Platform:
    """A host platform of its own, whose allocator can be told how to nest."""
    make: Callable[..., Platform] = candidates()[HOST].load()
    return make(**options)


def _with_order(platform: Platform, order: Order | None, device: int) -> Platform:
    """The platform with the order asked for: the host's can be chosen, others' is a fact."""
    if order is None:
        return platform
    wanted = PoolNesting.LIFO if order == "lifo" else PoolNesting.FIFO
    if platform.name == HOST:
        return _host_platform(nesting=wanted)
    found = platform.capabilities_of(device).pool_nesting
    if order != "flatten" and found is not wanted:
        raise InvalidArgument(
            f"--nesting {order}: this torch build nests pools {found.value} on {platform.name}; "
            f"leave it out, or try other orders with --platform {HOST}"
        )
    return platform


def _require_graphs(setup: Setup) -> None:
    """Graphs are captured into a pool that sleeps, or not at all."""
    found = setup.platform.capabilities_of(setup.device).graph_pools
    if setup.execution == "graphs" and not found:
        raise Unsupported("--execution graphs", setup.platform.name, found.reason)


def _try_backing(setup: Setup) -> None:
    """Open the arena once, so that a missing directory shows before the first round."""
    open_arena(setup.platform, setup.device, BackupOptions(backing=setup.backing)).close()


def environment(setup: Setup) -> dict[str, Any]:
    """Where a verification ran, as plain values."""
    capabilities = setup.platform.capabilities_of(setup.device)
    return {
        "versions": {
            "accel-hal": _version("accel-hal"),
            "python": system.python_version(),
            "torch": torch.__version__,
            "system": system.platform(),
        },
        "platform": setup.platform.name,
        "capabilities": asdict(capabilities) | {"pool_nesting": capabilities.pool_nesting.value},
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (running from a source tree)"
