"""Which class vLLM resolves, and what reaches our allocator, on each vendor and with others about.

vLLM's accelerator modules import what only their own builds have; here modules without contents
stand for those, named in `STAND_INS`, and emulated devices for the hardware.
"""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import ROOT, RunPython
from hal.core.integrations.vllm import installation, plugin, versions
from hal.core.integrations.vllm.vendors import VENDORS
from hal.errors import StateError, Unsupported
from support import needs_level_zero

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm has its own environment")

STAND_INS = {
    "cuda": ["vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"],
    "rocm": ["vllm._C_stable_libtorch", "vllm._rocm_C"],
    "xpu": ["vllm_xpu_kernels"],
}
CLASSES = {"cuda": "CudaPlatform", "rocm": "RocmPlatform", "xpu": "XPUPlatform"}
PROGRAM = """
import json, os, sys, types
from types import SimpleNamespace as Namespace
vendor, stand_ins, base, tests = json.loads(sys.argv[1])
sys.path.insert(0, tests)
import importlib.machinery
class StandIn(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
class StandIns:
    def find_spec(self, name, path=None, target=None):
        if any(name == known or name.startswith(known + ".") for known in stand_ins):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return StandIn(spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, StandIns())
import torch
properties = Namespace(
    gcnArchName="gfx942", major=8, minor=0, total_memory=1 << 30, multi_processor_count=8, name="",
)
torch.cuda.get_device_properties = lambda *_: properties
torch.accelerator.empty_cache = lambda: None
import vllm.platforms as platforms
for name in platforms.builtin_platform_plugins:
    target = f"vllm.platforms.{vendor}.{base}" if name == vendor else None
    platforms.builtin_platform_plugins[name] = lambda target=target: target
current = platforms.current_platform
ours = type(current)
found = {
    "class": ours.__name__, "enum": current._enum.name, "is_out_of_tree": current.is_out_of_tree(),
}

import hal
import emulator.platforms as emulated
from hal.core.integrations.vllm import installation, scratch
from vllm.device_allocator import cumem, get_mem_allocator_instance, xpumem
cumem.cumem_available = xpumem.xpumem_available = True
names = {"cuda": "Cuda", "rocm": "Rocm", "xpu": "Xpu"}
device = getattr(emulated, f"Emulated{names[vendor]}Platform")()
hal.detect = lambda name=None: device
stock_worker = f"vllm.v1.worker.{'xpu' if vendor == 'xpu' else 'gpu'}_worker"
stock_worker += ".XPUWorker" if vendor == "xpu" else ".Worker"
def stock_check(cls, config):
    config.parallel_config.worker_cls = stock_worker
ours.__mro__[2].check_and_update_config = classmethod(stock_check)

def config_for(backend):
    from vllm.config import CUDAGraphMode
    model = Namespace(
        enable_sleep_mode=True, sleep_mode_backend=backend, enable_cumem_allocator=True,
        sleep_mode_offload_cudagraph=True, hf_text_config=Namespace(),
    )
    return Namespace(
        model_config=model, additional_config={}, speculative_config=None,
        parallel_config=Namespace(worker_cls="auto", decode_context_parallel_size=1),
        compilation_config=Namespace(cudagraph_mode=CUDAGraphMode.FULL),
    )

stock = config_for("cumem")
ours.check_and_update_config(stock)
found["stock"] = {
    "worker": stock.parallel_config.worker_cls == stock_worker,
    "allocators": [cumem.CuMemAllocator.instance, xpumem.XpuMemAllocator.instance],
    "variables": [name for name in os.environ if name.startswith("HAL_VLLM")],
    "open devices": list(device._devices),
}
config = config_for("hal")
ours.check_and_update_config(config)
allocator = get_mem_allocator_instance()
from vllm.config import VllmConfig
found["ours"] = {
    "allocator": type(allocator).__name__,
    "worker": config.parallel_config.worker_cls,
    "graphs sleep": bool(VllmConfig.use_cumem_cudagraph_pool.fget(config)),
    "stock rule": bool(VllmConfig.use_cumem_cudagraph_pool.fget(config_for("cumem"))),
    "open devices": list(device._devices),
}

from vllm import _custom_ops
from vllm.utils.import_utils import resolve_obj_by_qualname
for name in [name for name in vars(_custom_ops) if "_support" in name]:
    setattr(_custom_ops, name, lambda *_: False)
from vllm.v1.worker import gpu_worker, workspace
Worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
found["base"] = [c.__module__ + "." + c.__name__ for c in Worker.__mro__].index(stock_worker) > 0
gpu_worker.ensure_kv_transfer_initialized = lambda *_: None
gpu_worker.has_kv_transfer_group = lambda: False
worker = object.__new__(Worker)
worker.vllm_config, worker.cache_config = config, Namespace()
made = {}
def tensor(name):
    made[name] = torch.empty(1 << 20, dtype=torch.uint8)
with worker._maybe_get_memory_pool_context("weights"):
    tensor("weights")
class Runner:
    def initialize_kv_cache(self, kv_cache_config, kv_cache_allocation_context):
        tensor("state before")
        with kv_cache_allocation_context:
            tensor("cache")
        tensor("state after")
worker.model_runner = Runner()
worker.initialize_from_config(Namespace(
    num_blocks=1, kv_cache_layout=None, hash_block_size=16, cache_hit_alignment_tokens=16,
    needs_kv_cache_zeroing=False,
))
workspace.init_workspace_manager(
    torch.device("cpu"), 1, alloc_context=lambda: worker._maybe_get_memory_pool_context("workspace")
)
[made["scratch"]] = workspace.current_workspace_manager().get_simultaneous(((64,), torch.float32))
found["tags"] = {name: allocator.manager.tag_of(value) for name, value in made.items()}
made["weights"].fill_(7)
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as Factory
from vllm.plugins import load_general_plugins
load_general_plugins()
backend = Factory.create_backend(config.model_config)
backend.suspend(1)
found["asleep"] = sorted(allocator.sleeping_tags)
backend.resume()
found["woken"] = bool((made["weights"] == 7).all())
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "vendor",
    ["cuda", "rocm", pytest.param("xpu", marks=needs_level_zero())],
)
def test_each_vendor_has_our_class_and_every_pool_reaches_our_allocator(
    run_python: RunPython, vendor: str
) -> None:
    settings = [vendor, STAND_INS[vendor], CLASSES[vendor], str(ROOT / "tests")]
    result = run_python("-c", PROGRAM, json.dumps(settings), timeout=220)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    outside = vendor == "xpu"  # the outermost pool would win there
    assert found == {
        "class": VENDORS[vendor].platform_class,
        "enum": vendor.upper(),
        "is_out_of_tree": False,
        "stock": {
            "worker": True,
            "allocators": [None, None],
            "variables": [],
            "open devices": [],
        },
        "ours": {
            "allocator": "HalMemAllocator",
            "worker": "hal.core.integrations.vllm.worker.HalWorker",
            "graphs sleep": not outside,
            "stock rule": not outside,
            "open devices": [],
        },
        "base": True,
        "tags": {
            "weights": "weights",
            "state before": None if outside else "runtime",
            "cache": "kv_cache",
            "state after": None if outside else "runtime",
            "scratch": "workspace",
        },
        "asleep": sorted(
            {"weights", "kv_cache", "workspace"} | (set() if outside else {"runtime"})
        ),
        "woken": True,
    }


# -- beside other plugins


class Point(SimpleNamespace):
    """An entry point of another package."""

    def load(self) -> Any:
        return self.function


def with_points(monkeypatch: pytest.MonkeyPatch, *functions: Any) -> None:
    points = [Point(name=f"p{n}", value="other:f", function=f) for n, f in enumerate(functions)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)


def test_alone_on_the_host_the_class_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with_points(monkeypatch)
    assert plugin.platform() == "hal.core.integrations.vllm.platforms.HalCpuPlatform"


def test_another_packages_platform_owns_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with_points(monkeypatch, lambda: "other.Platform")
    assert plugin.platform() is None


def test_another_packages_plugin_that_is_not_for_here_or_fails_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_points(monkeypatch, lambda: None, lambda: 1 / 0)
    assert plugin.platform() == "hal.core.integrations.vllm.platforms.HalCpuPlatform"


def test_a_platform_that_is_not_allowed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with_points(monkeypatch, lambda: "other.Platform")
    monkeypatch.setenv("VLLM_PLUGINS", "hal")
    assert plugin.platform() == "hal.core.integrations.vllm.platforms.HalCpuPlatform"


def test_vllms_own_sleep_mode_is_refused_on_the_host_as_ever() -> None:
    from hal.core.integrations.vllm import platforms

    model = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem")
    config = SimpleNamespace(model_config=model, additional_config={})
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        platforms.HalCpuPlatform.check_and_update_config(config)


def test_the_backend_without_the_platform_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.core.integrations.vllm.backend import HalBackend

    monkeypatch.setattr(installation, "_installed", None)
    with pytest.raises(StateError, match="VLLM_PLUGINS"):
        HalBackend()


# -- versions


def test_the_installed_version_was_tested_and_has_what_is_needed() -> None:
    assert versions.installed() in {tested.version for tested in versions.TESTED}
    for vendor in VENDORS.values():
        assert versions.missing(vendor) == []


def test_the_page_names_the_tested_versions() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    for tested in versions.TESTED:
        assert f"| {tested.version} | {tested.package} | {tested.where} |" in page


def test_another_version_is_told_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: "9.9.9")
    monkeypatch.setattr(versions.logger(), "propagate", True)
    versions.require_known(VENDORS["cpu"])
    assert "9.9.9 was not tested" in caplog.text
    lacking = "vllm.v1.worker.gpu_worker:Worker.levitate"
    monkeypatch.setattr(versions, "NEEDS", (*versions.NEEDS, lacking))
    with pytest.raises(Unsupported, match="levitate"):
        versions.require_known(VENDORS["cpu"])
