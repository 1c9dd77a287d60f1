"""What all tests share: fresh interpreters, markers that need hardware, and hypothesis without a
clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest
import torch

from hal.detect import survey

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = {
    "passed": "passed",
    "failed": "failed",
    "error": "errors",
    "skipped": "unsupported",
    "xfailed": "expected failures",
}
VENDOR_MARKERS = ("cuda", "rocm", "xpu")

# hypothesis's own profile for CI draws the same examples in every run.
_PARENT = hypothesis.settings.get_profile("ci" if os.environ.get("CI") else "default")
hypothesis.settings.register_profile("project", _PARENT, deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, each with the reason that detection gives."""
    reasons = survey() if any(_vendors_of(item) for item in items) else {}
    for item in items:
        for vendor in _vendors_of(item):
            if why_not := reasons.get(vendor, "unknown platform"):
                item.add_marker(pytest.mark.skip(reason=f"needs {vendor}: {why_not}"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


def _vendors_of(item: pytest.Item) -> list[str]:
    return [name for name in VENDOR_MARKERS if item.get_closest_marker(name)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the contract suite found, by platform: what a platform cannot do is kept apart from
    what is expected to fail.
    """
    outcomes: dict[str, Counter[str]] = {}
    points: dict[str, Counter[str]] = {}
    for target, said, point in _contract_results(terminalreporter):
        outcomes.setdefault(target, Counter())[said] += 1
        points.setdefault(target, Counter()).update([point] if point else [])
    if outcomes:
        terminalreporter.section("contract suite by platform")
    for target, counts in sorted(outcomes.items()):
        text = ", ".join(f"{counts[said]} {said}" for said in OUTCOMES.values())
        hit = ", ".join(f"{point} {count}" for point, count in sorted(points[target].items()))
        terminalreporter.line(f"{target}: {text}" + (f"; fault points hit: {hit}" if hit else ""))


def _contract_results(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str, str]]:
    """(platform, outcome, fault point or "") of every test that ran on a platform."""
    for outcome, said in OUTCOMES.items():
        for report in reporter.stats.get(outcome, ()):
            found = dict(getattr(report, "user_properties", ()))
            if "target" in found and (outcome != "passed" or report.when == "call"):
                yield found["target"], said, found.get("fault point", "")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Host kernels on one thread: how work is split must not depend on the load of the machine, or
    bits may, and threads that wait for each other cost more here than they save.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run Python outside the source tree in a fresh interpreter: `run_python("-c", code)`."""

    def run(
        *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
