"""Which build of torch is installed, read from its files: torch itself is not imported."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

_NOT_TOOLKITS = frozenset({"__version__", "git_version"})


@dataclass(frozen=True)
class TorchBuild:
    """A torch installation; `toolkits` has what it was built for by `torch.version`'s names."""

    version: str
    toolkits: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it was built for in one word or two: "cpu", or for example "hip 7.2"."""
        return ", ".join(f"{name} {version}" for name, version in self.toolkits.items()) or "cpu"

    def __str__(self) -> str:
        return f"torch {self.version} (built for {self.kind})"


def torch_build() -> TorchBuild | None:
    """The torch that `import torch` would load; None when there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return read_version_file(Path(spec.origin).with_name("version.py"))


def read_version_file(path: Path) -> TorchBuild:
    """The build that a `torch/version.py` describes; "unknown" where it names no version."""
    values = _string_constants(path.read_text()) if path.is_file() else {}
    toolkits = {name: value for name, value in values.items() if name not in _NOT_TOOLKITS}
    return TorchBuild(values.get("__version__", "unknown"), toolkits)


def _string_constants(source: str) -> dict[str, str]:
    constants = {}
    for node in ast.parse(source).body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str() as value))
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str() as value))
            ):
                constants[name] = value
    return constants
