"""What a round serves: requests as values, and what came back, down to the bits."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

ROUND = 553
"""Requests a round: more than eight batches of 64, and the last one is not full."""

_PREFIXES, _PREFIX_TOKENS, _SHARED = 4, 8, 0.3
_EXPONENT = 0x7F800000
"""The bits of a float32 that are all set in NaN and infinities."""


@dataclass(frozen=True)
class Request:
    """One prompt with its own sampling parameters and seed; `top_k=1` is greedy decoding."""

    id: int
    prompt: tuple[int, ...]
    output_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class Completion:
    """What one request got; log-probabilities as bits of float32, so that NaN and -0.0 count."""

    request: int
    tokens: tuple[int, ...]
    logprob_bits: tuple[int, ...]
    prompt_logprob_bits: tuple[int, ...]

    @property
    def is_finite(self) -> bool:
        """Whether every log-probability is a number."""
        bits = (*self.logprob_bits, *self.prompt_logprob_bits)
        return all(each & _EXPONENT != _EXPONENT for each in bits)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return _floats(self.logprob_bits)

    @property
    def prompt_logprobs(self) -> tuple[float, ...]:
        return _floats(self.prompt_logprob_bits)


@dataclass(frozen=True)
class Shape:
    """Bounds of a workload, inclusive, in tokens."""

    vocabulary: int
    prompt: tuple[int, int] = (4, 24)
    output: tuple[int, int] = (4, 8)


def workload(count: int, shape: Shape, seed: int = 0) -> tuple[Request, ...]:
    """`count` requests that depend on `seed` alone; three in ten share one of four prefixes."""
    draw = random.Random(seed)  # noqa: S311 - requests are no secret
    prefixes = [_tokens(draw, _PREFIX_TOKENS, shape) for _ in range(_PREFIXES)]
    return tuple(_request(index, draw, prefixes, shape) for index in range(count))


def _request(
    index: int, draw: random.Random, prefixes: list[tuple[int, ...]], shape: Shape
) -> Request:
    prompt = _tokens(draw, draw.randint(*shape.prompt), shape)
    prefix = draw.choice(prefixes) if draw.random() < _SHARED else ()
    return Request(
        id=index,
        prompt=(prefix + prompt)[: max(len(prompt), len(prefix) + 1)],
        output_tokens=draw.randint(*shape.output),
        seed=draw.getrandbits(62),
        temperature=draw.choice((0.7, 1.0, 1.3)),
        top_k=draw.choice((1, 8, 20, 64)),
        top_p=draw.choice((0.8, 0.95, 1.0)),
    )


def _tokens(draw: random.Random, count: int, shape: Shape) -> tuple[int, ...]:
    return tuple(draw.randrange(shape.vocabulary) for _ in range(count))


def _floats(bits: tuple[int, ...]) -> tuple[float, ...]:
    return struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))


def differences(reference: Completion, other: Completion) -> tuple[str, ...]:
    """Which of tokens, output logprobs and prompt logprobs differ in at least one bit."""
    return tuple(_differing(reference, other))


def _differing(reference: Completion, other: Completion) -> Iterator[str]:
    if reference.tokens != other.tokens:
        yield "tokens"
    if reference.logprob_bits != other.logprob_bits:
        yield "output logprobs"
    if reference.prompt_logprob_bits != other.prompt_logprob_bits:
        yield "prompt logprobs"
