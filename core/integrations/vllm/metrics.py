"""The plugin's figures on vLLM's metrics endpoint.

Transitions happen in workers and the endpoint is in the front end, so each worker writes its
figures into a directory that the front end made, and a collector reads them when it is asked.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.core.integrations.vllm.logging import logger
from hal.core.report import SleepReport, WakeReport

if TYPE_CHECKING:
    from hal.core.integrations.vllm.allocator import HalMemAllocator

DIRECTORY = "HAL_VLLM_METRICS"
"""The variable with the directory."""


def serve() -> None:
    """Make the directory, and register the collector once in this process."""
    if DIRECTORY not in os.environ:
        made = tempfile.mkdtemp(prefix="hal-vllm-")
        os.environ[DIRECTORY] = made
        atexit.register(_remove, made, os.getpid())
    _register_collector()


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked from it
        shutil.rmtree(directory, ignore_errors=True)


@functools.cache
def _register_collector() -> None:
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        logger().info("prometheus_client is not installed: no metrics of the sleep mode")
        return
    REGISTRY.register(Collector())


def publish(allocator: HalMemAllocator, report: SleepReport | WakeReport) -> None:
    """Write this process's figures after a transition."""
    directory = os.environ.get(DIRECTORY)
    if not directory or not Path(directory).is_dir():
        return
    target = Path(directory) / f"{os.getpid()}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(figures(allocator, report)), encoding="utf-8")
    partial.replace(target)


def figures(allocator: HalMemAllocator, report: SleepReport | WakeReport) -> dict[str, Any]:
    """Bytes of each tag now, and what the last transition did."""
    manager = allocator.manager
    return {
        "rank": int(os.environ.get("RANK", manager.device_index)),
        "transition": "sleep" if isinstance(report, SleepReport) else "wake_up",
        "seconds": report.seconds,
        "copied": report.copied_bytes,
        "tags": {tag: list(pair) for tag, pair in allocator.bytes_by_tag().items()},
        "rates": {tag.tag: tag.rate for tag in report.tags},
        "backup_bytes": manager.backup_bytes,
        "held_bytes": manager.held_bytes,
        "wakes": manager.wake_count,
    }


class Collector:
    """Yields the figures of every worker as metrics."""

    def describe(self) -> list[Any]:
        """Nothing in advance: the metrics appear with the first transition."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics as they are now."""
        from prometheus_client.core import GaugeMetricFamily

        tag_bytes = GaugeMetricFamily(
            "hal:tag_bytes", "Pool memory of a tag.", labels=("worker", "tag", "state")
        )
        rate = GaugeMetricFamily(
            "hal:transition_tag_bytes_per_second",
            "Rate at which the last transition copied a tag.",
            labels=("worker", "transition", "tag"),
        )
        seconds = GaugeMetricFamily(
            "hal:transition_seconds", "The last transition.", labels=("worker", "transition")
        )
        copied = GaugeMetricFamily(
            "hal:transition_copied_bytes",
            "Bytes that the last transition copied.",
            labels=("worker", "transition"),
        )
        host = GaugeMetricFamily(
            "hal:backup_bytes", "Host memory or disk for backups.", labels=("worker", "state")
        )
        for worker in read_all():
            rank, kind = str(worker["rank"]), worker["transition"]
            seconds.add_metric([rank, kind], worker["seconds"])
            copied.add_metric([rank, kind], worker["copied"])
            host.add_metric([rank, "used"], worker["backup_bytes"])
            host.add_metric([rank, "held"], worker["held_bytes"])
            for tag, (mapped, asleep) in worker["tags"].items():
                tag_bytes.add_metric([rank, tag, "awake"], mapped)
                tag_bytes.add_metric([rank, tag, "asleep"], asleep)
            for tag, value in worker["rates"].items():
                rate.add_metric([rank, kind, tag], value)
        yield from (tag_bytes, rate, seconds, copied, host)


def read_all() -> list[dict[str, Any]]:
    """The figures of all workers that live, in order of their names."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return []
    paths = sorted(Path(directory).glob("*.json"))
    return [json.loads(path.read_text()) for path in paths if Path("/proc", path.stem).exists()]
