"""A function of a batch size, captured into graphs once and replayed from then on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.core.sleep import SleepManager


@dataclass(frozen=True)
class _Captured:
    """A graph and the tensor that each replay writes, in the graphs' pool."""

    graph: Any
    output: Tensor


class GraphRunner:
    """Replays `function(size)` from a graph a size, all captured into the manager's graph pool.

    Everything that the function reads and writes must keep its address. The result of a call is
    overwritten by the next call of that size.
    """

    def __init__(
        self,
        function: Callable[[int], Tensor],
        sizes: Iterable[int],
        sleeper: SleepManager,
        device: torch.device,
    ) -> None:
        self._captured: dict[int, _Captured] = {}
        # The largest first: the others then find room in what it gave back to the pool.
        for size in sorted(sizes, reverse=True):
            self._captured[size] = _capture(functools.partial(function, size), sleeper, device)

    def __call__(self, size: int) -> Tensor:
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output

    def outputs(self) -> dict[str, Tensor]:
        """The tensors that replays write, by size."""
        return {str(size): captured.output for size, captured in self._captured.items()}


def _capture(
    function: Callable[[], Tensor], sleeper: SleepManager, device: torch.device
) -> _Captured:
    torch_module, stream = torch.get_device_module(device), _capture_stream(device)
    _warm_up(function, torch_module, stream)
    # Every device module calls its class of graphs after the device type.
    graph = getattr(torch_module, f"{device.type.upper()}Graph")()
    with sleeper.graph_pool() as pool, torch_module.graph(graph, pool=pool, stream=stream):
        output = function()
    return _Captured(graph, output)


def _warm_up(function: Callable[[], Tensor], torch_module: Any, stream: Any) -> None:
    """Run once on the stream of the capture, so that what libraries make once a stream (scratch,
    loaded kernels) is neither captured nor in the graphs' pool.
    """
    outside = torch_module.current_stream(stream.device)
    stream.wait_stream(outside)
    with torch_module.stream(stream):
        function()
    outside.wait_stream(stream)


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    """One stream a device for all captures: libraries keep their scratch of a stream for ever."""
    return torch.get_device_module(device).Stream(device)
