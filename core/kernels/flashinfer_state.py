"""The state that FlashInfer keeps between calls in buffers of its own, made right after a wake.

Its top-k functions keep row states (histograms, counters, an arrival counter on which blocks wait)
that have to be zero when a launch begins: other bytes give wrong rows from then on, or a kernel
that never ends. Other buffers in the same tables are constants, which must not be zeroed but
written again. The rest is scratch that a launch writes before it reads.

Releases differ in where they are: up to 0.7.2 one buffer a name and device in whatever pool was
open at the first call, shared by all graphs; from 0.7.4 on one a stream in a pool of FlashInfer's
own, and memory of the graph's own under a capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal.core.workspace import WorkspaceManager

if TYPE_CHECKING:
    from hal.core.sleep import SleepManager

TABLES = ("_cache_buf", "_stream_cache_buf")
"""Of `flashinfer.utils`: tuples that begin with a name -> the buffer."""
RETIRED = "_cache_buf_retired"
"""Of `flashinfer.utils`: buffers that grew, which captured graphs still hold."""
_RANGE, _SLOPES = "range_", "alibi_slopes_"


def row_states() -> list[Tensor]:
    """The buffers that have to be zero between launches, of every device and stream."""
    named = [buffer for name, buffer in _entries() if "row_states" in name]
    return named + list(getattr(_utils(), RETIRED, ()))


def adopt_state(workspace: WorkspaceManager, sleeper: SleepManager | None = None) -> None:
    """Count FlashInfer's row states in the workspace's report, and repair its state in each wake.

    With `sleeper` that is each of its wakes, and buffers whose tag still sleeps wait for theirs;
    without, each of the workspace's. Call it once, at any time.
    """
    if sleeper is None:
        workspace.adopt("FlashInfer's row states", row_states, on_wake=repair_state)
        return

    def is_awake(buffer: Tensor) -> bool:
        return sleeper.tag_of(buffer) not in sleeper.sleeping_tags

    workspace.adopt("FlashInfer's row states", row_states)
    sleeper.after_wake(lambda: repair_state(is_awake), name="FlashInfer's state")


def repair_state(is_there: Callable[[Tensor], bool] = lambda buffer: True) -> None:
    """Zero the row states and write the constants again, of buffers that have memory; right at any
    time between launches.
    """
    for buffer in filter(is_there, row_states()):
        buffer.zero_()
    for name, buffer in _entries():
        if (constant := _constant(name, buffer)) is not None and is_there(buffer):
            buffer.copy_(constant)


def _constant(name: str, buffer: Tensor) -> Tensor | None:
    """What a buffer of constants holds; None for one of another kind."""
    if name.startswith(_RANGE):
        return torch.arange(len(buffer), dtype=buffer.dtype, device=buffer.device)
    if name.startswith(_SLOPES):
        slopes: Tensor = _utils().get_alibi_slopes(len(buffer), device=buffer.device)
        return slopes
    return None


def _entries() -> Iterator[tuple[str, Tensor]]:
    for table in TABLES:
        yield from ((key[0], buffer) for key, buffer in getattr(_utils(), table, {}).items())


def _utils() -> Any:
    """FlashInfer's tables, if it is in use: nothing is kept by what was never imported."""
    return sys.modules.get("flashinfer.utils")
