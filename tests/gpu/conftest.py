"""Fixtures of the tests that need a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hal.core import BackupOptions, SleepManager
from hal.cuda.platform import CudaPlatform
from support import release_held


@pytest.fixture(scope="session")
def platform() -> CudaPlatform:
    return CudaPlatform()


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with torch.device("cuda"):
        yield
    release_held()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def manager(platform: CudaPlatform) -> Iterator[Callable[..., SleepManager]]:
    made: list[SleepManager] = []

    def make(**options: Any) -> SleepManager:
        options.setdefault("backup", BackupOptions(backing="pinned"))
        made.append(SleepManager(platform, **options))
        return made[-1]

    yield make
    platform.device().clear_faults()
    for sleeper in made:
        if sleeper.is_sleeping:
            sleeper.wake_up()
        sleeper.trim_host()


@pytest.fixture
def sleeper(manager: Callable[..., SleepManager]) -> SleepManager:
    return manager()
