"""Several decode steps over what KV initialisation made, called before and after a sleep."""

from __future__ import annotations

import pytest
import torch

from decode_steps import DecodeSteps
from hal.core import SleepManager
from hal.pools import torch_device


@pytest.mark.parametrize("level", [1, 2])
def test_steps_after_a_wake_give_the_same_bits_at_the_same_addresses(
    sleeper: SleepManager, level: int
) -> None:
    """Nothing is built again: tables, lengths and slots come back; the cache is filled as by a
    prefill, and the scratch needs nothing.
    """
    steps = DecodeSteps(sleeper, torch_device(sleeper.platform, 0))
    steps.begin()
    expected = steps().clone()
    addresses = steps.addresses()
    assert len(expected.unique()) > 1000
    steps.begin()
    before = {name: tensor.clone() for name, tensor in steps.state().items() if name != "cache"}
    sleeper.sleep(level=level)
    sleeper.wake_up()
    assert steps.addresses() == addresses
    for name, tensor in before.items():
        assert torch.equal(steps.state()[name], tensor), name
    steps.fill_cache()
    assert torch.equal(steps(), expected)
    assert steps.workspace.is_locked
