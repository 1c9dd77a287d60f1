"""Backups that a codec makes smaller where the device's memory is."""

from __future__ import annotations

import gc
import os
from typing import Any, Protocol

import pytest
import torch

from hal.core import BackupOptions, SleepManager
from hal.core.kernels.fingerprint import why_not
from hal.errors import (
    BackupCorrupted,
    DriverError,
    HostMemoryError,
    InvalidArgument,
    OutOfDeviceMemory,
    Unsupported,
)
from hal.platform import Platform
from support import MIB, Target, books, fill, hold, pattern

SIZE = 12 * MIB
CODECS = {"cpu": "zstd", "cuda": "ans"}


class Make(Protocol):
    def __call__(self, **options: Any) -> SleepManager: ...


@pytest.fixture
def codec(platform: Platform) -> str:
    name = CODECS.get(platform.name)
    if name is None:
        pytest.skip(f"{platform.name}: no codec works on its memory")
    return name


@pytest.fixture
def ratio(target: Target) -> float:
    """The most that weights may take of their size: nvCOMP's coder knows floats, zstd does not."""
    return 0.70 if target.name == "cuda" else 0.82


@pytest.fixture
def sleeper(manager: Make, codec: str, backing: str) -> SleepManager:
    return manager(backup=BackupOptions(backing=backing, compress=codec))


