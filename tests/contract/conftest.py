"""One suite, every platform: the fixtures that a contract test runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.core import BackupOptions, SleepManager, parking
from hal.core.parking import ProcessParking
from hal.platform import Platform
from support import TARGETS, Target, release_held


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a target does not run."""
    left_out = [item for item in items if not _runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _runs(item)]


def _runs(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    target = parameters.params.get("target") if parameters else None
    if not isinstance(target, Target) or target.only is None:
        return True
    return getattr(item, "originalname", None) in target.only


@pytest.fixture(params=[pytest.param(t, id=t.name, marks=t.marks) for t in TARGETS])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    chosen: Target = request.param
    request.node.user_properties.append(("target", chosen.name))  # for the summary by platform
    with torch.device(chosen.device):
        yield chosen


@pytest.fixture(autouse=True)
def _held() -> Iterator[None]:
    yield
    release_held()


@pytest.fixture
def platform(target: Target) -> Iterator[Platform]:
    made = target.make()
    yield made
    made.device().clear_faults()


@pytest.fixture(params=["anonymous", "file"])
def backing(request: pytest.FixtureRequest, disk: Path) -> str:
    return "anonymous" if request.param == "anonymous" else f"file:{disk}"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory on a real disk, as file backings need."""
    return tmp_path


@pytest.fixture
def manager(platform: Platform) -> Iterator[Callable[..., SleepManager]]:
    """Makes managers on the platform, and checks at the end that their books close."""
    made: list[SleepManager] = []

    def make(backing: str = "anonymous", **options: Any) -> SleepManager:
        backup = options.pop("backup", None) or BackupOptions(backing=backing)
        made.append(SleepManager(platform, backup=backup, **options))
        return made[-1]

    yield make
    platform.device().clear_faults()
    for sleeper in made:
        if sleeper.is_sleeping:
            sleeper.wake_up()


@pytest.fixture
def sleeper(manager: Callable[..., SleepManager]) -> SleepManager:
    return manager()


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessParking]:
    """A parking of the test's own, and a folder in which emulated processes see each other: it is
    found when a device is opened.
    """
    monkeypatch.setenv("EMUCUDA_PROCESSES", str(tmp_path))
    own = ProcessParking()
    monkeypatch.setattr(parking, "PROCESS", own)
    yield own
    own.close()
