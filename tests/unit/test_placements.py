"""`hal probe`: where the tensors of a KV initialisation land, expected beside found."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hal.core import cli, probe
from hal.core.probe import OUTSIDE, Placement, placement_report, probe_placements
from hal.cpu.platform import CpuPlatform
from hal.errors import HalError
from hal.platform import Platform, PoolNesting

CAN_SLEEP = {"virtual_memory": {"available": True}}


def found(platform: Platform) -> dict[tuple[str, str], tuple[str, str, str]]:
    return {(p.way, p.tensor): (p.expected, p.pool, p.tag) for p in probe_placements(platform)}


def test_on_a_lifo_platform_every_tensor_is_where_it_belongs() -> None:
    places = found(CpuPlatform())
    assert set(places.values()) == {("kv_cache",) * 3, ("runtime",) * 3}
    assert {way for way, _ in places} == {"nested", "kv_init (nest)", "kv_init (flatten)"}


def test_on_a_fifo_platform_nesting_goes_wrong_and_kv_init_does_not() -> None:
    places = found(CpuPlatform(PoolNesting.FIFO))
    assert places["nested", "kv"] == ("kv_cache", "runtime", "runtime")
    assert places["kv_init (fallback)", "kv"] == ("kv_cache",) * 3
    assert places["kv_init (fallback)", "rt"] == (OUTSIDE,) * 3
    assert places["kv_init (flatten)", "rt"] == ("runtime",) * 3


def test_the_finding_on_hardware_both_from_the_runtime_pool_both_tagged_kv_cache() -> None:
    """Tags from the open scope, on an allocator that was assumed to be LIFO."""
    platform = CpuPlatform(PoolNesting.FIFO, claims=PoolNesting.LIFO, tag_from_scope=True)
    places = found(platform)
    assert places["kv_init (nest)", "kv"] == ("kv_cache", "runtime", "kv_cache")
    assert places["kv_init (nest)", "rt"] == ("runtime", "runtime", "kv_cache")


def environment(name: str = "cpu", capabilities: Any = CAN_SLEEP) -> Any:
    return SimpleNamespace(platform=SimpleNamespace(name=name, capabilities=capabilities))


def test_what_is_wrong_with_kv_init_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = CpuPlatform(PoolNesting.FIFO, claims=PoolNesting.LIFO)
    monkeypatch.setattr(probe, "detect", lambda _: broken)
    report = placement_report(environment())
    (problem,) = report.problems
    assert problem == (
        "kv_init (nest): kv expected in kv_cache; found in pool runtime, segment tagged runtime: "
        "NOT as expected"
    )
    out = io.StringIO()
    report.render(Console(file=out, width=200))
    assert "KV initialisation" in out.getvalue()
    assert problem in out.getvalue()
    assert report.as_dict()["placement_problems"] == [problem]


def test_plain_nesting_that_goes_wrong_is_shown_and_is_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "detect", lambda _: CpuPlatform(PoolNesting.FIFO))
    report = placement_report(environment())
    assert Placement("nested", "kv", "kv_cache", "runtime", "runtime") in report.placements
    assert report.problems == ()


@pytest.mark.parametrize(
    "nothing",
    [
        SimpleNamespace(platform=None),
        environment(capabilities=None),
        environment(capabilities={"virtual_memory": {"available": False}}),
    ],
)
def test_where_nothing_can_sleep_nothing_is_probed(nothing: Any) -> None:
    report = placement_report(nothing)
    assert (report.placements, report.problems) == ((), ())


def test_a_probe_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def detect(_: str) -> Platform:
        raise HalError("the device is gone")

    monkeypatch.setattr(probe, "detect", detect)
    assert placement_report(environment()).problems == ("the device is gone",)


def test_the_command_prints_both_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app(["probe", "--platform", "cpu", "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["platform"]["name"] == "cpu"
    assert all(placement["is_right"] for placement in report["placements"])
