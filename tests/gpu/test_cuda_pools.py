"""torch's memory pools over libhal on a real GPU."""

from __future__ import annotations

import gc
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hal.core import SleepManager, State
from hal.cuda.platform import CudaPlatform
from hal.errors import OutOfDeviceMemory, StateError
from hal.platform import PoolNesting
from support import MIB, books, fill, hold, pattern

pytestmark = pytest.mark.cuda
GIB = 1 << 30
RunPython = Callable[..., subprocess.CompletedProcess[str]]


def test_capabilities_of_the_device(platform: CudaPlatform) -> None:
    found = platform.capabilities
    assert found.pool_nesting is PoolNesting.LIFO
    assert found.nesting_found == "probed"
    assert found.virtual_memory
    assert found.graph_pools
    assert found.pinned_host
    assert found.granularity == 2 * MIB
    assert not found.scrubs_discarded


def test_r43_nested_scopes_land_in_their_own_pool(sleeper: SleepManager) -> None:
    with sleeper.pool("runtime"):
        first = torch.ones(1000)
        with sleeper.pool("kv_cache"):
            inner = torch.ones(30 * MIB, dtype=torch.uint8)
        second = torch.ones(1000)
    outside = torch.ones(1000)
    tags = [sleeper.tag_of(tensor) for tensor in (first, inner, second, outside)]
    assert tags == ["runtime", "kv_cache", "runtime", None]


def test_twenty_scopes_reuse_one_segment(sleeper: SleepManager) -> None:
    for _ in range(20):
        with sleeper.pool("workspace"):
            torch.ones(MIB, dtype=torch.uint8)
    assert len(sleeper._pools.segments("workspace")) == 1


def test_another_threads_tensors_stay_outside(sleeper: SleepManager) -> None:
    made: list[torch.Tensor] = []
    with sleeper.pool("weights"):
        thread = threading.Thread(target=lambda: made.append(torch.ones(MIB, device="cuda")))
        thread.start()
        thread.join()
    assert sleeper.tag_of(made[0]) is None


def test_library_workspaces_are_not_caught_by_a_scope(sleeper: SleepManager) -> None:
    matrix = torch.randn(512, 512)
    with sleeper.pool("kv_cache"):
        hold(torch.addmm(matrix[0], matrix, matrix))
    assert sum(s.size for s in sleeper._pools.segments("kv_cache")) <= 20 * MIB


def test_kv_audit_names_what_the_dispatcher_never_saw(sleeper: SleepManager) -> None:
    matrix, side = torch.randn(512, 512), torch.cuda.Stream()
    torch.cuda.synchronize()
    scope = sleeper.kv_init()
    scope.__enter__()
    with scope.cache(), torch.cuda.stream(side):
        product = scope.declare(matrix @ matrix)
    with pytest.warns(UserWarning, match="a library's own memory"):
        scope.__exit__(None, None, None)
    side.synchronize()
    assert max(finding.bytes for finding in scope.findings) >= MIB
    assert product.shape == (512, 512)


def test_r41_expandable_segments_are_off_inside_and_the_whole_setting_is_restored(
    run_python: RunPython,
) -> None:
    code = """
import torch
from hal.core import SleepManager, BackupOptions
from hal.cuda.platform import CudaPlatform
def settings():
    found = dict(torch.cuda.memory._snapshot()["allocator_settings"])
    found.pop("PYTORCH_CUDA_ALLOC_CONF")
    return found
sleeper = SleepManager(CudaPlatform(), backup=BackupOptions(backing="pinned"))
before = settings()
assert before["expandable_segments"] and before["max_split_size"] == 512 << 20, before
try:
    with sleeper.pool("weights"):
        assert not settings()["expandable_segments"]
        assert settings()["max_split_size"] == 512 << 20
        x = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
        with sleeper.pool("own"):
            y = torch.ones(1 << 20, device="cuda")
        raise KeyError
except KeyError:
    pass
assert settings() == before, (settings(), before)
report = sleeper.sleep(level=1)
assert report.total_bytes >= 1 << 30
sleeper.wake_up()
assert bool((x == 1).all())
print("ok")
"""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = "expandable_segments:True,max_split_size_mb:512,garbage_collection_threshold:0.8"
        done = run_python("-c", code, env={name: value})
        assert done.stdout == "ok\n", done.stderr


