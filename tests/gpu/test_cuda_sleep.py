"""Field cases whose effect only a real GPU shows."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from hal.core import BackupOptions, Policy, SleepManager, State
from hal.core.report import is_asleep
from hal.cuda.platform import CudaPlatform
from hal.errors import HalError, OutOfDeviceMemory
from support import MIB, books, fill, hold, pattern

pytestmark = pytest.mark.cuda
GIB = 1 << 30
Make = Callable[..., SleepManager]


def busy(milliseconds: float) -> None:
    """Keep the current stream busy (an H200 runs at most 2 cycles a nanosecond)."""
    torch.cuda._sleep(int(milliseconds * 2e6))


def test_r01_sleep_waits_for_kernels_on_every_stream(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1)
    with sleeper.pool("kv_cache"):
        cache = torch.zeros(64 * MIB, dtype=torch.uint8)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy(200)
        cache.fill_(3)
        weights.add_(1)
    started = time.monotonic()
    sleeper.sleep(level=1)
    assert time.monotonic() - started > 0.05, "it waited for the kernel"
    sleeper.wake_up()
    assert torch.equal(weights, pattern(3 * MIB, 1) + 1)
    torch.cuda.synchronize()


def test_r02_sleep_waits_for_a_connectors_copy_stream(sleeper: SleepManager) -> None:
    with sleeper.pool("kv_cache"):
        cache = torch.full((256 * MIB,), 9, dtype=torch.uint8)
    host = torch.empty(256 * MIB, dtype=torch.uint8, device="cpu", pin_memory=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy(100)
        host.copy_(cache, non_blocking=True)
    sleeper.sleep(level=1)
    assert bool((host == 9).all())
    sleeper.wake_up()
    assert not cache.any()


def test_r10_empty_cache_and_gc_while_asleep(sleeper: SleepManager) -> None:
    tensors = [fill(sleeper, "weights", seed, 24 * MIB) for seed in range(8)]
    sleeper.sleep(level=1)
    del tensors[::2]
    gc.collect()
    torch.cuda.empty_cache()
    sleeper.wake_up()
    assert all(torch.equal(t, pattern(24 * MIB, 2 * i + 1)) for i, t in enumerate(tensors))
    torch.cuda.empty_cache()
    counters = sleeper.device.counters()
    assert counters.asleep_bytes == 0


HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
hog = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("holding", flush=True)
sys.stdin.readline()
"""


