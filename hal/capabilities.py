"""Capabilities from a driver's facts: the part that is the same on every platform."""

from __future__ import annotations

from hal.native import Fact
from hal.platform import Capabilities, Flag, Platform, PoolNesting


def capabilities_from(
    platform: Platform, index: int, nesting: PoolNesting, found: str, graph_pools: Flag
) -> Capabilities:
    """What the facts of an opened device say, with what only the platform's room knows."""
    facts = platform.device(index).facts
    flag = {fact: Flag(fact in facts.yes, facts.why_not.get(fact, "")) for fact in Fact}
    return Capabilities(
        name=platform.name,
        device_type=platform.device_type,
        device_name=facts.device_name,
        driver_version=facts.version,
        pool_nesting=nesting,
        nesting_found=found,
        granularity=facts.granularity,
        virtual_memory=flag[Fact.VMM],
        graph_pools=graph_pools,
        scrubs_discarded=flag[Fact.SCRUBS],
        pinned_host=flag[Fact.PIN_HOST],
        free_is_truthful=flag[Fact.FREE_TRUTHFUL],
        host_access=flag[Fact.HOST_ACCESS],
        unified_memory=flag[Fact.UNIFIED_MEMORY],
        rdma=flag[Fact.RDMA],
        park=flag[Fact.PARK],
    )
