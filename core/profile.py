"""What an engine needs beside its KV cache, measured, so that a cache sized from it fits.

An engine finds its KV budget by running its largest step once and seeing what is left. What that
step does not run is missed: scratch that a kernel takes on its first long prefill only. Scratch
that was reserved in the workspace is part of the measure, whether the step asks for it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hal.core.appearances import Appearances
from hal.core.sleep import SleepManager
from hal.core.tags import CUDAGRAPH, KV_CACHE, RUNTIME, WEIGHTS, WORKSPACE, Policy
from hal.errors import StateError


@dataclass(frozen=True)
class MemoryProfile:
    """Device memory by what it is for, in bytes; `rest` is None where nobody can tell, and why."""

    weights: int
    runtime: int
    workspace: int
    graphs: int
    """The pool of captured graphs, as it is: no estimate."""
    other_tags: int
    activation: int
    """The most that the run had in memory outside the pools at once, beside what was there."""
    rest: int | None
    """Context, modules, libraries' own memory, and what the engine keeps outside the pools."""
    rest_reason: str = ""

    @property
    def pools(self) -> int:
        """What all tags but the KV cache hold."""
        return self.weights + self.runtime + self.workspace + self.graphs + self.other_tags

    def needed(self, *, graphs: int | None = None, rest: int | None = None) -> int:
        """What everything but the KV cache takes at its peak.

        `graphs` stands for graphs that are captured later; `rest` for what could not be measured,
        and is required then (`StateError`).
        """
        beside = self.rest if rest is None else rest
        if beside is None:
            raise StateError(
                f"memory outside torch and the pools is unknown ({self.rest_reason}); give rest="
            )
        captured = self.graphs if graphs is None else graphs
        return self.pools - self.graphs + captured + self.activation + beside

    def kv_budget(self, limit: int, *, graphs: int | None = None, rest: int | None = None) -> int:
        """Bytes that are left for the KV cache of what the process may use; 0 when nothing is."""
        return max(0, limit - self.needed(graphs=graphs, rest=rest))


def profile_memory(
    sleeper: SleepManager,
    run: Callable[[], object],
    *,
    capture: Callable[[], object] | None = None,
) -> MemoryProfile:
    """Measure one run of the largest step, and then of a capture, on a sleeper's device.

    Reserve every kernel's scratch first: what `run` does not reach is only in the measure if it is
    in the workspace. The KV cache is not part of it, whether it is there already or not.
    """
    sleeper.require_awake()
    before = _mapped_by_tag(sleeper)
    with peak_outside_pools(sleeper) as peak:
        run()
    kept = sum(_mapped_by_tag(sleeper).values()) - sum(before.values())
    activation = peak() if sleeper.platform.device_type == "cpu" else max(0, peak() - kept)
    if capture is not None:
        capture()
    return _profile(sleeper, activation)


def _profile(sleeper: SleepManager, activation: int) -> MemoryProfile:
    tags = _mapped_by_tag(sleeper)
    named = {tag: tags.pop(tag, 0) for tag in (WEIGHTS, RUNTIME, WORKSPACE, CUDAGRAPH, KV_CACHE)}
    rest, reason = _rest(sleeper)
    return MemoryProfile(
        weights=named[WEIGHTS],
        runtime=named[RUNTIME],
        workspace=named[WORKSPACE],
        graphs=named[CUDAGRAPH],
        other_tags=sum(tags.values()),
        activation=activation,
        rest=rest,
        rest_reason=reason,
    )


def _mapped_by_tag(sleeper: SleepManager) -> dict[str, int]:
    everything: Mapping[str, Policy] = dict.fromkeys(sleeper.tags, Policy.DISCARD)
    return {plan.tag: plan.bytes for plan in sleeper.plan_sleep(policy=everything).tags}


def _rest(sleeper: SleepManager) -> tuple[int | None, str]:
    """What the process holds beside the pools and torch's cache, which the next step uses again."""
    index = sleeper.device_index
    info = sleeper.platform.get_memory_info(index)
    if info.process_used is None:
        return None, info.reason
    usage = sleeper.platform.torch_usage(index)
    cached = usage.cached if usage is not None else 0
    mapped = sleeper.platform.device(index).counters().mapped_bytes
    return max(0, info.process_used - mapped - cached), info.reason


@contextmanager
def peak_outside_pools(sleeper: SleepManager) -> Iterator[Callable[[], int]]:
    """Yield a function that tells by how many bytes memory grew at most since then.

    On an accelerator it is the growth of torch's reserved memory, the pools' included, since that
    is what the device loses; on the host, of the storages that are in no pool.
    """
    if sleeper.platform.device_type == "cpu":
        with Appearances(lambda tensor: sleeper.tag_of(tensor) is None) as made:
            yield lambda: made.peak
        return
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(sleeper.device_index)
    before = torch.accelerator.memory_reserved(sleeper.device_index)
    yield lambda: torch.accelerator.max_memory_reserved(sleeper.device_index) - before
