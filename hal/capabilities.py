"""Capabilities from a driver's facts: the part that is the same on every platform."""

from __future__ import annotations

from hal.native import Fact
from hal.platform import Capabilities, Flag, Platform, PoolNesting
from hal.pools import probe_flatten


def capabilities_from(
    platform: Platform,
    index: int,
    nesting: PoolNesting,
    found: str,
    graph_pools: Flag,
    *,
    virtual_memory: Flag | None = None,
) -> Capabilities:
    """What the facts of an opened device say, with what only the platform's room knows.

    `virtual_memory`, if given, is believed over the facts.
    """
    facts = platform.device(index).facts
    flag = {fact: Flag(fact in facts.yes, facts.why_not.get(fact, "")) for fact in Fact}
    vmm = flag[Fact.VMM] if virtual_memory is None else virtual_memory
    return Capabilities(
        name=platform.name,
        device_type=platform.device_type,
        device_name=facts.device_name,
        driver_version=facts.version,
        pool_nesting=nesting,
        nesting_found=found,
        flatten=probe_flatten(platform, index) if vmm else vmm,
        granularity=facts.granularity,
        virtual_memory=vmm,
        graph_pools=graph_pools,
        scrubs_discarded=flag[Fact.SCRUBS],
        pinned_host=flag[Fact.PIN_HOST],
        free_is_truthful=flag[Fact.FREE_TRUTHFUL],
        host_access=flag[Fact.HOST_ACCESS],
        unified_memory=flag[Fact.UNIFIED_MEMORY],
        rdma=flag[Fact.RDMA],
        park=flag[Fact.PARK],
    )
