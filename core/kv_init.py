"""The scope around KV initialisation: state in `runtime`, the KV backing allocation alone in
`kv_cache`.

Block tables, slot mappings and attention metadata made while the KV cache is set up must outlive a
sleep; the cache itself must not be copied. Where nested pool scopes give an allocation to the
innermost one (LIFO) the runtime pool is open around the whole and the cache's pool within it. Where
they give it to the outermost (FIFO), nesting would put the cache into the runtime pool, so either
the state stays outside every pool (`fallback`: it stays on the device while asleep), or the outer
scope is left while the inner one is open (`flatten`, where a probe has shown that it works).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from hal.core.appearances import Appearances
from hal.core.contents import Tensors, named_tensors
from hal.core.kv_profiling import undone
from hal.core.tags import KV_CACHE, RUNTIME
from hal.errors import InvalidArgument, StateError, Unsupported
from hal.platform import Capabilities, PoolNesting
from hal.pools import storage_address

if TYPE_CHECKING:
    from hal.core.sleep import SleepManager

T = TypeVar("T", bound=Tensors)
Nesting = Literal["auto", "fallback", "flatten"]


@dataclass(frozen=True)
class AuditFinding:
    """A live allocation in `kv_cache` that was not declared as KV payload."""

    address: int
    bytes: int
    shape: tuple[int, ...] | None
    where: str

    def __str__(self) -> str:
        shape = f" of shape {list(self.shape)}" if self.shape is not None else ""
        return f"{self.bytes} bytes{shape} made at {self.where}"


class KVInitScope:
    """A context manager around KV initialisation; made by `SleepManager.kv_init`.

    Inside it, `with kv.cache():` opens the `kv_cache` pool and `kv.declare(tensors)` says which
    tensors are KV payload. At the end an audit lists every other live allocation made in `kv_cache`
    in `findings`: a warning, or with `strict` a `StateError`.
    """

    def __init__(self, manager: SleepManager, *, nesting: Nesting, strict: bool) -> None:
        self._manager, self._strict = manager, strict
        self.strategy = _strategy(manager.capabilities, nesting)
        self.findings: tuple[AuditFinding, ...] = ()
        self._payload: set[int] = set()
        self._before: set[int] = set()
        self._appeared = Appearances(locate=True)
        self._runtime = ExitStack()

    def __enter__(self) -> Self:
        self._before = set(self._live())
        self._open_runtime()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime.close()
        if kind is None:
            self._audit()

    def _open_runtime(self) -> None:
        if self.strategy != "fallback":
            self._runtime.enter_context(self._manager.pool(RUNTIME))

    @contextmanager
    def cache(self) -> Iterator[Self]:
        """Open the `kv_cache` pool for the backing allocation, and nothing else."""
        if self.strategy == "flatten":
            self._runtime.close()
        try:
            with self._manager.pool(KV_CACHE), self._appeared:
                yield self
        finally:
            if self.strategy == "flatten":
                self._open_runtime()

    @contextmanager
    def profiling(self, *holders: object) -> Iterator[Self]:
        """Build KV state outside every pool, for a memory-profiling pass, and undo it at the end.

        `holders` are the engine's objects that the pass hangs its state on: they get back their
        attributes, and their lists, dicts and sets what these held. A tensor that something else
        still holds would meet the real initialisation: a warning, or with `strict` a `StateError`.
        """
        self._runtime.close()
        try:
            with undone(holders) as left_over:
                yield self
        finally:
            self._open_runtime()
        self._tell(left_over, "tensor(s) of the profiling pass are held beyond it; drop them")

    def declare(self, payload: T) -> T:
        """Say that tensors are KV payload, whose contents a sleep may give up; returns them."""
        self._payload |= {storage_address(t) for t in named_tensors(payload).values()}
        return payload

    def _audit(self) -> None:
        undeclared = {
            address: size
            for address, size in self._live().items()
            if address not in self._before and address not in self._payload
        }
        self.findings = tuple(self._finding(*block) for block in sorted(undeclared.items()))
        self._tell(
            self.findings,
            "allocation(s) in 'kv_cache' were not declared as KV payload and lose their contents "
            "with it; allocate them outside cache(), or declare() them",
        )

    def _tell(self, findings: Sequence[object], what: str) -> None:
        if not findings:
            return
        text = f"{len(findings)} {what}: {'; '.join(map(str, findings))}"
        if self._strict:
            raise StateError(text)
        warnings.warn(text, stacklevel=4)

    def _live(self) -> dict[int, int]:
        return dict(self._manager.live_blocks(KV_CACHE))

    def _finding(self, address: int, size: int) -> AuditFinding:
        if made := self._appeared.live.get(address):
            return AuditFinding(address, made.bytes, made.shape, made.where)
        return AuditFinding(address, size, None, "a library's own memory, unseen by the dispatcher")


def _strategy(
    capabilities: Capabilities, nesting: Nesting
) -> Literal["nest", "fallback", "flatten"]:
    match nesting:
        case "auto":
            return "nest" if capabilities.pool_nesting is PoolNesting.LIFO else "fallback"
        case "fallback":
            return nesting
        case "flatten":
            if not capabilities.flatten:
                raise Unsupported(
                    "nesting='flatten'", capabilities.name, capabilities.flatten.reason
                )
            return nesting
    raise InvalidArgument(f"nesting={nesting!r}: use 'auto', 'fallback' or 'flatten'")
