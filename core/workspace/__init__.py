"""Scratch that is reserved once, shared by kernels, and released while an engine sleeps."""

from hal.core.workspace.manager import WorkspaceManager
from hal.core.workspace.report import Reservation, WorkspaceReport
from hal.core.workspace.specs import ALIGNMENT, TensorSpec, total_bytes

__all__ = [
    "ALIGNMENT",
    "Reservation",
    "TensorSpec",
    "WorkspaceManager",
    "WorkspaceReport",
    "total_bytes",
]
