"""The one collective of the kernels, by the name that the installed torch has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_gather(by_rank: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill a contiguous [ranks, ...] with every rank's `own`, which may be its place in there."""
    _gather(by_rank.view(-1), own.view(-1), group=group)
