"""The reference engine's latent attention: decode steps go through `mla_decode` with scratch of the
workspace, and a verification notices what goes wrong around it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hal.core import BackupOptions, SleepManager
from hal.core.kernels.mla_decode import mla_decode_workspace_bytes
from hal.core.verify.config import Architecture, KVType
from hal.core.verify.engine import Execution, ReferenceEngine
from hal.core.verify.graphs import _capture_stream
from hal.core.verify.matrix.cells import Site, run_cell
from hal.core.verify.matrix.table import Matrix
from hal.core.verify.model import ModelConfig, Transformer
from hal.core.verify.report import Gate
from hal.core.verify.requests import Completion, workload
from hal.core.verify.state import EngineConfig
from hal.core.verify.subject import Setup, Subject
from hal.cpu.platform import CpuPlatform
from hal.platform import Platform
from recorded_graphs import RecordedGraph, RecordingPlatform, recorded_graphs

pytestmark = pytest.mark.usefixtures("one_thread")

__all__ = ["recorded_graphs"]

MATRIX = Matrix.load(Path(__file__).resolve().parents[2] / "ci" / "matrix.toml")
MODEL = ModelConfig(
    vocabulary=128,
    hidden=32,
    layers=2,
    heads=4,
    head_size=8,
    mlp=48,
    architecture=Architecture.MLA,
)
WHOLE = EngineConfig(model=MODEL, rows=10, prefill_rows=4, blocks=80)
DRAFT = replace(WHOLE, draft_tokens=2)
CHUNKED = replace(WHOLE, prefill_chunk=8)
REQUESTS = workload(14, WHOLE.shape, seed=3)


def stored_as(kind: KVType, config: EngineConfig = WHOLE) -> EngineConfig:
    return replace(config, model=replace(config.model, kv_type=kind))


def make(
    config: EngineConfig, platform: Platform | None = None, execution: Execution = "eager"
) -> ReferenceEngine:
    """An engine on poisoned memory: what a kernel reads unwritten is NaN."""
    options = BackupOptions(backing="anonymous")
    sleeper = SleepManager(platform or CpuPlatform(), backup=options, debug=True)
    return ReferenceEngine(sleeper, config, execution=execution)


def serve(engine: ReferenceEngine) -> dict[int, Completion]:
    engine.submit(REQUESTS)
    done: dict[int, Completion] = {}
    while engine.unfinished:
        done.update({each.request: each for each in engine.step()})
    return done


# ---- what it computes ----------------------------------------------------------------------------


def dense_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] with a head's own keys and values, and without a cache."""
    c, count = model.config, len(tokens)
    cosine, sine = (table[:count] for table in (model.rotary.cosine, model.rotary.sine))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)

    x = model.embedding[torch.tensor(tokens)]
    for layer in model.layers:
        own, normed = layer.attention, layer.attention_norm(x)
        plain, turned = own.queries(normed).view(count, c.heads, -1).split((c.head_size, 64), -1)
        latent, position = own.down(normed).split((512, 64), -1)
        maps = own.up.weight.view(2, c.heads, c.head_size, 512)
        keys, values = torch.einsum("tl,khdl->khtd", own.norm(latent), maps)
        position = rotated(position).expand(c.heads, -1, -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            torch.cat((plain.transpose(0, 1), rotated(turned.transpose(0, 1))), -1),
            torch.cat((keys, position), -1),
            values,
            is_causal=True,
        )
        x = x + own.output(mixed.transpose(0, 1).reshape(count, -1))
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.norm(x) @ model.head.weight.t()


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        pytest.param(WHOLE, 2e-4, id="whole"),
        pytest.param(DRAFT, 2e-4, id="draft"),
        pytest.param(CHUNKED, 2e-4, id="chunked"),
        pytest.param(stored_as(KVType.BFLOAT16, DRAFT), 0.1, id="bf16"),
    ],
)
def test_logprobs_are_those_of_heads_with_keys_of_their_own(
    config: EngineConfig, tolerance: float
) -> None:
    engine = make(config)
    served = serve(engine)
    for request in REQUESTS:
        done = served[request.id]
        tokens = [*request.prompt, *done.tokens]
        expected = dense_logits(engine.model, tokens).log_softmax(-1)
        chosen = expected[range(len(tokens) - 1), tokens[1:]]
        found = torch.tensor([*done.prompt_logprobs, *done.logprobs])
        torch.testing.assert_close(found, chosen, atol=tolerance, rtol=tolerance)