def hog(leave: int) -> subprocess.Popen[str]:
    """Another process that holds all device memory but `leave` bytes until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOG, str(leave)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def release(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_r13_r17_wake_while_another_process_holds_the_memory(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1, 4 * GIB)
    sleeper.sleep(level=1)
    asleep = books(sleeper.platform)
    other = hog(leave=2 * GIB)
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory) as caught:
            sleeper.wake_up()
        assert caught.value.tag == "weights"
        assert caught.value.needed >= 4 * GIB
        assert (caught.value.free or 0) < 4 * GIB
        assert books(sleeper.platform) == asleep
        assert sleeper.state is State.ASLEEP
    threading.Timer(0.5, release, (other,)).start()
    sleeper.wake_up(wait_for_memory=60)
    assert torch.equal(weights, pattern(4 * GIB, 1))


def test_r13_the_driver_itself_runs_out_half_way(
    sleeper: SleepManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [fill(sleeper, "weights", seed, GIB) for seed in range(4)]
    sleeper.sleep(level=1)
    asleep = books(sleeper.platform)
    other = hog(leave=2 * GIB)
    # Without the check before the wake: the rollback is what has to save it.
    monkeypatch.setattr(sleeper._free_memory, "now", lambda: None)
    with pytest.raises(OutOfDeviceMemory):
        sleeper.wake_up()
    assert books(sleeper.platform) == asleep
    release(other)
    sleeper.wake_up()
    assert all(torch.equal(t, pattern(GIB, seed)) for seed, t in enumerate(weights))


@pytest.mark.parametrize("tag", ["runtime", "kv_cache"])
def test_r30_a_graph_that_reads_a_constant(manager: Make, tag: str) -> None:
    sleeper = manager(debug=True)
    with sleeper.pool(tag):
        index = torch.arange(64)
    source = torch.randn(64, 64)
    graph = torch.cuda.CUDAGraph()
    out = source[index.clamp(0, 63)].clone()
    torch.cuda.synchronize()
    with sleeper.graph_pool() as pool, torch.cuda.graph(graph, pool=pool):
        out.copy_(source[index.clamp(0, 63)])
    graph.replay()
    expected = out.clone()
    sleeper.sleep(level=1)
    sleeper.wake_up()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected) is (tag == "runtime"), "poison shows what was not kept"


def test_graphs_sleep_and_replay_bit_exactly(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"):
        weight = torch.randn(1024, 1024)
        x = torch.randn(256, 1024)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            (x @ weight).relu().sum(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with sleeper.graph_pool() as pool, torch.cuda.graph(graph, pool=pool):
        out = (x @ weight).relu() @ weight
    graph.replay()
    expected, address = out.clone(), out.data_ptr()
    assert sleeper.tag_of(out) == "cudagraph"
    for _ in range(3):
        report = sleeper.sleep(level=1)
        assert report.tag("cudagraph").bytes > 0
        sleeper.wake_up()
        graph.replay()
        assert torch.equal(out, expected)
        assert out.data_ptr() == address


def test_r24_r31_buffers_and_scales_survive_a_discard(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"):
        weight = torch.randn(1 << 20)
        rotary = torch.linspace(0, 1, 4096)
        scale = torch.tensor([0.03125])
    sleeper.preserve([rotary, scale])
    sleeper.sleep(level=2)
    sleeper.wake_up()
    assert torch.equal(rotary, torch.linspace(0, 1, 4096))
    assert scale.item() == 0.03125
    assert not weight.any()


@pytest.mark.parametrize("debug", [False, True])
def test_r33_discarded_pages_come_back_without_old_bytes(manager: Make, debug: bool) -> None:
    sleeper = manager(debug=debug)
    with sleeper.pool("kv_cache"):
        cache = torch.full((GIB,), 0x5A, dtype=torch.uint8)
    for _ in range(3):
        sleeper.sleep(level=1)
        scratch = torch.full((2 * GIB,), 0x77, dtype=torch.uint8)
        del scratch
        torch.cuda.empty_cache()
        sleeper.wake_up()
        assert bool((cache == (0xFF if debug else 0)).all())


def test_r36_no_block_is_reused_across_tags(sleeper: SleepManager) -> None:
    with sleeper.pool("kv_cache"):
        torch.ones(64 * MIB, dtype=torch.uint8)
    weights = fill(sleeper, "weights", 2, 64 * MIB)
    sleeper.sleep(policy={"kv_cache": Policy.DISCARD})
    assert torch.equal(weights, pattern(64 * MIB, 2))
    sleeper.wake_up()


def test_r56_the_residual_does_not_grow(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1, 256 * MIB)
    residual: list[int] = []
    for cycle in range(50):
        hold(torch.randn(64, 64) @ torch.randn(64, 64))
        with sleeper.pool("workspace"):
            torch.ones(MIB + cycle)
        sleeper.sleep(level=1)
        torch.cuda.empty_cache()
        free, total = sleeper.device.memory()
        residual.append(total - free)
        sleeper.wake_up()
    assert residual[-1] - residual[1] <= 2 * MIB
    assert torch.equal(weights, pattern(256 * MIB, 1))


def test_r57_r58_what_stays_is_explained_by_source(sleeper: SleepManager) -> None:
    hold(fill(sleeper, "weights", 1, 64 * MIB))
    outside = hold(torch.ones(GIB, dtype=torch.uint8))
    torch.empty(2 * GIB, dtype=torch.uint8)  # freed at once: torch caches it
    report = sleeper.sleep(level=1)
    sources = {entry.source: entry.bytes for entry in report.residual}
    assert sources["torch's own allocations outside the pools"] >= outside.nbytes
    cached = sources["torch's cache outside the pools"]
    assert cached is not None
    assert cached < 64 * MIB, "a sleep gives torch's cache back, but for the rest of used segments"
    assert sources["awake tags"] == 0
    driver = sources["context, modules and libraries"]
    assert driver is None or 0 < driver < 2 * GIB
    sleeper.wake_up()


def test_r63_captured_graphs_are_a_line_of_their_own(manager: Make) -> None:
    sleeper = manager()
    x = torch.randn(256, 256)
    graphs = [torch.cuda.CUDAGraph() for _ in range(64)]
    for graph in graphs:
        with sleeper.graph_pool() as pool, torch.cuda.graph(graph, pool=pool):
            y = x
            for _ in range(200):
                y = y.relu() + 1
        graph.replay()
    dropped: list[int] = []
    sleeper.before_sleep(lambda: (dropped.append(len(graphs)), graphs.clear()), name="drop graphs")
    report = sleeper.sleep(level=1)
    assert dropped == [64], "an engine drops its graphs in a hook, or keeps them"
    sources = {entry.source: entry.bytes for entry in report.residual}
    assert (sources.get("captured graphs") or 0) > 0
    sleeper.wake_up()


def test_r64_pinned_backups_take_exactly_their_bytes(manager: Make) -> None:
    sleeper = manager()
    tensor = fill(sleeper, "weights", 1, 5 * GIB)
    report = sleeper.sleep(level=1)
    assert report.copied_bytes >= 5 * GIB
    assert sleeper.held_bytes <= 1.01 * report.copied_bytes
    sleeper.wake_up()
    assert torch.equal(tensor, pattern(5 * GIB, 1))
    assert sleeper.trim_host() >= 5 * GIB


def test_r66_a_failed_registration_poisons_nothing(manager: Make) -> None:
    strict = manager(backup=BackupOptions(backing="pinned", require_pinned=True))
    weights = fill(strict, "weights", 1, 64 * MIB)
    before = books(strict.platform)
    strict.device.fail("host_register", 1, 2)
    with pytest.raises(HalError):
        strict.sleep(level=1)
    strict.device.clear_faults()
    assert books(strict.platform) == before
    assert torch.equal(weights, pattern(64 * MIB, 1))
    strict.sleep(level=1)
    strict.wake_up()
    assert torch.equal(weights, pattern(64 * MIB, 1))


class Churn(threading.Thread):
    """Allocates, computes and frees on the device until told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        while not self.stop.is_set():
            torch.ones(MIB, device="cuda").mul_(2)
            gc.collect(0)
            self.rounds += 1


