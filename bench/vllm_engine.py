"""One engine of `vllm_sleep.py` in a process of its own: measures sleeps and wakes of one way to
sleep, compares tokens, logprobs and weights bit for bit, and writes what it found as JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
GIB = 1 << 30
HEAD = 128
REST_SECONDS = 0.3
"""Between a sleep and its wake: a driver clears what was released in the background, and a wake in
the same moment waits for that.
"""
HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print(held.numel(), flush=True)
sys.stdin.read()
"""
"""Takes the device's memory but for some bytes, until its standard input closes."""


# -- the model


def write_model(settings: dict[str, Any]) -> Path:
    """Write a Qwen3's configuration and a word-level tokenizer; weights come from a seed."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    hidden, vocabulary = settings["hidden"], settings["vocab"]
    folder = Path(settings["workdir"]) / f"qwen3-{hidden}-{settings['layers']}-{vocabulary}"
    folder.mkdir(parents=True, exist_ok=True)
    heads = max(hidden // HEAD, 1)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": settings["layers"],
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1),
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: index for index, word in enumerate(special)}
    words |= {f"t{index}": index for index in range(len(special), vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def fill_weights(model: Any) -> int:
    """Fill every parameter in place from a seed; returns the bytes of them all."""
    import torch

    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(1234)
    size = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            size += weight.nbytes
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            gain = 4.0 if "lm_head" in name else 1.0
            scale = 1.0 if "embed" in name else gain / weight.shape[-1] ** 0.5
            weight.normal_(0.0, scale, generator=generator)
    return size


def weight_sums(model: Any) -> dict[str, int]:
    """The sum of each weight's bytes: one flipped bit changes it."""
    import torch

    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: int(weight.detach().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
        for name, weight in named
        if weight.numel()
    }


# -- memory, seen from outside torch


READER = """
import json, sys, pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
for _ in sys.stdin:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    own = [p.usedGpuMemory for p in processes if p.pid == int(sys.argv[1])]
    used = pynvml.nvmlDeviceGetMemoryInfo(device).used
    print(json.dumps([used, own[0] if own else None]), flush=True)
"""


class Meter:
    """Device memory by the management library, and host memory by the kernel.

    Another process asks the library: in one that is parked its queries wait for the wake.
    """

    def __init__(self, device: str) -> None:
        self._reader: subprocess.Popen[str] | None = None
        if device != "cpu":
            command = [sys.executable, "-c", READER, str(os.getpid())]
            pipe = subprocess.PIPE
            self._reader = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def _read(self) -> tuple[int, int | None]:
        if self._reader is None or self._reader.stdin is None or self._reader.stdout is None:
            return 0, None
        self._reader.stdin.write("\n")
        self._reader.stdin.flush()
        device, process = json.loads(self._reader.stdout.readline())
        return device, process

    def device_used(self) -> int:
        """Bytes in use on the device, by all processes; 0 on the host."""
        return self._read()[0]

    def process_used(self) -> int | None:
        """Bytes that this process holds on the device; None where the library does not tell."""
        return self._read()[1]

    @staticmethod
    def resident() -> int:
        """Bytes of host memory that this process has pages for."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def pinned_by_torch(self) -> int:
        """Bytes of pinned memory in torch's cache."""
        if self._reader is None:
            return 0
        import torch

        stats = torch.cuda.memory.host_memory_stats()
        names = ("reserved_bytes.current", "reserved_bytes.all.current", "allocated_bytes.current")
        return next((int(stats[name]) for name in names if name in stats), 0)

    def all(self) -> dict[str, Any]:
        """Every figure."""
        return {
            "device_used": self.device_used(),
            "process_used": self.process_used(),
            "resident": self.resident(),
        }


# -- the engine