def test_r45_trim_gives_freed_segments_back(sleeper: SleepManager) -> None:
    source_kept = pattern(MIB, 1)
    with sleeper.pool("weights") as pool:
        kept = source_kept.clone()
        freed = torch.ones(GIB, dtype=torch.uint8)
    before = books(sleeper.platform)["mapped_bytes"]
    del freed
    gc.collect()
    assert pool.trim() >= GIB
    assert books(sleeper.platform)["mapped_bytes"] <= before - GIB
    report = sleeper.sleep(level=1)
    assert report.copied_bytes <= 2 * MIB
    sleeper.wake_up()
    assert torch.equal(kept, pattern(MIB, 1))
    source_again = pattern(MIB, 2)
    with sleeper.pool("weights"):
        again = source_again.clone()
    assert sleeper.tag_of(again) == sleeper.tag_of(kept) == "weights"


def test_r49_sleep_inside_an_active_scope_is_refused(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"), pytest.raises(StateError, match="scope of weights is open"):
        sleeper.sleep(level=1)


def test_r51_snapshots_and_pools_of_many_rounds(platform: CudaPlatform) -> None:
    before = books(platform)
    for _ in range(512):
        pool = platform.create_pool("round")
        with pool.use():
            tensor = torch.ones(100)
        assert sum(map(len, pool.snapshot().live.values())) == 1
        del tensor
        pool.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert books(platform) == before


def test_r53_tensors_freed_right_after_a_launch(sleeper: SleepManager) -> None:
    with sleeper.pool("weights"):
        for _ in range(200):
            torch.rand(7 * MIB)
    torch.cuda.synchronize()
    hold(torch.ones(10))


def test_a_failed_allocation_is_typed_and_leaves_the_pool_usable(sleeper: SleepManager) -> None:
    with pytest.raises(OutOfDeviceMemory) as caught, sleeper.pool("weights"):
        torch.empty(300 * GIB, dtype=torch.uint8)
    assert caught.value.tag == "weights"
    assert caught.value.needed == 300 * GIB
    assert 0 < (caught.value.free or 0) < 300 * GIB
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    tensor = fill(sleeper, "weights", 1)
    assert sleeper.tag_of(tensor) == "weights"
    assert sleeper.state is State.AWAKE


TEARDOWN = """
import gc, torch
from hal.core import SleepManager, BackupOptions
from hal.cuda.platform import CudaPlatform
sleeper = SleepManager(CudaPlatform(), backup=BackupOptions(backing="pinned"))
with sleeper.pool("weights"):
    weights = torch.ones(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with sleeper.graph_pool() as pool_id, torch.cuda.graph(graph, pool=pool_id):
    out = weights * 2
graph.replay()
def leak():
    with sleeper.pool("own"):
        return torch.ones(100, device="cuda")
{action}
print("end")
"""


ACTIONS = {
    "awake": "kept = leak()",
    "asleep": "sleeper.sleep(level=1)",
    "without its manager": "kept = leak(); del sleeper; gc.collect()",
}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_r46_r47_teardown_is_ordered_without_being_asked(
    run_python: RunPython, action: str
) -> None:
    with ThreadPoolExecutor() as together:
        runs = [together.submit(run_python, "-c", TEARDOWN.format(action=action)) for _ in range(7)]
    for run in runs:
        done = run.result()
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_r84_detection_makes_no_context_and_survives_a_fork(run_python: RunPython) -> None:
    code = """
import os, hal
platform = hal.detect()
assert platform.name == "cuda", platform
info = platform.get_memory_info()
assert info.total, info
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
pids = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
assert os.getpid() not in pids, pids
child = os.fork()
if child == 0:
    from hal.core import SleepManager, BackupOptions
    import torch
    sleeper = SleepManager(platform, backup=BackupOptions(backing="pinned"))
    with sleeper.pool("weights"):
        x = torch.ones(1000, device="cuda")
    sleeper.sleep(); sleeper.wake_up()
    os._exit(0 if bool((x == 1).all()) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("ok")
"""
    done = run_python("-c", code)
    assert done.stdout == "ok\n", done.stderr
