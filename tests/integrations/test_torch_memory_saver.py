"""The drop-in for torch_memory_saver: regions, pauses, resumes, and what they keep."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import hal
from hal.core.integrations.torch_memory_saver import TorchMemorySaver
from hal.cpu.platform import CpuPlatform
from hal.platform import Capabilities, Flag, Platform
from recorded_graphs import RecordedGraph, RecordingPlatform, recorded_graphs  # noqa: F401 - a fixture
from support import MIB, TARGETS, Target, books, hold, large, pattern, release_held

Make = Callable[..., TorchMemorySaver]
_NAMES = {"cpu", "cpu-fifo", "cuda-emulated", "rocm-emulated", "xpu-emulated", "cuda"}
_TESTED = [t for t in TARGETS if t.name in _NAMES]
MODES = pytest.mark.parametrize("hook_mode", ["preload", "torch"])


@pytest.fixture(params=[pytest.param(t, id=t.name, marks=t.marks) for t in _TESTED])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with torch.device(request.param.device):
        yield request.param


@pytest.fixture
def platform(target: Target) -> Iterator[Platform]:
    made = target.make()
    yield made
    made.device().clear_faults()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A saver that nothing outside the test configures, and disk backups on a disk."""
    for name in ("INIT_ENABLE", "INIT_ENABLE_CPU_BACKUP", "RETAIN_CPU_BACKUP"):
        monkeypatch.delenv(f"TMS_{name}", raising=False)
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path))


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes savers, and leaves nothing of them asleep or in a pool's way at the end."""
    made: list[TorchMemorySaver] = []

    def make_saver(platform: Platform) -> TorchMemorySaver:
        made.append(TorchMemorySaver(platform=platform))
        return made[-1]

    yield make_saver
    for saver in made:
        saver.memory_margin_bytes = 0
        saver.resume()
    release_held()


@pytest.fixture
def saver(make: Make, platform: Platform) -> TorchMemorySaver:
    return make(platform)


def mapped(platform: Platform) -> int:
    return platform.device().counters().mapped_bytes


def filled(
    saver: TorchMemorySaver, seed: int, size: int | None = None, **region: object
) -> torch.Tensor:
    """A patterned tensor made in a region; the scratch to make it stays outside."""
    source = pattern(size or large(), seed)
    with saver.region(**region):  # type: ignore[arg-type]
        return hold(source.clone())


def has(tensor: torch.Tensor, seed: int) -> bool:
    return torch.equal(tensor, pattern(tensor.numel(), seed))


# -- scenarios


@MODES
def test_memory_goes_and_comes_back_at_its_address(
    saver: TorchMemorySaver, platform: Platform, hook_mode: str
) -> None:
    saver.hook_mode = hook_mode  # type: ignore[assignment]
    outside = torch.full((1000,), 100, dtype=torch.uint8)
    before = mapped(platform)
    tensor = filled(saver, 1)
    address, awake = tensor.data_ptr(), mapped(platform)
    assert awake - before >= tensor.nbytes
    saver.pause()
    assert mapped(platform) == before
    assert torch.all(outside == 100)
    saver.resume()
    assert mapped(platform) == awake
    assert tensor.data_ptr() == address
    tensor.fill_(7)
    assert torch.all(tensor == 7)


def test_one_tag_holds_what_is_kept_and_what_is_given_up(saver: TorchMemorySaver) -> None:
    kept = filled(saver, 1, enable_cpu_backup=True)
    given_up = filled(saver, 2, enable_cpu_backup=False)
    saver.pause()
    saver.resume()
    assert has(kept, 1)
    assert torch.all(given_up == 0)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_any_tag_wakes_alone(
    saver: TorchMemorySaver, platform: Platform, order: tuple[str, str]
) -> None:
    tensors = {tag: filled(saver, 3, tag=tag, enable_cpu_backup=True) for tag in ("a", "b")}
    other = filled(saver, 4, tag="kv_cache")
    awake = mapped(platform)
    saver.pause("a")
    saver.pause("b")
    assert has(other, 4)
    asleep = mapped(platform)
    saver.resume(order[0])
    assert asleep < mapped(platform) < awake
    assert has(tensors[order[0]], 3)
    saver.resume(order[1])
    assert mapped(platform) == awake
    assert has(tensors[order[1]], 3)


