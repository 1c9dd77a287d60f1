"""The helpers that launchers of training actors use."""

from pathlib import Path

from hal.core.integrations.torch_memory_saver.install import changed_environment as change_env
from hal.native import library_path

__all__ = ["change_env", "get_binary_path_from_package"]


def get_binary_path_from_package(stem: str) -> Path:  # noqa: ARG001 - one library serves all stems
    """A library that may stand in `LD_PRELOAD`, where it does nothing: no hook is needed."""
    return library_path()
