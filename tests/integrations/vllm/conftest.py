"""What the tests of the plugin share: the environment, before vLLM is imported, and a model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import vllm_model

if importlib.util.find_spec("vllm"):
    os.environ |= {**vllm_model.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with 270 MiB of weights on disk."""
    return vllm_model.write_model(tmp_path_factory.mktemp("qwen3"))
