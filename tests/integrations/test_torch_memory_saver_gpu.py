"""What the drop-in for torch_memory_saver does on a GPU: graphs, several devices, other threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import hal
from hal.core.integrations.torch_memory_saver import TorchMemorySaver
from support import MIB

pytestmark = pytest.mark.cuda


@pytest.fixture
def saver() -> Iterator[TorchMemorySaver]:
    made = TorchMemorySaver()
    yield made
    made.resume()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def used(device: int = 0) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Step:
    """A captured step with 256 MiB between its input and its output."""

    def __init__(self, saver: TorchMemorySaver, pool: object, weights: torch.Tensor) -> None:
        self.input, self.weights = torch.zeros(64 * MIB, device="cuda"), weights
        self.graph = torch.cuda.CUDAGraph()
        self.run()
        torch.cuda.synchronize()
        with saver.cuda_graph(self.graph, pool=pool, tag="graphs", enable_cpu_backup=True):
            self.output = self.run()

    def run(self) -> torch.Tensor:
        return ((self.input + 1) * self.weights).view(64, -1).sum(1)

    def __call__(self, value: float) -> list[float]:
        self.input.fill_(value)
        self.graph.replay()
        return self.output.tolist()


def test_graphs_replay_after_their_memory_was_paused(saver: TorchMemorySaver) -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.full((64 * MIB,), 2.0, device="cuda")
    steps = [Step(saver, None, weights)]
    steps.append(Step(saver, steps[0].graph.pool(), weights))
    expected = [4.0 * MIB] * 64
    assert steps[0](1.0) == steps[1](1.0) == expected
    before = used()
    saver.pause()
    assert before - used() >= 2 * 256 * MIB
    saver.resume()
    assert steps[0](1.0) == steps[1](1.0) == expected
    saver.pause("graphs")
    assert saver.get_cpu_backup(steps[0].output) is not None
    assert torch.all(weights == 2.0)
    saver.resume("graphs")
    assert steps[1](1.0) == steps[0](1.0) == expected


def test_the_memory_of_disable_goes_at_its_end(saver: TorchMemorySaver) -> None:
    with saver.region(enable_cpu_backup=True):
        weights = torch.full((256 * MIB,), 42, dtype=torch.uint8, device="cuda")
        saver.pause()
        paused = used()
        with saver.disable():
            scratch = torch.full((1 << 30,), 53, dtype=torch.uint8, device="cuda")
            assert scratch.float().mean().item() == 53
            assert used() >= paused + (1 << 30)
            del scratch
        assert used() <= paused + 10 * MIB
        saver.resume()
    assert torch.all(weights == 42)


def test_r41_expandable_segments_are_no_reason_to_refuse(saver: TorchMemorySaver) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with saver.region(enable_cpu_backup=True):
            tensor = torch.full((256 * MIB,), 5, dtype=torch.uint8, device="cuda")
        before = used()
        saver.pause()
        assert before - used() >= 256 * MIB
        saver.resume()
        assert torch.all(tensor == 5)
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_a_margin_turns_into_torchs_out_of_memory(saver: TorchMemorySaver) -> None:
    saver.memory_margin_bytes = torch.cuda.mem_get_info()[0] - 64 * MIB
    with pytest.raises(hal.OutOfDeviceMemory), saver.region():
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    saver.memory_margin_bytes = 0
    with saver.region():
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_tag_on_two_devices_is_paused_on_both(saver: TorchMemorySaver) -> None:
    tensors = []
    for device in range(2):
        with torch.cuda.device(device), saver.region(tag="t", enable_cpu_backup=True):
            tensors.append(torch.full((256 * MIB,), device + 1, dtype=torch.uint8, device="cuda"))
    before = [used(device) for device in range(2)]
    saver.pause("t")
    assert all(before[d] - used(d) >= 256 * MIB for d in range(2))
    backup = saver.get_cpu_backup(tensors[1])
    assert backup is not None
    assert torch.all(backup == 2)
    saver.resume("t")
    assert torch.all(tensors[0] == 1)
    assert torch.all(tensors[1] == 2)
