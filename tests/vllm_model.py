"""A Qwen3 made on the spot for a real vLLM engine on the host: seeded weights, a word-level
tokenizer, and the arguments with which the plugin is on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY, HIDDEN, LAYERS, INTERMEDIATE, HEADS, KV_HEADS, HEAD = 8000, 1024, 4, 3072, 8, 4, 128
KV_BYTES = 128 << 20
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # how work is split must not depend on the machine, or bits may
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


def write_model(folder: Path) -> Path:
    """Write configuration, tokenizer and 283 MB of float32 weights; returns the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config()))
    _write_tokenizer(folder)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: index for index, word in enumerate(special)}
    words |= {f"t{index}": index for index in range(len(special), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def weights() -> dict[str, torch.Tensor]:
    """Seeded weights by their checkpoint names, scaled so that tokens differ."""
    generator = torch.Generator().manual_seed(1234)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0, gain / columns**0.5, generator=generator)

    found = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 4.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    query, kv = HEADS * HEAD, KV_HEADS * HEAD
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}self_attn.q_proj.weight": matrix(query, HIDDEN),
            f"{at}self_attn.k_proj.weight": matrix(kv, HIDDEN),
            f"{at}self_attn.v_proj.weight": matrix(kv, HIDDEN),
            f"{at}self_attn.o_proj.weight": matrix(HIDDEN, query),
            f"{at}self_attn.q_norm.weight": torch.ones(HEAD),
            f"{at}self_attn.k_norm.weight": torch.ones(HEAD),
            f"{at}mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
            f"{at}input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return found


def asks_for_plugin() -> dict[str, Any]:
    """The engine arguments that turn the plugin on, in the form that this vLLM has."""
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    if "sleep_mode_backend" in names:
        return {"enable_sleep_mode": True, "sleep_mode_backend": "hal"}
    return {"enable_sleep_mode": True, "additional_config": {"hal": {}}}


def engine_arguments() -> dict[str, Any]:
    """The arguments of a small deterministic engine, without sleep mode."""
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_BYTES,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "seed": 0,
    }


def prompt(seed: int, length: int = 140) -> list[int]:
    """Token ids of a prompt; longer than a cache block, so that a second run hits the cache."""
    return [
        4 + (seed * 977 + 131 * place * place + place) % (VOCABULARY - 4) for place in range(length)
    ]
