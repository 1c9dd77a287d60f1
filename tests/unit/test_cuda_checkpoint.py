"""What is known to stand against a checkpoint, and the helper process that makes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulator import emucuda
from hal.core.park_helper import ParkHelper
from hal.cuda import checkpoint
from hal.cuda.checkpoint import CudaCheckpoint, _Reader
from hal.errors import DriverError, Unsupported
from hal.helper_process import HelperLost
from hal.process_checkpoint import ProcessState

RunPython = Callable[..., subprocess.CompletedProcess[str]]
MAPPED = "7f0000000000-7f0000001000 rw-s 00000000 00:05 1 /dev/nvidia-uvm\n"


# ---- what is known in advance --------------------------------------------------------------------


class Cache(dict[int, object]):
    """torch's table of storages that other processes own."""

    def free_dead_references(self) -> None:
        self.pop(0, None)


class Group:
    """A process group of some ranks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def groups(*sizes: int, backend: str = "cpu:gloo,cuda:nccl") -> SimpleNamespace:
    """torch's module of process groups, with some of these sizes."""
    world = SimpleNamespace(pg_map={Group(size): None for size in sizes})
    return SimpleNamespace(
        is_initialized=lambda: True, _world=world, get_backend_config=lambda group: backend
    )


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str | None]:
    """Asks what stands against a checkpoint where these modules and mappings are there."""

    def ask(maps: str = "", **modules: Any) -> str | None:
        for name in ("torch.multiprocessing.reductions", "torch.distributed.distributed_c10d"):
            monkeypatch.delitem(sys.modules, name, raising=False)
            if (module := modules.get(name.rpartition(".")[2])) is not None:
                monkeypatch.setitem(sys.modules, name, module)
        (tmp_path / "maps").write_text(maps)
        monkeypatch.setattr(checkpoint, "_MAPS", tmp_path / "maps")
        return CudaCheckpoint({}).why_not_now()

    return ask


def test_an_ordinary_process_can_be_checkpointed(nothing_known: Callable[..., str | None]) -> None:
    assert nothing_known(MAPPED) is None
    dead = SimpleNamespace(shared_cache=Cache({0: "dead"}))
    assert nothing_known(reductions=dead) is None
    assert nothing_known(distributed_c10d=groups(1)) is None, "one rank shares no memory"
    assert nothing_known(distributed_c10d=groups(4, backend="cpu:gloo")) is None
    idle = SimpleNamespace(is_initialized=lambda: False)
    assert nothing_known(distributed_c10d=idle) is None


def test_what_shares_memory_between_processes_is_refused(
    nothing_known: Callable[..., str | None],
) -> None:
    shared = SimpleNamespace(shared_cache=Cache({0: "dead", 1: "alive"}))
    assert "1 storages of other processes" in (nothing_known(reductions=shared) or "")
    assert "NCCL" in (nothing_known(distributed_c10d=groups(1, 2)) or "")
    assert "managed memory" in (nothing_known(MAPPED * 2) or "")


def test_torch_still_has_what_is_asked_of_it() -> None:
    from torch.distributed import distributed_c10d
    from torch.multiprocessing import reductions

    assert callable(reductions.shared_cache.free_dead_references)
    assert len(reductions.shared_cache) == 0
    assert not distributed_c10d.is_initialized()
    assert callable(distributed_c10d.get_backend_config)
    assert list(distributed_c10d._world.pg_map) == []


def test_without_its_management_library_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.cuda.checkpoint._reader", _Reader())
    device = SimpleNamespace(facts=SimpleNamespace(device_uuid="GPU-1"))
    checkpoint = CudaCheckpoint({0: device})  # type: ignore[dict-item]
    for _ in range(2):  # by one reader
        info = checkpoint.memory()[0]
        assert info.free is None
        assert "NVML" in info.reason


def test_a_reader_that_ends_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = _Reader()
    monkeypatch.setattr("hal.cuda.checkpoint._reader", reader)
    checkpoint = CudaCheckpoint({0: SimpleNamespace(facts=SimpleNamespace(device_uuid=""))})  # type: ignore[dict-item]
    checkpoint.memory()
    first = reader._helper
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert "NVML" in checkpoint.memory()[0].reason
    second = reader._helper
    assert second is not None
    os.kill(second.pid, signal.SIGSTOP)  # so that it gives no answer, however fast it is
    monkeypatch.setattr("hal.cuda.checkpoint.ANSWERS_WITHIN", 0.1)
    assert "no answer" in checkpoint.memory()[0].reason
    assert not second.is_alive


