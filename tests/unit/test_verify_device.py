"""The reference engine on a device whose memory the host cannot reach: what it makes is on the
device, it mixes no two devices, and it reads back in one place.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from hal.core import SleepManager
from hal.core.verify.engine import ReferenceEngine
from hal.core.verify.requests import Completion, workload
from hal.core.verify.state import EngineConfig
from hal.cpu.platform import CpuPlatform
from hal.platform import PoolNesting

CONFIG = EngineConfig()
REQUESTS = workload(40, CONFIG.shape)


class MetaPlatform(CpuPlatform):
    """Tensors without memory: torch refuses to read them, or to mix them with the host's."""

    device_type: ClassVar[str] = "meta"


class Blind(ReferenceEngine):
    """Counts its reads of device memory and makes up what it reads."""

    reads = 0

    def _read(self, values: torch.Tensor) -> list[Any]:
        self.reads += 1
        assert values.is_meta
        return torch.zeros(values.shape, dtype=values.dtype, device="cpu").tolist()


@pytest.fixture
def engine() -> Blind:
    platform = MetaPlatform(claims=PoolNesting.LIFO)
    return Blind(SleepManager(platform), CONFIG)


def test_everything_that_it_makes_is_on_the_device(engine: Blind) -> None:
    assert {entry.tensor.device.type for entry in engine.registered().values()} == {"meta"}


def test_it_serves_without_reaching_into_the_device(engine: Blind) -> None:
    engine.submit(REQUESTS)
    done: list[Completion] = []
    steps = 0
    while engine.unfinished:
        done += engine.step()
        steps += 1
    assert {each.request for each in done} == {request.id for request in REQUESTS}
    assert engine.reads <= 3 * steps, "prompt logprobs, first tokens, and one more a decode step"


def test_weights_are_drawn_on_the_host_whatever_the_default_device_is() -> None:
    engine = ReferenceEngine(SleepManager(CpuPlatform()), CONFIG)
    expected = [parameter.clone() for parameter in engine.model.parameters()]
    with torch.device("meta"):
        engine.reload_weights()
    found = engine.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
