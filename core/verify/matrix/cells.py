"""Runs cells: each is an awake reference and a life on a fresh engine of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hal.core.backup import default_directory
from hal.core.verify.breaks import Break, choose_break
from hal.core.verify.cases import AWAKE, Case
from hal.core.verify.engine import Execution
from hal.core.verify.matrix.lives import BUDGET, case_of, engine_of, requests_of
from hal.core.verify.matrix.report import CellResult, Verdict
from hal.core.verify.matrix.support import codec_of
from hal.core.verify.matrix.table import Cell
from hal.core.verify.report import CaseResult
from hal.core.verify.requests import workload
from hal.core.verify.runner import run_cases
from hal.core.verify.subject import Setup, Subject
from hal.core.verify.timing import Stopwatch
from hal.detect import HOST, candidates, detect
from hal.platform import Platform, PoolNesting

CAPACITY = 256 << 20
"""Device memory of the host in cells that fill it."""


@dataclass(frozen=True)
class Site:
    """Where cells run, as values that can be sent to another process."""

    platform: str
    device: int = 0
    seed: int = 0
    break_name: str | None = None

    @property
    def defect(self) -> Break | None:
        return choose_break(self.break_name) if self.break_name else None


class Silent:
    """An observer that looks away."""

    def started(self, case: Case) -> None: ...
    def served(self, requests: int) -> None: ...
    def finished(self, result: CaseResult) -> None: ...


def run_cell(site: Site, cell: Cell, requests: int) -> CellResult:
    """The verdict on a cell; every difference is in it, none raises."""
    setup, defect = setup_of(site, cell), site.defect
    subject = defect.subject if defect else Subject
    round_ = workload(requests_of(cell, requests), setup.engine.shape, site.seed)
    with Stopwatch() as watch:
        cases = (AWAKE, case_of(cell))
        results = run_cases(lambda: subject(setup), round_, cases, Silent())
    return _result(cell, results, watch.seconds)


def _result(cell: Cell, results: tuple[CaseResult, ...], seconds: float) -> CellResult:
    """The reference and the life as one: whichever failed, the cell did."""
    life = results[-1]
    findings = tuple(finding for result in results for finding in result.findings)
    passed = len(results) == 2 and all(result.passed for result in results)
    return CellResult(
        name=cell.name,
        values=cell.values,
        why=cell.why,
        verdict=Verdict.PASSED if passed else Verdict.FAILED,
        reason="" if passed else str(findings[0]),
        rounds=sum(result.rounds for result in results),
        compared=sum(result.compared for result in results),
        damaged=sum(result.damaged for result in results),
        unstable=results[0].unstable,
        slept=life.slept,
        seconds=seconds,
        findings=findings,
        warnings=life.warnings,
        history=life.history,
    )


# -- setups


def setup_of(site: Site, cell: Cell) -> Setup:
    """What the cell's engine is built from."""
    execution: Execution = "graphs" if cell["execution"] == "graphs" else "eager"
    return Setup(
        platform=_platform(site, cell),
        device=site.device,
        nesting="flatten" if cell["nesting"] == "flatten" else "auto",
        execution=execution,
        engine=engine_of(cell, site.seed),
        **_backup(site, cell),
    )


def _backup(site: Site, cell: Cell) -> Mapping[str, Any]:
    """The options of backups. A defect may show with one kind of backing alone."""
    defect = site.defect
    backing = defect.backing if defect and defect.backing else cell["backing"]
    compresses = cell["compress"] == "yes"
    return {
        "backing": f"file:{default_directory()}" if backing == "file" else backing,
        "retain": cell["retain"] == "yes",
        "compress": codec_of(_platform(site, cell), site.device) if compresses else None,
        "budget": BUDGET if cell["fault"] == "host-budget" else None,
    }


def _platform(site: Site, cell: Cell) -> Platform:
    """The site's platform, with the nesting order and the capacity that the cell asks for."""
    if site.platform != HOST:
        return detect(site.platform)
    defect = site.defect
    if defect and defect.host_options is not None:
        return _host(tuple(sorted(defect.host_options.items(), key=lambda entry: entry[0])))
    options: dict[str, Any] = {}
    if cell["nesting"] in ("lifo", "fifo"):
        options["nesting"] = PoolNesting(cell["nesting"])
    if cell["fault"] == "memory-taken":
        options["capacity"] = CAPACITY
    return _host(tuple(options.items()))


@functools.cache
def _host(options: tuple[tuple[str, Any], ...]) -> Platform:
    """One host platform a set of options: devices are opened once."""
    return candidates()[HOST].load()(**dict(options))
