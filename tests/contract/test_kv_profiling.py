"""A profiling pass before the real KV initialisation, and the audit of `runtime` after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.core import SleepManager
from hal.core.audit import TagAudit
from hal.errors import StateError
from support import MIB


class Runner:
    """Hangs KV state on itself, as engines' model runners do."""

    def __init__(self) -> None:
        self.caches: list[torch.Tensor] = []
        self.tables: dict[str, torch.Tensor] = {}
        self.steps = 3

    def initialise(self) -> None:
        self.caches.append(torch.ones(MIB))
        self.tables["block"] = torch.arange(1000)
        self.slots = torch.arange(64)
        self.steps += 1


def test_a_profiling_pass_leaves_nothing_to_the_real_one(sleeper: SleepManager) -> None:
    runner = Runner()
    caches = runner.caches
    with sleeper.kv_init(strict=True) as kv:
        with kv.profiling(runner):
            runner.initialise()
            assert sleeper.tag_of(runner.slots) is None
        assert (runner.caches, runner.tables, runner.steps) == ([], {}, 3)
        assert runner.caches is caches
        assert not hasattr(runner, "slots")
        state = torch.arange(64)
    expected = None if kv.strategy == "fallback" else "runtime"
    assert sleeper.tag_of(state) == expected, "the runtime pool is open again"


def test_without_it_the_real_initialisation_finds_the_passes_state(sleeper: SleepManager) -> None:
    runner = Runner()
    runner.initialise()
    with sleeper.kv_init(strict=True):
        runner.initialise()
    assert len(runner.caches) == 2
    assert sleeper.tag_of(runner.caches[0]) is None


def test_what_something_else_still_holds_is_named(sleeper: SleepManager) -> None:
    runner, registry = Runner(), list[torch.Tensor]()

    def build(kv: Any) -> None:
        with kv.profiling(runner):
            runner.initialise()
            registry.append(runner.slots)

    with sleeper.kv_init() as kv, pytest.warns(UserWarning, match=r"1 tensor.* held.*\[64\] made"):
        build(kv)
    registry.clear()
    with pytest.raises(StateError, match=r"test_kv_profiling\.py:.* in initialise"):  # noqa: SIM117
        with sleeper.kv_init(strict=True) as kv:
            build(kv)


def test_a_pass_that_fails_is_undone_too(sleeper: SleepManager) -> None:
    runner = Runner()

    def fail(kv: Any) -> None:
        with kv.profiling(runner):
            runner.initialise()
            raise RuntimeError("half-way")

    with sleeper.kv_init() as kv:
        with pytest.raises(RuntimeError, match="half-way"):
            fail(kv)
        assert not runner.caches


def test_the_audit_of_runtime_sees_what_start_up_did_not_leave(sleeper: SleepManager) -> None:
    with sleeper.pool("runtime"):
        tables, spare = torch.zeros(MIB), torch.zeros(MIB)
    cache = torch.zeros(MIB)
    audit = TagAudit(sleeper)
    assert audit.findings() == ()
    sleeper.sleep()
    sleeper.wake_up()
    assert audit.findings() == (), "a wake brings it back as it was"
    audit.exported(cache, "the transport")
    assert audit.findings() == (), "what lies outside runtime may be exported"
    audit.exported(tables, "the transport")
    del spare
    with sleeper.pool("runtime"):
        late = torch.zeros(3 * MIB)
    found = "; ".join(audit.findings())
    assert "12582912 bytes allocated" in found
    assert "4194304 bytes freed" in found
    assert "4194304 bytes at" in found
    assert "known to the transport" in found
    del late


def test_an_audit_before_the_tag_exists_is_empty(sleeper: SleepManager) -> None:
    audit = TagAudit(sleeper)
    assert audit.findings() == ()
