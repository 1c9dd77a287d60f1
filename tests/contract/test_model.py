"""Random lives of an engine against a plain model: contents and books always agree, on both nesting
orders.
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from hal.core import LEVELS, BackupOptions, Policy, SleepManager
from hal.core.report import is_asleep
from hal.errors import AsleepError, HalError
from hal.platform import PoolNesting
from support import TARGETS, fill, pattern

TAGS = ("weights", "kv_cache", "runtime", "own")
TARGET = {target.name: target for target in TARGETS}
CALLS = ("create", "map", "access", "unmap", "release", "copy_to_host", "copy_to_device")


@dataclass(eq=False)
class Held:
    """A tensor, the tag it must be in, and the seed of its bytes (None: given up, all zero)."""

    tensor: torch.Tensor
    tag: str
    seed: int | None

    def expected(self) -> torch.Tensor:
        size = self.tensor.numel()
        return (
            torch.zeros(size, dtype=torch.uint8) if self.seed is None else pattern(size, self.seed)
        )


class Lives(RuleBasedStateMachine):
    target = "cpu"
    held_tensors = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.platform = TARGET[self.target].make()
        self.sleeper = SleepManager(self.platform, backup=BackupOptions(backing="anonymous"))
        self.device = self.platform.device()
        self.held: list[Held] = []
        self.asleep: dict[str, Policy] = {}
        self.seed = 0
        for tag in TAGS:
            self.allocate(tag, 1000)

    def allocate(self, tag: str, size: int) -> Held:
        self.seed += 1
        held = Held(fill(self.sleeper, tag, self.seed, size), tag, self.seed)
        self.held.append(held)
        return held

    sizes = st.integers(1, 3 << 20)
    tags = st.sampled_from(TAGS)

    @rule(target=held_tensors, tag=tags, size=sizes)
    def alloc(self, tag: str, size: int) -> Held:
        if tag not in self.asleep:
            return self.allocate(tag, size)
        try:
            with self.sleeper.pool(tag):
                raise AssertionError("an asleep pool was entered")
        except AsleepError:
            return Held(torch.empty(0, dtype=torch.uint8), tag, None)

    @rule(target=held_tensors, outer=tags, inner=tags, size=sizes)
    def alloc_nested(self, outer: str, inner: str, size: int) -> Held:
        """Two raw scopes: the platform's order decides, and the segment's tag follows the pool."""
        if self.asleep:
            return Held(torch.empty(0, dtype=torch.uint8), outer, None)
        fifo = self.platform.capabilities.pool_nesting is PoolNesting.FIFO
        pools = [self.sleeper._pools.get(tag, None) for tag in (outer, inner)]
        self.seed += 1
        source = pattern(size, self.seed)
        with pools[0].use(), pools[1].use():
            held = Held(source.clone(), outer if fifo else inner, self.seed)
        self.held.append(held)
        return held

    @rule(held=consumes(held_tensors))
    def free(self, held: Held) -> None:
        if held in self.held:
            self.held.remove(held)
        held.tensor = torch.empty(0, dtype=torch.uint8)
        gc.collect(0)

    @rule(held=held_tensors)
    def write(self, held: Held) -> None:
        if held in self.held and held.tag not in self.asleep:
            self.seed += 1
            held.seed = self.seed
            held.tensor.copy_(pattern(held.tensor.numel(), self.seed))

    @rule(level=st.sampled_from([1, 2]))
    def sleep(self, level: int) -> None:
        self.do_sleep({tag: LEVELS[level].policy(tag) for tag in TAGS}, level)

    @rule(policies=st.dictionaries(tags, st.sampled_from(Policy)))
    def sleep_by_policy(self, policies: dict[str, Policy]) -> None:
        self.do_sleep(policies, None)

    def do_sleep(self, policies: dict[str, Policy], level: int | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if level is None:
                self.sleeper.sleep(policy=policies)
            else:
                self.sleeper.sleep(level)
        self.note_asleep(policies)

    def note_asleep(self, policies: dict[str, Policy]) -> None:
        for tag, policy in policies.items():
            if policy is not Policy.KEEP and tag not in self.asleep:
                self.asleep[tag] = policy
                if policy is Policy.DISCARD:
                    self.give_up(tag)

    def give_up(self, tag: str) -> None:
        for held in self.held:
            if held.tag == tag:
                held.seed = None

    @rule(tag=tags)
    def discard(self, tag: str) -> None:
        self.sleeper.discard(tag)
        self.asleep[tag] = Policy.DISCARD
        self.give_up(tag)

    @rule(wanted=st.none() | st.lists(tags, max_size=3))
    def wake(self, wanted: list[str] | None) -> None:
        self.sleeper.wake_up(wanted)
        self.note_awake(wanted)

    def note_awake(self, wanted: list[str] | None) -> None:
        if wanted is None:
            self.asleep.clear()
        elif wanted:
            for tag in list(self.asleep):
                if tag in wanted or tag not in self.sleeper.deferrable:
                    del self.asleep[tag]

    @rule(call=st.sampled_from(CALLS), nth=st.integers(1, 4), waking=st.booleans())
    def fault(self, call: str, nth: int, waking: bool) -> None:
        """One failing driver call: the transition happens, or the state is as before."""
        target = TARGET[self.target]
        code = target.out_of_memory if call == "create" else target.other_error
        self.device.fail(call, nth, code)
        before = self.sleeper.sleeping_tags
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.sleeper.wake_up() if waking else self.sleeper.sleep(1)
        except HalError:
            assert self.device.fault_hits(call)
            assert self.sleeper.sleeping_tags == before
        else:
            if waking:
                self.note_awake(None)
            else:
                self.note_asleep({tag: LEVELS[1].policy(tag) for tag in TAGS})
        finally:
            self.device.clear_faults()

    @invariant()
    def contents_agree(self) -> None:
        for held in self.held:
            if held.tag not in self.asleep:
                assert torch.equal(held.tensor, held.expected())

    @invariant()
    def tags_agree(self) -> None:
        assert self.sleeper.sleeping_tags == frozenset(self.asleep)
        for held in self.held:
            assert self.sleeper.tag_of(held.tensor) == held.tag

    @invariant()
    def books_agree(self) -> None:
        counters, segments = self.device.counters(), self.device.segments()
        asleep = sum(s.size for s in segments if is_asleep(s.state))
        assert counters.segments == counters.reservations == len(segments)
        assert counters.asleep_bytes == asleep
        assert counters.mapped_bytes == sum(s.size for s in segments) - asleep
        for segment in self.sleeper._pools.segments():
            tag = self.sleeper._pools.tag_at(segment.address)
            assert is_asleep(segment.state) is (tag in self.asleep)

    @precondition(lambda self: not self.asleep)
    @rule()
    def nothing_is_held_for_backups(self) -> None:
        assert self.sleeper.backup_bytes == 0

    def teardown(self) -> None:
        self.device.clear_faults()
        self.sleeper.wake_up()
        self.asleep.clear()
        self.contents_agree()
        for held in self.held:
            held.tensor = torch.empty(0, dtype=torch.uint8)
        gc.collect()
        self.sleeper.close()
        assert self.device.counters().segments == 0
        self.device.close()


class FifoLives(Lives):
    target = "cpu-fifo"


_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestLives = Lives.TestCase
TestLives.settings = _SETTINGS
TestFifoLives = FifoLives.TestCase
TestFifoLives.settings = _SETTINGS
