"""Charts of a report as SVG: memory over cycles, stacked by tag, and rates against the link."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_MIB = 2**20
_WIDTH, _HEIGHT = 860, 220
_LEFT, _TOP, _BOTTOM = 64, 14, 24
_COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5")
"""Classes of the page, by order of the tags: each has a colour in light and in dark."""
_TICKS = 4

Point = tuple[float, float]


def memory_chart(cell: Mapping[str, Any]) -> str:
    """Two panels over a cell's transitions: mapped device memory by tag; host memory, backups."""
    samples = cell["timeline"]
    tags = list(dict.fromkeys(tag for sample in samples for tag in sample["mapped"]))
    device = {tag: [sample["mapped"].get(tag, 0) for sample in samples] for tag in tags}
    lowest = min(sample["host_bytes"] for sample in samples)
    host = {
        "backups": [sample["backup_bytes"] for sample in samples],
        f"process, above {lowest / _MIB:,.0f} MiB": [
            sample["host_bytes"] - lowest for sample in samples
        ],
    }
    return "".join(
        (
            _panel("Device memory, mapped, by tag", device, len(samples)),
            _panel("Host memory", host, len(samples)),
            f"<figcaption>{_caption(cell)}</figcaption>",
        )
    )


def _caption(cell: Mapping[str, Any]) -> str:
    parts = []
    for name in ("device", "host"):
        if slope := cell[f"{name}_slope"]:
            rate, error = slope["bytes_per_cycle"] / _MIB, slope["standard_error"] / _MIB
            parts.append(
                f"{name} {rate:+.3f} ± {error:.3f} MiB a cycle over {slope['cycles']} cycles"
            )
    fitted = "; ".join(parts) or "too few cycles to fit a line"
    return f"Each step is a sleep or a wake. Least squares after the warm-up: {fitted}."


def _panel(title: str, series: Mapping[str, Sequence[int]], count: int) -> str:
    """A stacked chart of steps, with its legend."""
    highest = max((sum(values) for values in zip(*series.values(), strict=True)), default=0) or 1
    below = [0.0] * count
    areas = []
    for index, values in enumerate(series.values()):
        above = [b + v for b, v in zip(below, values, strict=True)]
        colour = _COLOURS[index % len(_COLOURS)]
        areas.append(f"<path class='{colour}' d='{_area(below, above, highest)}'/>")
        below = above
    legend = "".join(
        f"<li><i class='{_COLOURS[index % len(_COLOURS)]}'></i>{html.escape(name)}</li>"
        for index, name in enumerate(series)
    )
    return (
        f"<h3>{title}</h3><ul class='legend'>{legend}</ul>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{title}'>"
        f"{_grid(highest)}{''.join(areas)}</svg>"
    )


def _area(below: Sequence[float], above: Sequence[float], highest: float) -> str:
    forth = _steps(above, highest)
    back = list(reversed(_steps(below, highest)))
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in (*forth, *back)) + "Z"


def _steps(values: Sequence[float], highest: float) -> list[Point]:
    """Corners of a staircase: each value holds until the next transition."""
    wide = (_WIDTH - _LEFT) / max(1, len(values))
    return [
        (_LEFT + (index + side) * wide, _y(value, highest))
        for index, value in enumerate(values)
        for side in (0, 1)
    ]


def _y(value: float, highest: float) -> float:
    return _HEIGHT - _BOTTOM - value / highest * (_HEIGHT - _TOP - _BOTTOM)


def _grid(highest: float) -> str:
    lines = []
    for tick in range(_TICKS + 1):
        value = highest * tick / _TICKS
        y = _y(value, highest)
        lines.append(f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{y:.1f}' y2='{y:.1f}'/>")
        label = f"{value / _MIB:,.1f}"
        lines.append(f"<text x='{_LEFT - 8}' y='{y + 4:.1f}'>{label}</text>")
    lines.append(f"<text x='{_LEFT - 8}' y='{_HEIGHT - 4}'>MiB</text>")
    return f"<g class='grid'>{''.join(lines)}</g>"


def rate_chart(bench: Mapping[str, Any]) -> str:
    """Bars of sleep and wake beside the copies of the link that bound them."""
    rows = (
        ("sleep", bench["sleep"], bench["link"]["out"]),
        ("wake", bench["wake"], bench["link"]["in"]),
    )
    highest = max(value for _, *values in rows for value in values) or 1
    bars = "".join(
        f"<div class='rate'><b>{name}</b>"
        f"{_bar(rate, highest, 'c0', f'{rate / link:.0%} of the link')}"
        f"{_bar(link, highest, 'c5', 'a plain copy')}</div>"
        for name, rate, link in rows
    )
    return f"<div class='rates'>{bars}</div>"


def _bar(rate: float, highest: float, colour: str, note: str) -> str:
    return (
        f"<div class='bar'><i class='{colour}' style='width:{rate / highest * 100:.1f}%'></i>"
        f"<span>{rate / 1e9:.2f} GB/s <small>{note}</small></span></div>"
    )