def test_r08_pausing_and_resuming_twice_does_nothing_more(
    saver: TorchMemorySaver, platform: Platform
) -> None:
    tensor = filled(saver, 5, enable_cpu_backup=True)
    assert sum(report.total_bytes for report in saver.pause()) >= tensor.nbytes
    asleep = platform.device().counters().as_dict()
    assert saver.pause() == ()
    assert saver.pause("default") == ()
    assert platform.device().counters().as_dict() == asleep
    saver.resume()
    awake = platform.device().counters().as_dict()
    assert saver.resume() == ()
    assert platform.device().counters().as_dict() == awake
    assert has(tensor, 5)


def test_a_tag_that_nobody_used_is_passed_over(saver: TorchMemorySaver) -> None:
    assert saver.pause("cuda_graph") == ()
    assert saver.resume("cuda_graph") == ()


def test_r09_a_tensor_freed_while_paused_is_freed_once(
    saver: TorchMemorySaver, platform: Platform
) -> None:
    before = books(platform)
    kept, freed = filled(saver, 6, enable_cpu_backup=True), filled(saver, 7, enable_cpu_backup=True)
    saver.pause()
    release_held()
    del freed
    saver.resume()
    assert has(kept, 6)
    del kept
    saver.pause()
    assert books(platform) == before
    saver.resume()


def test_small_tensors_share_a_segment_and_all_come_back(saver: TorchMemorySaver) -> None:
    sources = [pattern(size, size) for size in (1, 42, 1000, 4096, 70_000)]
    with saver.region(enable_cpu_backup=True):
        tensors = [hold(source.clone()) for source in sources]
    saver.pause()
    saver.resume()
    assert all(torch.equal(t, s) for t, s in zip(tensors, sources, strict=True))


def test_r36_r43_nested_regions_keep_their_own_tags(saver: TorchMemorySaver) -> None:
    """On every platform, whichever of two nested pools it would take."""
    outer, inner = pattern(large(), 8), pattern(large(), 9)
    with saver.region(tag="weights", enable_cpu_backup=True):
        first = hold(outer.clone())
        with saver.region(tag="grad_buffer"):
            buffer = hold(inner.clone())
        second = hold(outer.clone())
    saver.pause("grad_buffer")
    assert has(first, 8)
    assert has(second, 8)
    saver.resume("grad_buffer")
    assert torch.all(buffer == 0)
    saver.pause("weights")
    assert torch.all(buffer == 0)
    saver.resume("weights")
    assert has(first, 8)
    assert has(second, 8)


def test_disable_allocates_outside_and_the_region_goes_on(
    saver: TorchMemorySaver, platform: Platform
) -> None:
    source = pattern(large(), 10)
    with saver.region():
        before = mapped(platform)
        with saver.disable():
            outside = hold(source.clone())
        assert mapped(platform) == before
        inside = hold(source.clone())
        assert mapped(platform) >= before + inside.nbytes
    saver.pause()
    assert torch.equal(outside, source)


def test_disable_without_a_region_changes_nothing(saver: TorchMemorySaver) -> None:
    with saver.disable():
        tensor = hold(pattern(1000, 1))
    saver.pause()
    assert has(tensor, 1)


def test_a_region_in_which_its_tag_is_paused_goes_on_after_the_resume(
    saver: TorchMemorySaver, platform: Platform
) -> None:
    source = pattern(large(), 11)
    with saver.region(enable_cpu_backup=True):
        first = hold(source.clone())
        saver.pause()
        asleep = mapped(platform)
        hold(source.clone())  # outside: nothing can be allocated in what is paused
        assert mapped(platform) == asleep
        saver.resume()
        awake = mapped(platform)
        hold(source.clone())
        assert mapped(platform) > awake
    assert torch.equal(first, source)


def test_entering_a_paused_region_is_refused(saver: TorchMemorySaver) -> None:
    filled(saver, 1, tag="weights")
    saver.pause("weights")
    with pytest.raises(hal.AsleepError, match="weights"), saver.region(tag="weights"):
        pass


def test_r49_a_pause_while_another_thread_allocates_is_refused(
    saver: TorchMemorySaver, platform: Platform
) -> None:
    tensor = filled(saver, 12)
    inside, done = threading.Event(), threading.Event()

    def allocate() -> None:
        with saver.region():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(hal.StateError, match="scope"):
            saver.pause()
        assert has(tensor, 12)
    finally:
        done.set()
        thread.join()
    saver.pause()


