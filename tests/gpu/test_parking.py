"""Parking on a real GPU: the driver's own checkpoint, its residual, and graphs behind it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from hal.core import BackupOptions, SleepManager, State
from hal.core.parking import PROCESS
from hal.cuda.platform import CudaPlatform
from hal.errors import AsleepError, OutOfDeviceMemory
from support import MIB, fill, hold, pattern

pytestmark = pytest.mark.cuda
GIB = 1 << 30
Make = Callable[..., SleepManager]

QUERY = """
import sys, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
print(memory.total - memory.reserved - memory.free)
"""


@pytest.fixture(autouse=True)
def _parkable(platform: CudaPlatform) -> None:
    if not platform.capabilities.park:
        pytest.skip(platform.capabilities.park.reason)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """A capture leaves cuBLAS's workspace in the graph's pool, and what is mapped stands against
    the next test's parking.
    """
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def used(sleeper: SleepManager) -> int:
    """Bytes that all processes hold on the device, as NVML tells another process."""
    uuid = sleeper.device.facts.device_uuid
    command = [sys.executable, "-c", QUERY, uuid]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def others(sleeper: SleepManager) -> int:
    """What is in use on the device without this process's context and pools, at most."""
    held = sleeper.platform.get_memory_info().process_used
    if held is None:
        pytest.skip("NVML does not tell this process's memory from that of others")
    return used(sleeper) - held


class Graph:
    """A captured product over tensors of the pools, and what it gave at first."""

    def __init__(self, sleeper: SleepManager) -> None:
        with sleeper.pool("weights"):
            self.weight, self.input = torch.randn(2048, 2048), torch.randn(256, 2048)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                (self.input @ self.weight).relu().sum(0)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with sleeper.graph_pool() as pool, torch.cuda.graph(self.graph, pool=pool):
            self.out = (self.input @ self.weight).relu() @ self.weight
        self.graph.replay()
        self.expected, self.address = self.out.cpu(), self.out.data_ptr()

    def check(self) -> None:
        self.out.zero_()
        self.graph.replay()
        assert torch.equal(self.out.cpu(), self.expected)
        assert self.out.data_ptr() == self.address


@pytest.mark.parametrize("backing", ["pinned", "anonymous"])
def test_a_captured_graph_replays_bit_exactly_after_parking(
    manager: Make, others: int, backing: str
) -> None:
    sleeper = manager(backup=BackupOptions(backing=backing))
    graph, weights = Graph(sleeper), fill(sleeper, "weights", 1, 2 * GIB)
    cache = fill(sleeper, "kv_cache", 2, GIB)
    for _ in range(3):
        slept = sleeper.sleep(level=1, park=True)
        assert sleeper.state is State.PARKED
        assert used(sleeper) - others <= 16 * MIB
        assert slept.parked_residual is not None
        assert slept.parked_residual <= 16 * MIB
        with pytest.raises(AsleepError), sleeper.pool("weights"):
            pass
        woke = sleeper.wake_up()
        print(f"\n{slept}\n{woke}")
        graph.check()
        assert torch.equal(weights, pattern(2 * GIB, 1))
        assert not cache.any()


def test_a_helper_killed_while_parked_is_replaced(sleeper: SleepManager) -> None:
    graph = Graph(sleeper)
    sleeper.sleep(park=True)
    first = PROCESS.helper_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    sleeper.wake_up()
    assert PROCESS.helper_pid not in (None, first)
    graph.check()


HOG = """
import os, sys
sys.stdin.readline()
import torch
free, _ = torch.cuda.mem_get_info()
hog = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("holding", flush=True)
sys.stdin.readline()
"""


def test_a_parked_process_waits_for_device_memory(sleeper: SleepManager) -> None:
    graph, weights = Graph(sleeper), fill(sleeper, "weights", 1, 2 * GIB)
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(GIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hog.stdin
    assert hog.stdout
    sleeper.sleep(park=True)
    hog.stdin.write("take it\n")
    hog.stdin.flush()
    assert hog.stdout.readline() == "holding\n"
    with pytest.raises(OutOfDeviceMemory, match="parked process"):
        sleeper.wake_up()
    assert sleeper.state is State.PARKED
    hog.stdin.close()
    sleeper.wake_up(wait_for_memory=60)
    assert hog.wait(60) == 0
    hog.stdout.close()
    graph.check()
    assert torch.equal(weights, pattern(2 * GIB, 1))


def test_parking_takes_memory_outside_the_pools(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1)
    outside = hold(torch.arange(64 * MIB, dtype=torch.int32))
    report = sleeper.sleep(park=True)
    assert report.parked_host_bytes >= outside.nbytes
    sleeper.wake_up()
    assert torch.equal(outside, torch.arange(64 * MIB, dtype=torch.int32))
    assert torch.equal(weights, pattern(3 * MIB, 1))
