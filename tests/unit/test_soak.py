"""The soak: reproducible from its seed, right about engines without a defect, and about others."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hal.core.soak.actions import Serve, draw
from hal.core.soak.model import Expected
from hal.core.soak.run import Outcome, soak, summary
from hal.core.tags import Policy
from hal.core.verify.breaks import BREAKS
from hal.core.verify.matrix.cells import Site
from hal.core.verify.matrix.table import Matrix

MATRIX = Matrix.load(Path(__file__).resolve().parents[2] / "ci" / "matrix.toml")
TAGS = ("weights", "kv_cache", "runtime", "workspace")


def run(**options: Any) -> Outcome:
    return soak(Site("cpu"), MATRIX, **options)


def test_engines_without_a_defect_live_on() -> None:
    outcome = run(lives=2, seed=3)
    assert outcome.passed, "\n".join(summary(outcome, "cpu"))
    assert outcome.lives == 2
    assert outcome.actions > 60
    assert outcome.faults > 0
    assert outcome.compared > 50
    assert next(summary(outcome, "cpu")).startswith("nothing was violated: 2 lives")


@pytest.mark.parametrize("name", ["stale-index", "kept-backups"])
def test_a_defect_is_found_with_the_actions_that_led_to_it_and_again(name: str) -> None:
    subject = BREAKS[name].subject
    outcome = run(lives=20, seed=5, subject=subject)
    assert not outcome.passed
    assert outcome.trace
    assert outcome.cell
    text = "\n".join(summary(outcome, "cpu"))
    assert f"again: hal soak --platform cpu --seed 5 --life {outcome.life}" in text
    again = run(only=outcome.life, seed=5, subject=subject)
    assert (again.violation, again.trace) == (outcome.violation, outcome.trace)


def test_the_time_ends_it_and_nothing_compared_is_no_pass() -> None:
    outcome = run(seconds=0)
    assert outcome.lives == 0
    assert not outcome.passed
    assert "VIOLATED: nothing was compared" in "\n".join(summary(outcome, "cpu"))


def test_a_seed_gives_the_same_actions_and_another_others() -> None:
    def actions(seed: str) -> list[str]:
        return [str(a) for a in islice(draw(seed, TAGS, capacity_known=True), 50)]

    assert actions("1/0") == actions("1/0")
    assert actions("1/0") != actions("1/1")
    drawn = set(islice(draw("1/0", TAGS, capacity_known=True), 400))
    assert any(getattr(action, "memory_taken", False) for action in drawn)
    assert any(getattr(action, "fault", None) for action in drawn)
    assert any(isinstance(action, Serve) for action in drawn)


# ---- the model -----------------------------------------------------------------------------------


def expected() -> Expected:
    return Expected(TAGS, frozenset(TAGS) - {"runtime"}, frozenset({"weights", "kv_cache"}))


def test_tags_keep_the_policy_that_they_fell_asleep_with() -> None:
    model = expected()
    model.sleep({"weights": Policy.OFFLOAD})
    model.sleep(model.policies(2))
    assert model.asleep["weights"] is Policy.OFFLOAD
    assert not model.dirty
    assert not model.can_serve


def test_discarded_weights_are_dirty_until_loaded_and_scratch_never_is() -> None:
    model = expected()
    model.sleep(model.policies(2))
    model.wake(None)
    assert model.dirty == {"weights"}
    assert not model.can_serve
    model.load()
    assert model.can_serve


def test_a_tag_that_the_engine_has_nothing_in_may_sleep() -> None:
    model = expected()
    model.sleep({"runtime": Policy.OFFLOAD})
    assert model.can_serve
    model.sleep({"workspace": Policy.OFFLOAD})
    assert not model.can_serve


def test_a_selective_wake_takes_what_is_not_deferrable_along() -> None:
    model = expected()
    model.sleep(model.policies(1))
    model.wake(())
    assert len(model.asleep) == 4
    model.wake(("kv_cache",))
    assert set(model.asleep) == {"weights"}