# -- backups


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["enable_cpu_backup", "enable_disk_backup"])
def test_the_backup_of_a_paused_tensor_can_be_read(
    saver: TorchMemorySaver, dtype: torch.dtype, where: str
) -> None:
    source = torch.arange(6000).reshape(10, 20, 30).to(dtype)
    big = pattern(9 * MIB + 4096, 13)  # of several pieces, and a part of one
    with saver.region(**{where: True}):  # type: ignore[arg-type]
        tensor, whole = hold(source.clone()), hold(big.clone())
    assert saver.get_cpu_backup(tensor) is None
    part = whole[5 * MIB + 3 : -7]
    expected, source = big.cpu(), source.cpu()
    saver.pause()
    backup = saver.get_cpu_backup(tensor, zero_copy=True)
    assert backup is not None
    assert backup.device.type == "cpu"
    assert backup.dtype == dtype
    assert torch.equal(backup, source)
    read = saver.get_cpu_backup(whole)
    assert read is not None
    assert torch.equal(read, expected)
    read = saver.get_cpu_backup(part)
    assert read is not None
    assert torch.equal(read, expected[5 * MIB + 3 : -7])
    saver.resume()
    assert torch.equal(tensor.cpu(), source)
    assert saver.get_cpu_backup(tensor) is None


def test_a_backup_that_is_not_there_is_told(saver: TorchMemorySaver) -> None:
    given_up, outside = filled(saver, 14), hold(pattern(1000, 15))
    saver.pause()
    with pytest.raises(hal.StateError, match="enable_cpu_backup=True"):
        saver.get_cpu_backup(given_up)
    assert saver.get_cpu_backup(outside) is None
    assert saver.get_cpu_backup(torch.empty(0)) is None


def test_the_backup_of_what_has_gaps_or_is_elsewhere_is_refused(saver: TorchMemorySaver) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        saver.get_cpu_backup(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ValueError, match="meta"):
        saver.get_cpu_backup(torch.zeros(4, device="meta"))


def test_a_corrupted_backup_is_never_handed_out(
    saver: TorchMemorySaver, platform: Platform
) -> None:
    tensor = filled(saver, 16, enable_disk_backup=True)
    saver.pause()
    segment = next(s for s in platform.device().segments() if s.backup_bytes)
    platform.device().flip_backup_bit(segment.address, 12345)
    with pytest.raises(hal.BackupCorrupted):
        saver.get_cpu_backup(tensor)
    platform.device().flip_backup_bit(segment.address, 12345)
    saver.resume()
    assert has(tensor, 16)