# ---- the helper ----------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An emulated driver that can make no context, and a process of it: this one."""
    contexts = ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    monkeypatch.setenv("HAL_LIBCUDA", str(emucuda.build(hidden=contexts)))
    monkeypatch.setenv("EMUCUDA_PROCESSES", str(tmp_path))
    (tmp_path / str(os.getpid())).write_bytes(bytes(8))
    return tmp_path


@contextmanager
def helper() -> Iterator[ParkHelper]:
    started = ParkHelper(CudaCheckpoint({}).command())
    try:
        yield started
    finally:
        started.close()


def test_the_helper_leads_a_process_there_and_back_without_a_context(driver: Path) -> None:
    process = emucuda.EmulatedProcess(driver, os.getpid())
    with helper() as asked:
        assert asked.call("state", 30) is ProcessState.RUNNING
        assert asked.call("lock", 30, milliseconds=1000) is ProcessState.LOCKED
        assert asked.call("checkpoint", 30) is ProcessState.CHECKPOINTED
        with pytest.raises(DriverError, match="cuCheckpointProcessUnlock") as caught:
            asked.call("unlock", 30)
        assert caught.value.code == 401
        assert process.state == ProcessState.CHECKPOINTED
        assert asked.call("restore", 30) is ProcessState.LOCKED
        assert asked.call("unlock", 30) is ProcessState.RUNNING
        maps = Path(f"/proc/{asked.pid}/maps").read_text()
        assert "libemucuda" in maps
        assert "torch" not in maps
    assert not asked.is_alive


def test_a_helper_without_a_driver_says_so(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_LIBCUDA", str(driver / "libnothing.so"))
    with helper() as asked, pytest.raises(Unsupported, match="libnothing"):
        asked.call("state", 30)


def test_a_closed_or_killed_helper_is_lost(driver: Path) -> None:
    del driver
    with helper() as asked:
        asked.call("state", 30)
        os.kill(asked.pid, signal.SIGKILL)
        with pytest.raises(HelperLost):
            asked.call("state", 30)
    with pytest.raises(HelperLost):
        asked.call("state", 30)


OWNER = """
import json, os, subprocess, sys
helper = subprocess.Popen(
    [*json.loads(sys.argv[1]), str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
helper.stdout.readline()
keeper = os.fork()  # holds the helper's pipe open after its parent's end
if keeper == 0:
    sys.stdin.read()
    os._exit(0)
print(helper.pid, flush=True)
os._exit(0)
"""


def test_a_helper_ends_with_its_owner_even_when_a_child_holds_its_pipe(driver: Path) -> None:
    del driver
    command = json.dumps(list(CudaCheckpoint({}).command()))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin
    assert owner.stdout
    pid = int(owner.stdout.readline())
    assert owner.wait(60) == 0
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, "the helper outlives its owner"
        time.sleep(0.01)
    owner.stdin.close()
    owner.stdout.close()


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


LEAVES_PARKED = """
from emulator.platforms import EmulatedCudaPlatform
from hal.core import SleepManager, State, BackupOptions
import atexit, os, torch
from emulator.emucuda import EmulatedProcess
from pathlib import Path

process = EmulatedProcess(Path(os.environ["EMUCUDA_PROCESSES"]), os.getpid())
atexit.register(lambda: print("at the end", process.state, process.refused_calls))
sleeper = SleepManager(EmulatedCudaPlatform(), backup=BackupOptions(backing="anonymous"))
with sleeper.pool("weights"):
    weights = torch.ones(1 << 20)
sleeper.sleep(park=True)
print(process.state)
"""


def test_a_process_that_ends_parked_is_brought_back_first(
    run_python: RunPython, tmp_path: Path, root: Path
) -> None:
    path = os.pathsep.join([str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {"EMUCUDA_PROCESSES": str(tmp_path), "PYTHONPATH": path}
    done = run_python("-c", LEAVES_PARKED, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["2", "at the end 0 0"], done.stderr