def test_frees_and_allocations_of_other_threads_during_transitions(sleeper: SleepManager) -> None:
    tensors = {seed: fill(sleeper, "weights", seed, 8 * MIB) for seed in range(64)}

    def free_some() -> None:
        for seed in range(0, 64, 4):
            del tensors[seed]
            time.sleep(0.002)

    churning = [Churn() for _ in range(3)]
    freeing = threading.Thread(target=free_some)
    for thread in [*churning, freeing]:
        thread.start()
    for _ in range(5):
        sleeper.sleep(level=1)
        sleeper.wake_up()
    freeing.join()
    for thread in churning:
        thread.stop.set()
        thread.join(60)
        assert not thread.is_alive(), "a deadlock"
        assert thread.rounds > 5
    assert all(torch.equal(t, pattern(8 * MIB, seed)) for seed, t in tensors.items())
    assert not any(is_asleep(segment.state) for segment in sleeper._pools.segments())


def test_three_hundred_cycles_have_no_slope(sleeper: SleepManager) -> None:
    weights = fill(sleeper, "weights", 1, 128 * MIB)
    hold(fill(sleeper, "kv_cache", 2, 256 * MIB))
    gc.collect()
    torch.cuda.empty_cache()
    used: list[int] = []
    for _ in range(300):
        sleeper.sleep(level=1)
        sleeper.wake_up()
        free, total = sleeper.device.memory()
        used.append(total - free)
    assert used[10] == used[-1], "a slope of 0 MiB a cycle"
    assert torch.equal(weights, pattern(128 * MIB, 1))


def test_r61_memory_is_made_for_rdma_where_the_device_supports_it(platform: CudaPlatform) -> None:
    rdma = platform.capabilities.rdma
    assert rdma or rdma.reason
