"""Device graphs on the host: operators are recorded and run again on the same memory.

A capture refuses what a device's capture refuses, host data and reads of device memory, so an
engine that records here can be captured there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hal.cpu.platform import CpuPlatform
from hal.host_pool import HostPool
from hal.platform import Capabilities, Flag

_aten = torch.ops.aten
_REFUSED = {
    _aten.lift_fresh.default: "host data enters the graph",
    _aten._local_scalar_dense.default: "the host reads a value of the graph",
    _aten.nonzero.default: "the size of a tensor depends on values",
}


class RecordedGraph:
    """Operators with their arguments and results; `replay` writes the same results again."""

    replays = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def replay(self) -> None:
        RecordedGraph.replays += 1
        with torch.inference_mode():
            for function, arguments, keywords, result in self.calls:
                again = function(*arguments, **keywords)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _REFUSED:
            raise RuntimeError(f"not while a graph is captured: {_REFUSED[func]}")
        result = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, result))
        return result


@contextmanager
def _record(
    graph: RecordedGraph, *, pool: Any, stream: Any, capture_error_mode: str = "global"
) -> Iterator[None]:
    with _Recorder(graph):
        yield


class _GraphPool(HostPool):
    """A host pool into which graphs can be recorded."""

    @contextmanager
    def _capture(self) -> Iterator[tuple[int, int]]:
        with self._scope():
            yield 0, self.id


class RecordingPlatform(CpuPlatform):
    """The host as a device with graphs."""

    def create_pool(self, tag: str, device: int = 0) -> HostPool:
        return _GraphPool(self.device(device), tag, self._scopes)

    def _capabilities(self, index: int) -> Capabilities:
        found = super()._capabilities(index)
        return Capabilities(**{**vars(found), "graph_pools": Flag(True)})


@pytest.fixture
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraph]:
    """torch's module of the host device, with graphs; their class counts all replays."""
    stream = SimpleNamespace(device="cpu", wait_stream=lambda other: None)
    module = SimpleNamespace(
        CPUGraph=RecordedGraph,
        graph=_record,
        Stream=lambda device: stream,
        stream=lambda chosen: nullcontext(),
        current_stream=lambda device: stream,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    return RecordedGraph
