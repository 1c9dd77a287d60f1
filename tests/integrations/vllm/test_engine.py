"""A real vLLM engine on the host, in this process: sleep, wake, and the same bits afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import vllm_model
from hal.errors import HalError, OutOfDeviceMemory, Unsupported

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm has its own environment")

from hal.core.integrations.vllm import installation
from hal.core.integrations.vllm.allocator import HalMemAllocator
from hal.core.integrations.vllm.options import PluginOptions

TAGS = {"weights", "kv_cache", "runtime", "workspace"}
WEIGHT_BYTES = 256 << 20
CYCLES = 20
NO_MEMORY, OTHER = 12, 5
"""errno: ENOMEM, EIO."""
SHORT, LONG = 4, 10


class Engine(NamedTuple):
    """The engine under test, and what it answered before its first sleep."""

    llm: Any
    allocator: HalMemAllocator
    before: list[Any]

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def executor(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor

    def same(self) -> bool:
        return answers(self.llm, LONG) == self.before


def sampling(tokens: int) -> list[Any]:
    """Greedy, and seeded with top-k and top-p, each with logprobs."""
    from vllm import SamplingParams

    common = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
    chosen = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 11}
    return [SamplingParams(temperature=0.0, **common), SamplingParams(**chosen, **common)]


def answers(llm: Any, tokens: int) -> list[Any]:
    """Tokens, output logprobs and prompt logprobs of every request, as exact values."""
    prompts = [{"prompt_token_ids": vllm_model.prompt(seed)} for seed in (1, 2)]
    found = []
    for output in llm.generate(prompts, sampling(tokens), use_tqdm=False):
        [completion] = output.outputs
        found.append(
            (
                tuple(completion.token_ids),
                [exact(step) for step in completion.logprobs],
                [exact(step) for step in output.prompt_logprobs],
            )
        )
    return found


def exact(step: Any) -> list[tuple[int, float]] | None:
    return None if step is None else sorted((token, p.logprob) for token, p in step.items())


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    from vllm import LLM

    llm = LLM(str(model), **vllm_model.engine_arguments(), **vllm_model.asks_for_plugin())
    yield Engine(llm, installation.allocator(), answers(llm, LONG))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


@pytest.fixture(autouse=True)
def _awake(engine: Engine) -> Iterator[None]:
    yield
    engine.allocator.manager.device.clear_faults()
    if engine.executor.is_sleeping:
        engine.llm.wake_up()


def resident(allocator: HalMemAllocator) -> dict[str, int]:
    """Bytes of each tag that have a page now, by the kernel's own count."""
    ranges = {
        tag: [(address, address + data.handle[1]) for address, data in group]
        for tag, group in by_tag(allocator).items()
    }
    counts = dict.fromkeys(ranges, 0)
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field = line.split()[0]
        if "-" in field and not field.endswith(":"):
            begin, end = (int(part, 16) for part in field.split("-"))
        elif field == "Rss:":
            for tag, parts in ranges.items():
                if any(start < end and begin < stop for start, stop in parts):
                    counts[tag] += int(line.split()[1]) << 10
    return counts


def by_tag(allocator: HalMemAllocator) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for address, data in allocator.pointer_to_data.items():
        found.setdefault(data.tag, []).append((address, data))
    return found


def block_tables(engine: Engine) -> list[int]:
    """Addresses of the tensors in which the scheduler's blocks reach the kernels."""
    tables = engine.worker.model_runner.input_batch.block_table.block_tables
    return [table.block_table.gpu.data_ptr() for table in tables]


def test_every_tag_holds_something_and_the_model_lies_in_its_own(engine: Engine) -> None:
    held = engine.allocator.bytes_by_tag()
    assert set(held) == TAGS
    assert all(mapped > 0 and not asleep for mapped, asleep in held.values())
    assert held["weights"][0] >= WEIGHT_BYTES
    manager = engine.allocator.manager
    model = engine.worker.model_runner.model
    assert manager.outside(model) == ()
    assert {manager.tag_of(tensor) for tensor in model.parameters()} == {"weights"}
    assert {manager.tag_of(cache) for cache in engine.worker.model_runner.kv_caches} == {"kv_cache"}
    tables = engine.worker.model_runner.input_batch.block_table.block_tables
    assert {manager.tag_of(table.block_table.gpu) for table in tables} == {"runtime"}


def test_each_tags_pages_leave_and_the_same_bits_come_back(engine: Engine) -> None:
    tables, used = block_tables(engine), engine.allocator.get_current_usage()
    awake = resident(engine.allocator)
    engine.llm.sleep(level=1)
    assert engine.llm.llm_engine.is_sleeping()
    asleep = resident(engine.allocator)
    assert set(asleep) == TAGS
    for tag, size in awake.items():
        assert size > 0, tag
        assert asleep[tag] <= 0.05 * size, tag
    assert engine.allocator.get_current_usage() == used
    report = engine.llm.collective_rpc("hal_report")[0]
    assert {tag["tag"]: tag["policy"] for tag in report["last"]["tags"]} == {
        "weights": "offload",
        "runtime": "offload",
        "kv_cache": "discard",
        "workspace": "discard",
    }
    assert engine.llm.wake_up()
    assert not engine.llm.llm_engine.is_sleeping()
    assert block_tables(engine) == tables
    assert engine.same()


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_a_selective_wake_restores_the_rest_and_leaves_one_tag(
    engine: Engine, order: tuple[str, str]
) -> None:
    tables = block_tables(engine)
    engine.llm.sleep(level=1)
    assert not engine.llm.wake_up([order[0]])
    assert engine.allocator.sleeping_tags == {order[1]}
    assert engine.llm.llm_engine.is_sleeping()
    assert engine.llm.wake_up([order[1]])
    assert block_tables(engine) == tables
    assert engine.same()


