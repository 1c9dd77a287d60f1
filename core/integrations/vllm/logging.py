"""The plugin's logger: below vLLM's, whose handler alone prints."""

from __future__ import annotations

import logging


def logger() -> logging.Logger:
    """A child of vLLM's logger, which formats and filters as the operator has asked."""
    return logging.getLogger("vllm.hal")