# ---- the kernel's scratch ------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WHOLE, DRAFT], ids=["whole", "draft"])
def test_decode_steps_take_their_scratch_from_the_workspace(config: EngineConfig) -> None:
    config = stored_as(KVType.BFLOAT16, config)
    engine = make(config)
    serve(engine)
    kernels = engine.workspace.kernels
    [slot] = kernels.report().slots
    needed = mla_decode_workspace_bytes(
        heads=MODEL.heads,
        rows=config.rows * config.step_tokens,
        max_tokens=config.context,
        device=engine.device,
    )
    assert kernels.is_locked
    assert (slot.high_water_owner, slot.high_water, slot.bytes) == ("mla_decode", needed, needed)
    assert kernels.findings == ()
    assert engine.registered()["workspace.kernels(0, 0)"].tag == "workspace"


def test_every_byte_of_its_workspace_is_registered() -> None:
    engine = make(stored_as(KVType.BFLOAT16))
    known = {
        entry.tensor.untyped_storage().data_ptr()
        for entry in engine.registered().values()
        if entry.tag == "workspace"
    }
    assert known == {address for address, _ in engine.sleeper.live_blocks("workspace")}


def test_latents_of_8_bits_are_read_without_the_kernel() -> None:
    engine = make(stored_as(KVType.FLOAT8))
    serve(engine)
    report = engine.workspace.kernels.report()
    assert [slot.high_water_owner for slot in report.slots] == ["topk_topp"]
    assert report.unreserved == ()


@pytest.mark.parametrize("kind", list(KVType), ids=lambda kind: kind.value)
@pytest.mark.parametrize("level", [1, 2])
def test_rounds_are_equal_over_a_sleep_that_discards_scratch(kind: KVType, level: int) -> None:
    engine = make(stored_as(kind))
    reference = serve(engine)
    addresses = {slot: each.data_ptr() for slot, each in engine.workspace.kernels.buffers.items()}
    engine.sleep(level)
    engine.sleeper.wake_up()
    if level == 2:
        engine.reload_weights()
    assert serve(engine) == reference
    now = {slot: each.data_ptr() for slot, each in engine.workspace.kernels.buffers.items()}
    assert now == addresses


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_a_closed_engine_leaves_nothing_mapped(asleep: bool) -> None:
    subject = Subject(Setup(CpuPlatform(), engine=stored_as(KVType.BFLOAT16)))
    serve(subject.engine)
    if asleep:
        subject.sleeper.sleep(level=1)
    subject.close()
    assert subject.device.counters().mapped_bytes == subject.others_mapped


@pytest.mark.parametrize("config", [WHOLE, DRAFT], ids=["whole", "draft"])
def test_replays_give_the_bits_of_operators_before_and_after_a_sleep(
    recorded_graphs: type[RecordedGraph], config: EngineConfig
) -> None:
    _capture_stream.cache_clear()
    config = stored_as(KVType.BFLOAT16, config)
    eager = serve(make(config))
    engine = make(config, RecordingPlatform(), "graphs")
    assert serve(engine) == eager
    engine.sleep(1)
    engine.sleeper.wake_up()
    assert serve(engine) == eager
    assert recorded_graphs.replays > 5
    _capture_stream.cache_clear()


# ---- what a verification notices -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cell", "gates"),
    [
        ("runtime-in-kv", "model=mla", {Gate.PLACEMENT, Gate.AUDIT, Gate.CONTENTS}),
        ("skip-restore", "model=mla", {Gate.CONTENTS, Gate.REQUESTS}),
        ("bit-flip", "model=mla", {Gate.CONTENTS, Gate.REQUESTS}),
        ("stale-index", "model=mla", {Gate.REQUESTS}),
        ("stale-index", "model=mla,speculation=draft", {Gate.REQUESTS}),
        ("reset-scales", "model=mla,kv=fp8", {Gate.CONTENTS, Gate.REQUESTS}),
        ("half-awake", "model=mla,fault=map@wake", {Gate.FAULTS}),
    ],
)
def test_a_break_fails_a_cell_of_latent_attention(name: str, cell: str, gates: set[Gate]) -> None:
    result = run_cell(Site("cpu", break_name=name), MATRIX.parse(cell), 12)
    found = {finding.gate for finding in result.findings}
    assert gates <= found, [str(finding) for finding in result.findings]