class Run:
    """An engine, what it answered before its first sleep, and what was measured since."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.meter = Meter(settings["device"])
        self.found: dict[str, Any] = {"checks": {}, "events": []}
        self.note("before the engine")
        start = time.perf_counter()
        self.llm = make_engine(settings)
        self.note("engine up", seconds=time.perf_counter() - start)
        self.found["weight_bytes"] = self.llm.apply_model(fill_weights)[0]
        self.prompts = make_prompts(settings)
        self.answers()  # what is compiled at first use
        self.reference, self.sums = self.answers(), self.weights()
        self.check("repeat without a sleep")

    @property
    def is_ours(self) -> bool:
        return self.settings["variant"] != "stock"

    def note(self, what: str, **more: Any) -> None:
        self.found["events"].append({"what": what, **more, **self.meter.all()})
        print(json.dumps(self.found["events"][-1]), flush=True)

    def answers(self) -> list[Any]:
        """Tokens and logprobs of every prompt, greedy and sampled, as exact values."""
        from vllm import SamplingParams

        common = {"ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1}
        common["max_tokens"] = self.settings["tokens"]
        chosen = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
        greedy = SamplingParams(temperature=0.0, **common)
        sampled = [
            SamplingParams(**chosen, seed=1000 + n, **common) for n in range(len(self.prompts))
        ]
        outputs = [
            *self.llm.generate(self.prompts, greedy, use_tqdm=False),
            *self.llm.generate(self.prompts, sampled, use_tqdm=False),
        ]
        return [exact_output(output) for output in outputs]

    def weights(self) -> dict[str, int]:
        sums: dict[str, int] = self.llm.apply_model(weight_sums)[0]
        return sums

    def check(self, what: str) -> None:
        """Compare tokens, logprobs and weights with those before the first sleep."""
        now = self.answers()
        differing = sum(a != b for a, b in zip(now, self.reference, strict=True))
        same = not differing and self.weights() == self.sums
        self.found["checks"][what] = same
        print(f"{what}: {'same' if same else f'DIFFERENT ({differing} answers)'}", flush=True)

    def timed(self, what: str, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        self.note(what, seconds=seconds)
        return seconds

    def report(self) -> dict[str, Any]:
        """The plugin's own figures; empty for the stock allocator."""
        return self.llm.collective_rpc("hal_report")[0] if self.is_ours else {}

    # -- what is measured

    def cycles(self) -> None:
        """The first sleep, later ones, and what is held while asleep."""
        sleeps, wakes = [], []
        for cycle in range(self.settings["cycles"]):
            sleeps.append(self.timed(f"sleep {cycle}", lambda: self.llm.sleep(level=1)))
            if not cycle:
                self.found["asleep"] = {**self.meter.all(), **self._host_memory()}
                self.found["report"] = self.report()
            time.sleep(REST_SECONDS)
            wakes.append(self.timed(f"wake {cycle}", self.llm.wake_up))
            self.check(f"cycle {cycle}")
        self.found |= {"sleeps": sleeps, "wakes": wakes}

    def _host_memory(self) -> dict[str, int]:
        if not self.is_ours:
            return {"pinned": self.meter.pinned_by_torch()}
        held = self.llm.collective_rpc("hal_host_bytes")[0]
        return {"pinned": held["held"] + self.meter.pinned_by_torch(), "used": held["used"]}

    def selective(self) -> None:
        for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
            self.llm.sleep(level=1)
            for tag in order:
                self.timed(f"wake {tag}", lambda tag=tag: self.llm.wake_up([tag]))
            self.check(f"{order[0]} first")

    def level_2(self) -> None:
        self.timed("sleep(2)", lambda: self.llm.sleep(level=2))
        self.timed("wake weights after level 2", lambda: self.llm.wake_up(["weights"]))
        self.llm.apply_model(fill_weights)
        self.llm.wake_up(["kv_cache"])
        self.check("level 2")

    def many(self) -> None:
        """Cycles without answers in between, and memory after each."""
        used, resident = [], []
        for _ in range(self.settings["many"]):
            self.llm.sleep(level=1)
            used.append(self.meter.device_used())
            self.llm.wake_up()
            resident.append(self.meter.resident())
        self.found["many"] = {"asleep": used, "resident": resident}
        self.check(f"{self.settings['many']} cycles")

    def contended(self) -> None:
        """A wake while another process has the memory, and one when it has gone."""
        self.llm.sleep(level=1)
        with hog(keeps=4 * GIB):
            try:
                self.llm.wake_up()
                failure = "none"
            except Exception as error:  # noqa: BLE001 - its type is what is measured
                failure = type(error).__name__
        asleep = self.llm.llm_engine.is_sleeping()
        self.found["contended"] = {"error": failure, "asleep": asleep}
        self.llm.wake_up()
        self.check("a wake after one that did not fit")


def make_engine(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(write_model(settings)),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 1024,
        "max_num_seqs": settings["prompts"],
        "kv_cache_memory_bytes": int(settings["kv_gib"] * GIB),
        "enable_prefix_caching": False,
        "enable_sleep_mode": True,
        "disable_log_stats": True,
    }
    if settings["device"] == "cpu":
        arguments["enforce_eager"] = True
    else:
        arguments |= {
            "attention_backend": "TRITON_ATTN",
            "gpu_memory_utilization": 0.5,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
            },
            "sleep_mode_offload_cudagraph": settings["offload_graphs"],
        }
        if settings["variant"] != "stock":
            arguments["sleep_mode_backend"] = "hal"
    if settings["variant"] != "stock":
        arguments["additional_config"] = {"hal": settings["options"]}
    return LLM(**arguments)


def make_prompts(settings: dict[str, Any]) -> list[dict[str, list[int]]]:
    source = random.Random(7)
    lengths = [source.randint(5, 200) for _ in range(settings["prompts"])]
    return [
        {"prompt_token_ids": [source.randrange(4, settings["vocab"]) for _ in range(length)]}
        for length in lengths
    ]


def exact_output(output: Any) -> tuple[Any, ...]:
    [completion] = output.outputs
    steps = [*completion.logprobs, *(output.prompt_logprobs or ())]
    return tuple(completion.token_ids), [
        None if step is None else sorted((token, p.logprob) for token, p in step.items())
        for step in steps
    ]


@contextmanager
def hog(*, keeps: int) -> Iterator[None]:
    """Another process that has the device's memory but for `keeps` bytes."""
    command = [sys.executable, "-c", HOG, str(keeps)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        if not process.stdout or not process.stdout.readline().strip():
            raise RuntimeError("the other process could not take the memory")
        yield


def main() -> int:
    settings = json.loads(sys.argv[1])
    os.environ |= ENVIRONMENT | {
        "VLLM_CACHE_ROOT": f"{settings['workdir']}/cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{settings['workdir']}/inductor",
    }
    if settings["variant"] == "stock":
        os.environ["VLLM_PLUGINS"] = "none"  # as if no plugin were installed
    run = Run(settings)
    target = Path(settings["result"])
    try:
        for name in settings["steps"]:
            getattr(run, name)()
            target.write_text(json.dumps(run.found))
    except Exception as error:
        run.found["error"] = f"{type(error).__name__}: {error}"
        target.write_text(json.dumps(run.found))
        raise
    return 0 if all(run.found["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