def test_retained_backups_stay_readable_after_a_resume(
    saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = filled(saver, 17, enable_cpu_backup=True)
    expected = tensor.cpu().clone()
    assert not saver.retain_cpu_backup
    saver.retain_cpu_backup = True
    saver.pause()
    saver.resume()
    tensor.fill_(9)
    backup = saver.get_cpu_backup(tensor)
    assert backup is not None
    assert torch.equal(backup, expected)
    saver.pause()
    saver.retain_cpu_backup = False
    saver.resume()
    assert torch.all(tensor == 9)
    assert saver.get_cpu_backup(tensor) is None


def test_host_memory_goes_at_the_resume_unless_it_is_retained(saver: TorchMemorySaver) -> None:
    tensor = filled(saver, 28, enable_cpu_backup=True)
    sleeper = saver._started().of(cpu=True, disk=False, backend=None).sleeper
    saver.pause()
    assert sleeper.held_bytes >= tensor.nbytes
    saver.resume()
    assert sleeper.held_bytes == 0
    saver.retain_cpu_backup = True
    saver.pause()
    saver.resume()
    assert sleeper.held_bytes >= tensor.nbytes
    saver.retain_cpu_backup = False
    saver.pause()
    saver.resume()
    assert sleeper.held_bytes == 0
    assert has(tensor, 28)


def test_disk_backups_without_a_directory_lie_on_a_disk(
    saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TMS_DISK_BACKUP_DIR")
    monkeypatch.setenv("HAL_BACKUP_DIR", str(tmp_path / "made"))
    tensor = filled(saver, 29, enable_disk_backup=True)
    assert (tmp_path / "made").is_dir()
    saver.pause()
    saver.resume()
    assert has(tensor, 29)


def test_disk_backups_leave_no_file_behind_and_do_not_grow(
    saver: TorchMemorySaver, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "backups"
    saver.set_disk_backup_dir(str(folder))
    tensor = filled(saver, 18, enable_disk_backup=True)
    for _ in range(3):
        reports = saver.pause()
        assert sum(report.total_bytes for report in reports) >= tensor.nbytes
        assert list(folder.iterdir()) == []  # nameless: a process that dies leaves nothing
        saver.resume()
        assert has(tensor, 18)


# -- failures


def test_r66_a_pause_without_room_for_the_backup_pauses_nothing(
    saver: TorchMemorySaver, platform: Platform
) -> None:
    kept, given_up = filled(saver, 19, enable_cpu_backup=True), filled(saver, 20)
    on_disk = filled(saver, 21, enable_disk_backup=True)
    awake = books(platform)
    platform.device().fail("arena grow", nth=2, code=12)
    with pytest.raises(hal.HostMemoryError):
        saver.pause()
    assert books(platform) == awake
    assert has(kept, 19)
    assert has(given_up, 20)
    assert has(on_disk, 21)
    saver.pause()
    saver.resume()
    assert has(kept, 19)
    assert has(on_disk, 21)


def test_r13_a_resume_that_does_not_fit_stays_paused_and_can_be_repeated(
    saver: TorchMemorySaver, platform: Platform, target: Target
) -> None:
    kept = filled(saver, 22, enable_cpu_backup=True)
    on_disk, given_up = filled(saver, 23, enable_disk_backup=True), filled(saver, 24)
    saver.pause()
    asleep = books(platform)
    third = pieces(kept, platform) + pieces(on_disk, platform) + 1
    platform.device().fail("create", nth=third, code=target.out_of_memory)
    with pytest.raises(hal.OutOfDeviceMemory):
        saver.resume()
    assert books(platform) == asleep
    platform.device().clear_faults()
    saver.resume()
    assert has(kept, 22)
    assert has(on_disk, 23)
    assert torch.all(given_up == 0)


def pieces(tensor: torch.Tensor, platform: Platform) -> int:
    """How many pieces of physical memory a tensor's segment has."""
    chunk = platform.device().facts.chunk or (1 << 62)
    return max(1, -(-tensor.nbytes // chunk))


def test_a_margin_of_device_memory_is_left_free(make: Make, target: Target) -> None:
    target.require("capacity")
    platform = target.make(capacity=64 * MIB)
    saver = make(platform)
    filled(saver, 1, 4 * MIB)
    if not platform.capabilities.free_is_truthful:
        with pytest.raises(NotImplementedError):
            saver.memory_margin_bytes = 8 * MIB
        return
    saver.memory_margin_bytes = platform.device().memory()[0] - 8 * MIB
    assert saver.memory_margin_bytes > 0
    filled(saver, 2, 4 * MIB)
    for region in ({}, {"tag": "another", "enable_cpu_backup": True}):
        with pytest.raises(hal.OutOfDeviceMemory, match="margin"), saver.region(**region):  # type: ignore[arg-type]
            torch.empty(16 * MIB, dtype=torch.uint8)
    saver.pause()
    saver.resume()  # a resume takes what the pause gave
    saver.memory_margin_bytes = 0
    with saver.region():
        torch.empty(16 * MIB, dtype=torch.uint8)


def test_a_margin_without_a_figure_of_free_memory_is_refused(make: Make) -> None:
    class Frozen(CpuPlatform):
        def _capabilities(self, index: int) -> Capabilities:
            found = vars(super()._capabilities(index))
            return Capabilities(**{**found, "free_is_truthful": Flag(False, "it never moves")})

    saver = TorchMemorySaver(platform=Frozen())
    with pytest.raises(NotImplementedError, match="it never moves") as caught:
        saver.memory_margin_bytes = 1 << 30
    assert isinstance(caught.value, hal.Unsupported)
    assert saver.memory_margin_bytes == 0


# -- arguments


SIGNATURES = {
    "region": {
        "tag": "default",
        "enable_cpu_backup": False,
        "enable_disk_backup": False,
        "cpu_backup_backend": None,
    },
    "cuda_graph": {
        "cuda_graph": inspect.Parameter.empty,
        "pool": None,
        "stream": None,
        "capture_error_mode": "global",
        "tag": "default",
        "enable_cpu_backup": False,
        "cpu_backup_backend": None,
    },
    "disable": {},
    "pause": {"tag": None},
    "resume": {"tag": None},
    "get_cpu_backup": {"x": inspect.Parameter.empty, "zero_copy": False},
    "set_disk_backup_dir": {"path": inspect.Parameter.empty},
}
"""Of torch_memory_saver 0.0.10: the parameters of each method and their defaults."""
SETTINGS = {"enabled", "hook_mode", "memory_margin_bytes", "retain_cpu_backup"}


def test_the_public_names_are_those_of_the_original() -> None:
    public = {name for name in vars(TorchMemorySaver) if not name.startswith("_")}
    assert public == SIGNATURES.keys() | SETTINGS
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(TorchMemorySaver, name)).parameters
        assert {n: p.default for n, p in parameters.items() if n != "self"} == expected
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cpu_backup_backend": "mmap"}, "requires enable_cpu_backup=True"),
        ({"enable_cpu_backup": True, "enable_disk_backup": True}, "mutually exclusive"),
        ({"enable_cpu_backup": True, "cpu_backup_backend": "shm"}, "'mmap' or 'pinned'"),
        ({"tag": ""}, "tag"),
    ],
)
def test_options_that_do_not_go_together_are_value_errors(
    saver: TorchMemorySaver, options: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text), saver.region(**options):  # type: ignore[arg-type]
        pass
    assert saver.pause() == ()


def test_r71_a_backend_that_is_not_there_is_refused_and_never_replaced(make: Make) -> None:
    saver = make(CpuPlatform())
    with (
        pytest.raises(ValueError, match="'pinned' is not supported on cpu"),
        saver.region(enable_cpu_backup=True, cpu_backup_backend="pinned"),
    ):
        pass
    with saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
        tensor = hold(pattern(MIB, 25))
    saver.pause()
    saver.resume()
    assert has(tensor, 25)


def test_the_hook_mode_is_one_of_two_and_set_before_use(saver: TorchMemorySaver) -> None:
    with pytest.raises(ValueError, match="'preload' or 'torch'"):
        saver.hook_mode = "other"  # type: ignore[assignment]
    saver.hook_mode = "torch"
    assert saver.hook_mode == "torch"
    assert saver.enabled
    saver.pause()
    with pytest.raises(hal.StateError, match="before its first use"):
        saver.hook_mode = "preload"


# -- variables


def test_a_process_that_is_enabled_from_the_start_needs_no_region(
    make: Make, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    monkeypatch.setenv("TMS_INIT_ENABLE_CPU_BACKUP", "true")
    saver, source = make(platform), pattern(large(), 26)
    try:
        before = mapped(platform)
        saver.memory_margin_bytes = 0  # the first use
        weights = hold(source.clone())
        with saver.region(tag="grad_buffer"):
            buffer = hold(source.clone())
        assert mapped(platform) >= before + 2 * weights.nbytes
        saver.pause()
        assert mapped(platform) == before
        with saver.disable():
            outside = hold(torch.full((1000,), 53, dtype=torch.uint8))
            assert bool((outside == 53).all())
        saver.resume()
        after = mapped(platform)
        more = hold(source.clone())
        assert mapped(platform) >= after + more.nbytes
        saver.pause()
        saver.resume()
        assert torch.equal(weights, source)
        assert torch.equal(more, source)
        assert torch.all(buffer == 0)
    finally:
        saver._for_good.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TMS_INIT_ENABLE", "maybe"),
        ("TMS_RETAIN_CPU_BACKUP", "2"),
        ("TMS_INIT_CPU_BACKUP_BACKEND", "shm"),
    ],
)
def test_a_variable_with_a_value_that_it_does_not_take_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    saver = TorchMemorySaver(platform=CpuPlatform())
    with pytest.raises(ValueError, match=value):
        saver.pause()
    monkeypatch.delenv(name)
    assert saver.pause() == ()


def test_retention_can_be_asked_for_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", "1")
    assert TorchMemorySaver(platform=CpuPlatform()).retain_cpu_backup


# -- graphs


def test_r54_graphs_need_no_preloaded_hook_or_are_refused_with_the_reason(saver, target) -> None:  # type: ignore[no-untyped-def]
    if target.device == "cuda":
        pytest.skip("graphs of a device have tests of their own")
    with pytest.raises(hal.Unsupported, match="graph"), saver.cuda_graph(RecordedGraph()):
        pass


def test_graphs_of_one_pool_share_it_and_others_do_not(  # type: ignore[no-untyped-def]
    make: Make,
    recorded_graphs,  # noqa: F811
) -> None:
    saver = make(RecordingPlatform())
    weights = filled(saver, 27, 1 << 16, tag="weights", enable_cpu_backup=True).float()
    pools: list[object] = []
    outputs = []
    graphs = [RecordedGraph() for _ in range(3)]
    for graph, pool in zip(graphs, ("shared", "shared", None), strict=True):
        with saver.cuda_graph(graph, pool=pool, tag="graphs", enable_cpu_backup=True):
            outputs.append(hold(weights * 2))
            found = saver._started().holding(outputs[-1])
        assert found is not None
        segments = found[0]._pools.segments("graphs")
        address = outputs[-1].data_ptr()
        pools.append(next(s.pool for s in segments if s.address <= address < s.end))
    assert pools[0] == pools[1] != pools[2]
    saver.pause("graphs")
    saver.resume("graphs")
    for output, graph in zip(outputs, graphs, strict=True):
        output.zero_()
        graph.replay()
        assert torch.equal(output, weights * 2)