def weights_of(sleeper: SleepManager, seed: int, size: int = SIZE) -> torch.Tensor:
    """Numbers as weights have them: bfloat16, normal, with a spread of 0.02."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(size // 2, generator=generator, device="cpu") * 0.02).bfloat16()
    source = values.to(torch.get_default_device())
    with sleeper.pool("weights"):
        return source.clone()


def test_weights_take_less_host_memory_and_come_back(sleeper: SleepManager, ratio: float) -> None:
    weights = weights_of(sleeper, 1)
    expected = weights.clone()
    for cycle in range(3):
        report = sleeper.sleep(level=1)
        assert report.copied_bytes == SIZE
        assert report.host_bytes <= ratio * SIZE
        assert sleeper.backup_bytes <= (ratio + 0.01) * SIZE
        sleeper.wake_up()
        assert torch.equal(weights, expected)
        weights[cycle] = cycle
        expected[cycle] = cycle


def test_what_does_not_shrink_is_kept_as_it_is(sleeper: SleepManager) -> None:
    noise = fill(sleeper, "weights", 1, SIZE)
    report = sleeper.sleep(level=1)
    assert report.host_bytes <= SIZE
    sleeper.wake_up()
    assert torch.equal(noise, pattern(SIZE, 1))


def test_many_small_and_mixed_tensors(sleeper: SleepManager) -> None:
    sizes = [512, 4096 + 512, 70_000, MIB - 512, 3 * MIB + 1024, 5 * MIB]
    tensors = {(n, i): fill(sleeper, "weights", i, n) for i in range(4) for n in sizes}
    zeros = hold(fill(sleeper, "runtime", 1, 8 * MIB)).zero_()
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert all(torch.equal(tensor, pattern(n, i)) for (n, i), tensor in tensors.items())
    assert not zeros.any()


def test_nothing_is_left_of_the_windows(sleeper: SleepManager, platform: Platform) -> None:
    hold(weights_of(sleeper, 1))
    before = books(platform)
    for _ in range(2):
        sleeper.sleep(level=1)
        sleeper.wake_up()
    assert books(platform) == before


@pytest.mark.parametrize("call", ["unmap", "release", "unreserve"])
def test_windows_that_the_driver_keeps_go_with_the_next(
    sleeper: SleepManager, platform: Platform, call: str
) -> None:
    weights = weights_of(sleeper, 1)
    expected, before = weights.clone(), books(platform)
    sleeper.sleep(level=1)
    sleeper.device.fail(call, nth=1, code=1)  # the wake itself takes nothing down
    sleeper.wake_up()
    assert sleeper.device.fault_hits(call) == 1
    sleeper.device.clear_faults()
    assert books(platform) != before
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert books(platform) == before
    assert torch.equal(weights, expected)


def test_a_budget_below_the_plain_size_suffices(manager: Make, codec: str, ratio: float) -> None:
    budget = int((ratio + 0.08) * SIZE)
    options = BackupOptions(backing="anonymous", compress=codec, budget=budget)
    sleeper = manager(backup=options)
    weights = weights_of(sleeper, 1)
    expected = weights.clone()
    assert sleeper.plan_sleep().fits
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert torch.equal(weights, expected)


def test_a_budget_that_turns_out_too_small_fails_with_nothing_lost(
    manager: Make, codec: str
) -> None:
    options = BackupOptions(backing="anonymous", compress=codec, budget=int(0.72 * SIZE))
    sleeper = manager(backup=options)
    noise = fill(sleeper, "weights", 1, SIZE)
    with pytest.raises(HostMemoryError):
        sleeper.sleep(level=1)
    assert not sleeper.is_sleeping
    assert sleeper.backup_bytes == 0
    assert torch.equal(noise, pattern(SIZE, 1))


@pytest.mark.parametrize(
    ("call", "nth"),
    [("encode", 1), ("copy_to_host", 1), ("copy_to_host", 3), ("unmap", 1), ("release", 2)],
)
def test_a_failed_sleep_loses_nothing(sleeper: SleepManager, call: str, nth: int) -> None:
    weights, other = weights_of(sleeper, 1), weights_of(sleeper, 2)
    expected = weights.clone(), other.clone()
    sleeper.device.fail(call, nth=nth, code=1)
    with pytest.raises(DriverError):
        sleeper.sleep(level=1)
    sleeper.device.clear_faults()
    if sleeper.is_sleeping:
        sleeper.wake_up()
    assert torch.equal(weights, expected[0])
    assert torch.equal(other, expected[1])
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert torch.equal(weights, expected[0])
    assert torch.equal(other, expected[1])


@pytest.mark.parametrize(
    ("call", "nth"),
    [("decode", 1), ("copy_to_device", 1), ("create", 1), ("map", 2)],
)
def test_a_failed_wake_stays_asleep_and_can_be_made_again(
    sleeper: SleepManager, call: str, nth: int
) -> None:
    weights = weights_of(sleeper, 1)
    expected = weights.clone()
    sleeper.sleep(level=1)
    sleeper.device.fail(call, nth=nth, code=1)
    with pytest.raises(DriverError):
        sleeper.wake_up()
    sleeper.device.clear_faults()
    assert sleeper.sleeping_tags == {"weights"}
    sleeper.wake_up()
    assert torch.equal(weights, expected)


def test_little_free_memory_makes_smaller_windows(
    sleeper: SleepManager, target: Target, platform: Platform
) -> None:
    weights = weights_of(sleeper, 1)
    expected = weights.clone()
    sleeper.sleep(level=1)
    device = sleeper.device
    creates = device.counters().creates
    sleeper.wake_up()
    usual = device.counters().creates - creates
    sleeper.sleep(level=1)
    device.fail("create", nth=usual, code=target.out_of_memory)  # the second window's memory
    sleeper.wake_up()
    assert device.fault_hits("create") == 1
    device.clear_faults()
    assert torch.equal(weights, expected)


def test_no_memory_for_any_window_is_a_typed_error(sleeper: SleepManager, target: Target) -> None:
    weights = weights_of(sleeper, 1)
    expected = weights.clone()
    sleeper.sleep(level=1)
    device = sleeper.device
    segments = len([s for s in device.segments() if s.backup_bytes])
    device.fail("reserve", nth=1, code=target.out_of_memory, times=-1)
    with pytest.raises(OutOfDeviceMemory):
        sleeper.wake_up()
    device.clear_faults()
    assert segments
    sleeper.wake_up()
    assert torch.equal(weights, expected)


def test_a_damaged_backup_is_refused_and_repairable(sleeper: SleepManager) -> None:
    weights = weights_of(sleeper, 1)
    expected = weights.clone()
    sleeper.sleep(level=1)
    (segment, *_) = [s for s in sleeper.device.segments() if s.backup_bytes]
    for bit in (8 * 4, 8 * 4096 + 3):
        sleeper.device.flip_backup_bit(segment.address, bit)
    try:
        sleeper.wake_up()
    except BackupCorrupted:
        assert sleeper.sleeping_tags == {"weights"}
        for bit in (8 * 4, 8 * 4096 + 3):
            sleeper.device.flip_backup_bit(segment.address, bit)
        sleeper.wake_up()
        assert torch.equal(weights, expected)
    else:
        assert sleeper.backup.backing == "anonymous", "a file's pieces have checksums"
        assert not torch.equal(weights, expected), "the codec noticed nothing: verify=True does"


@pytest.mark.parametrize("retain", [False, True])
def test_a_copy_that_was_left_out_is_found_by_its_fingerprint(
    manager: Make, codec: str, platform: Platform, retain: bool
) -> None:
    if reason := why_not(platform, 0):
        pytest.skip(f"{platform.name}: {reason}")
    options = BackupOptions(backing="anonymous", compress=codec, verify=True, retain=retain)
    sleeper = manager(backup=options)
    weights = weights_of(sleeper, 1)
    expected = weights.clone()
    sleeper.sleep(level=1)
    sleeper.device.fail("restore", nth=1, code=0)
    with pytest.raises(BackupCorrupted, match="fingerprint"):
        sleeper.wake_up()
    assert sleeper.device.fault_hits("restore") == 1
    assert sleeper.sleeping_tags == {"weights"}
    sleeper.device.clear_faults()
    sleeper.wake_up()
    assert torch.equal(weights, expected)
    assert bool(sleeper.backup_bytes) is retain


def test_compressed_and_retained_backups_skip_what_did_not_change(
    manager: Make, codec: str, platform: Platform
) -> None:
    if reason := why_not(platform, 0):
        pytest.skip(f"{platform.name}: {reason}")
    sleeper = manager(backup=BackupOptions(backing="anonymous", compress=codec, retain=True))
    weights, other = weights_of(sleeper, 1), fill(sleeper, "runtime", 2, SIZE)
    expected = weights.clone()
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert sleeper.sleep(level=1).copied_bytes == 0
    sleeper.wake_up()
    weights[7] = expected[7] = 3
    assert 0 < sleeper.sleep(level=1).copied_bytes < 2 * SIZE
    sleeper.wake_up()
    assert torch.equal(weights, expected)
    assert torch.equal(other, pattern(SIZE, 2))


def test_tensors_freed_while_asleep(sleeper: SleepManager) -> None:
    kept, gone = weights_of(sleeper, 1), weights_of(sleeper, 2)
    expected = kept.clone()
    sleeper.sleep(level=1)
    del gone
    gc.collect()
    sleeper.wake_up()
    assert torch.equal(kept, expected)
    assert sleeper.backup_bytes == 0


def test_an_unknown_codec_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="'ans' or 'zstd'"):
        BackupOptions(compress="lz9")
    with pytest.raises(InvalidArgument, match="ans:float16"):
        BackupOptions(compress="ans:float128")


def test_a_codec_of_another_platform_is_unsupported_before_anything_changes(
    manager: Make, platform: Platform
) -> None:
    other = "ans" if CODECS.get(platform.name) != "ans" else "zstd"
    sleeper = manager(backup=BackupOptions(backing="anonymous", compress=other))
    weights = fill(sleeper, "weights", 1)
    with pytest.raises(Unsupported, match=platform.name):
        sleeper.sleep(level=1)
    assert not sleeper.is_sleeping
    assert torch.equal(weights, pattern(3 * MIB, 1))


def test_an_nvcomp_of_another_version_is_refused(
    manager: Make, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.name != "cuda-emulated":
        pytest.skip("only the emulated nvCOMP can say that it is another version")
    monkeypatch.setenv("EMUNVCOMP_VERSION", "4002")
    sleeper = manager(backup=BackupOptions(backing="anonymous", compress="ans"))
    hold(fill(sleeper, "weights", 1))
    with pytest.raises(Unsupported, match="nvCOMP 4"):
        sleeper.sleep(level=1)
    monkeypatch.setenv("EMUNVCOMP_VERSION", "5001")
    sleeper.sleep(level=1)
    sleeper.wake_up()
    assert "EMUNVCOMP_VERSION" in os.environ
