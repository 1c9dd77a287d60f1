"""One manager's part in the parking of its process: what it checks before, and what it takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from hal.core import parking
from hal.core.pool_set import ManagedPool, PoolSet
from hal.core.report import SleepReport, is_asleep
from hal.core.residual import give_torch_cache_back
from hal.core.transfer import Transfer
from hal.errors import Unsupported
from hal.native import Order
from hal.platform import Platform


class ManagerParking:
    """Parks the process for the manager of these pools, and brings it back."""

    def __init__(self, platform: Platform, device: int, pools: PoolSet, transfer: Transfer) -> None:
        self._platform, self._device = platform, device
        self._pools, self._transfer = pools, transfer
        self._asleep_bytes: dict[str, int] = {}

    @property
    def is_parked(self) -> bool:
        return parking.PROCESS.parked is not None

    def refuse(self, tags: Iterable[str]) -> None:
        """Raise `AsleepError` while the process is parked; `tags` sleep in it."""
        parking.PROCESS.refuse_parked(tuple(tags))

    # -- before

    def prepare(self, going: Sequence[ManagedPool], awake: Collection[str]) -> int:
        """Refuse, before anything changes, a process that cannot be parked once these pools sleep;
        returns the bytes that they release. `awake` are the tags that do not sleep yet.
        """
        can = self._platform.capabilities_of(self._device).park
        if not can:
            raise Unsupported("parking", self._platform.name, can.reason)
        give_torch_cache_back(self._platform)  # pools that nobody needs go with it
        segments = [s for managed in going for s in managed.pool.segments()]
        releasing = sum(s.size for s in segments if not is_asleep(s.state))
        staying = set(awake) - {managed.tag for managed in going}
        parking.PROCESS.prepare(self._platform, releasing, ", ".join(sorted(staying)))
        return releasing

    def check_host(self, releasing: int, orders: Sequence[Order]) -> None:
        """Raise `HostMemoryError` unless these backups fit, and the driver's copies beside them."""
        driver = parking.PROCESS.residual(releasing)
        backups = self._transfer.new_memory(orders)
        parking.PROCESS.check_host(driver + backups, self._transfer.memory_budget)

    # -- there and back

    def park(self, sleeping: Iterable[str]) -> None:
        """Park; what the wake of these tags takes is noted now, since nothing can be asked while
        parked.
        """
        give_torch_cache_back(self._platform)
        self._asleep_bytes = {
            tag: sum(segment.size for segment in self._pools.asleep_segments(tag))
            for tag in sleeping
        }
        parking.PROCESS.check_host(parking.PROCESS.residual(), self._transfer.memory_budget)
        parking.PROCESS.park()

    def unpark(self, waking: Iterable[str], deadline: float) -> float:
        """Bring the process back once there is memory for it and for these tags; returns seconds.

        Raises as `ProcessParking.unpark` does.
        """
        needed = sum(self._asleep_bytes.get(tag, 0) for tag in waking)
        return parking.PROCESS.unpark({self._device: needed}, deadline)

    @staticmethod
    def with_parking(report: SleepReport) -> SleepReport:
        """The report of a sleep, with what parking did if the process is parked."""
        parked = parking.PROCESS.parked
        if parked is None:
            return report
        return replace(
            report,
            park_seconds=parked.seconds,
            parked_residual=parked.residual,
            parked_host_bytes=parked.host_bytes,
        )
