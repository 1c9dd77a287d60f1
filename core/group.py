"""Transitions of several ranks as one: each learns whether the others did it, and who is late."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from hal.errors import BusyError, GroupError, HalError

T = TypeVar("T")


class RankGroup:
    """The ranks of one engine, over a torch process group whose tensors are in host memory (gloo).

    Every rank makes the same calls in the same order. `timeout` is how many seconds a rank may be
    behind the others before `BusyError` names it; this rank then stays as its own transition left
    it, and the same call may be made again.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout)

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def failures(self, transition: str, own: BaseException | None) -> dict[int, str]:
        """The ranks on which the transition failed, with their errors; waits for all ranks."""
        self._wait_for_all(transition)
        text = None if own is None else f"{type(own).__name__}: {own}"
        texts: list[str | None] = [None] * self.size
        dist.all_gather_object(texts, text, group=self._group)
        return {rank: text for rank, text in enumerate(texts) if text is not None}

    def _wait_for_all(self, transition: str) -> None:
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise BusyError(
                f"{transition}: not every rank came within {self._timeout.total_seconds():g} s "
                f"({str(error).splitlines()[0]}); call again when it has caught up"
            ) from error


def as_one(
    group: RankGroup | None,
    transition: str,
    act: Callable[[], T],
    undo: Callable[[], object],
) -> T:
    """Make a transition on every rank of the group or on none of them; returns what `act` does."""
    if group is None:
        return act()
    failure: HalError | None = None
    try:
        done = act()
    except HalError as error:
        failure = error
    failed = group.failures(transition, failure)
    if failure is not None:
        raise failure
    if failed:
        undo()
        raise GroupError(transition, failed)
    return done