def test_level_2_takes_the_weights_from_disk_again(engine: Engine) -> None:
    engine.llm.sleep(level=2)
    report = engine.llm.collective_rpc("hal_report")[0]
    assert {t["policy"] for t in report["last"]["tags"] if t["tag"] == "weights"} == {"discard"}
    engine.llm.wake_up(["weights"])
    assert not any(parameter.any() for parameter in engine.worker.model_runner.model.parameters())
    engine.llm.collective_rpc("reload_weights")
    assert engine.llm.wake_up(["kv_cache"])
    assert engine.same()


def test_nothing_of_the_discarded_cache_is_hit_again(engine: Engine) -> None:
    def cached() -> int:
        prompt = {"prompt_token_ids": vllm_model.prompt(3)}
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=1)
        [output] = engine.llm.generate([prompt], greedy, use_tqdm=False)
        return int(output.num_cached_tokens)

    assert cached() == 0
    assert cached() > 0
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    assert cached() == 0


def test_twenty_cycles_without_creep(engine: Engine) -> None:
    once = answers(engine.llm, SHORT)
    books = engine.allocator.manager.device.counters().as_dict()
    held = []
    for _ in range(CYCLES):
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
        held.append(engine.allocator.manager.held_bytes)
    now = engine.allocator.manager.device.counters().as_dict()
    for name in ("segments", "mapped_bytes", "asleep_bytes", "handles", "reservations", "pools"):
        assert now[name] == books[name], name
    assert len(set(held[1:])) == 1
    assert answers(engine.llm, SHORT) == once


def test_r13_a_wake_that_fails_stays_asleep_everywhere_and_the_next_one_works(
    engine: Engine,
) -> None:
    engine.llm.sleep(level=1)
    device = engine.allocator.manager.device
    device.fail("create", nth=3, code=NO_MEMORY, times=-1)
    with pytest.raises(OutOfDeviceMemory, match="OutOfDeviceMemory"):
        engine.llm.wake_up()
    assert engine.llm.llm_engine.is_sleeping()
    assert engine.executor.sleeping_tags == {"weights", "kv_cache"}
    assert engine.allocator.sleeping_tags == TAGS
    assert engine.worker.sleep_mode_backend.state() == "SUSPENDED"
    device.clear_faults()
    assert engine.llm.wake_up()
    assert engine.same()


def test_a_sleep_that_fails_stays_awake_everywhere(engine: Engine) -> None:
    device = engine.allocator.manager.device
    device.fail("file write", nth=2, code=OTHER)
    with pytest.raises(HalError):
        engine.llm.sleep(level=2)
    device.clear_faults()
    assert not engine.executor.is_sleeping
    assert not engine.allocator.sleeping_tags
    assert engine.worker.sleep_mode_backend.state() == "RUNNING"
    assert not engine.worker._sleep_saved_buffers
    engine.llm.wake_up()  # the scheduler alone was paused
    assert engine.same()


def test_a_sleep_that_cannot_be_undone_is_a_sleep(engine: Engine) -> None:
    device = engine.allocator.manager.device
    device.fail("release", nth=2, code=OTHER)
    device.fail("create", code=NO_MEMORY, times=-1)
    engine.llm.sleep(level=1)
    device.clear_faults()
    assert engine.executor.sleeping_tags == {"weights", "kv_cache"}
    assert engine.allocator.sleeping_tags == TAGS
    assert engine.llm.wake_up()
    assert engine.same()


def test_a_complaint_after_the_memory_has_gone_is_no_failed_sleep(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = engine.worker.sleep_mode_backend
    suspend = backend.suspend

    def suspend_and_complain(level: int) -> None:
        suspend(level)
        raise AssertionError("Memory usage increased after sleeping.")

    monkeypatch.setattr(backend, "suspend", suspend_and_complain)
    engine.llm.sleep(level=1)
    assert engine.executor.sleeping_tags == {"weights", "kv_cache"}
    assert engine.allocator.sleeping_tags == TAGS
    assert engine.llm.wake_up()
    assert engine.same()


def with_parking(engine: Engine, monkeypatch: pytest.MonkeyPatch, park: Any) -> None:
    monkeypatch.setattr(engine.allocator, "options", PluginOptions(park=True))
    monkeypatch.setattr(engine.allocator, "park", park)


def test_an_engine_that_cannot_be_parked_sleeps_all_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise Unsupported("parking", "cpu", "the host has no driver state")

    with_parking(engine, monkeypatch, refuse)
    engine.llm.sleep(level=1)
    assert not engine.worker.parked
    assert engine.executor.sleeping_tags == {"weights", "kv_cache"}
    assert engine.llm.wake_up()
    assert engine.same()


def test_while_parked_the_device_is_asked_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    asked = []
    with_parking(engine, monkeypatch, lambda: asked.append("park"))
    engine.llm.sleep(level=1)
    assert engine.worker.parked
    monkeypatch.setattr(WorkerBase, "synchronize_device", lambda _: asked.append("synchronize"))
    engine.llm.sleep(level=1)  # it sleeps already; vLLM synchronizes before it finds out
    assert asked == ["park"]
    assert engine.llm.wake_up()
    assert not engine.worker.parked
    assert engine.same()
