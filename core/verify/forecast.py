"""What a sleep of the reference engine would move and free here, and whether a wake would fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hal.core.report import SleepPlan
from hal.core.tags import Policy
from hal.core.verify.subject import Setup, Subject


@dataclass(frozen=True)
class Forecast:
    """A planned sleep and the wake after it; `free` bytes of device memory now, None: unknown."""

    level: int
    sleep: SleepPlan
    free: int | None

    @property
    def wake_needs(self) -> int:
        """Device bytes that a full wake takes: what the sleep gives."""
        return self.sleep.freed

    @property
    def free_while_asleep(self) -> int | None:
        return None if self.free is None else self.free + self.sleep.freed

    @property
    def wake_fits(self) -> bool | None:
        """Whether the wake fits if nobody else takes memory meanwhile; None: unknown."""
        left = self.free_while_asleep
        return None if left is None else left >= self.wake_needs

    @property
    def spare(self) -> int | None:
        """Bytes that others may take while it sleeps, and the wake still fits."""
        return self.free

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes."""
        return {
            "level": self.level,
            "tags": [
                {
                    "tag": tag.tag,
                    "policy": tag.policy.value,
                    "segments": tag.segments,
                    "bytes": tag.bytes,
                    "host_bytes": tag.host_bytes,
                }
                for tag in self.sleep.tags
            ],
            "sleep": {
                "frees": self.sleep.freed,
                "host_needed": self.sleep.host_needed,
                "host_available": self.sleep.host_available,
                "fits": self.sleep.fits,
                "why_not": self.sleep.why_not,
            },
            "wake": {
                "needs": self.wake_needs,
                "copies": sum(tag.host_bytes for tag in self.sleep.tags),
                "scrubs": sum(t.bytes for t in self.sleep.tags if t.policy is Policy.DISCARD),
                "free_while_asleep": self.free_while_asleep,
                "fits": self.wake_fits,
                "others_may_take": self.spare,
            },
        }


def forecast(setup: Setup, level: int) -> Forecast:
    """Build the reference engine, ask for the plan of a sleep, and give everything back."""
    subject = Subject(setup)
    try:
        plan = subject.sleeper.plan_sleep(level)
        truthful = setup.platform.capabilities_of(setup.device).free_is_truthful
        free = subject.device.memory()[0] if truthful else None
        return Forecast(level, plan, free)
    finally:
        subject.close()
