"""Every new storage that the dispatcher sees in a scope is in the pool, with torch's own values."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hal.core import SleepManager
from hal.errors import OutOfDeviceMemory
from hal.host_pool import HostPool
from hal.platform import Platform
from hal.pools import Pool
from support import MIB, Target, hold

X = torch.linspace(-1, 1, 35).view(5, 7)
Make = Callable[[], torch.Tensor]

FACTORIES: dict[str, Make] = {
    "zeros": lambda: torch.zeros(3, 4, dtype=torch.bfloat16),
    "ones": lambda: torch.ones(3, dtype=torch.int64),
    "full": lambda: torch.full((3, 2), 2.5),
    "full of bool": lambda: torch.full((3,), True),
    "full with a keyword": lambda: torch.full(size=(3,), fill_value=4),
    "rand": lambda: torch.rand(1000),
    "randn": lambda: torch.randn(1000, dtype=torch.bfloat16),
    "randn with a generator": lambda: torch.randn(99, generator=torch.Generator().manual_seed(3)),
    "randint": lambda: torch.randint(5, (100,)),
    "randint from low": lambda: torch.randint(3, 50, (100,)),
    "randint generator": lambda: torch.randint(
        3, 50, (100,), generator=torch.Generator().manual_seed(1)
    ),
    "zeros_like of a transpose": lambda: torch.zeros_like(X.t()),
    "full_like": lambda: torch.full_like(X, 9),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "new_full": lambda: X.new_full((2, 2), 3),
    "new_zeros": lambda: X.new_zeros(4),
    "new_ones": lambda: X.new_ones(4),
    "arange": lambda: torch.arange(10),
    "linspace": lambda: torch.linspace(0, 1, 10),
    "randperm": lambda: torch.randperm(50),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "scalar tensor": lambda: torch.tensor(3),
    "from_numpy": lambda: torch.from_numpy(np.arange(6.0)),
}
OPERATORS: dict[str, Make] = {
    "add": lambda: X + 1,
    "compare": lambda: X > 0,
    "sum": X.sum,
    "matmul": lambda: X @ X.t(),
    "clone keeps strides": lambda: X.t().clone(),
    "to another dtype": lambda: X.to(torch.float64),
    "fp8": lambda: X.to(torch.float8_e4m3fn).view(torch.uint8),
    "complex": lambda: torch.complex(X, X),
    "cat": lambda: torch.cat([X, X]),
    "topk": lambda: torch.topk(X, 2).values,
    "split of a new tensor": lambda: (X * 2).split(2)[1],
}


@pytest.fixture(autouse=True)
def _on_the_host(target: Target) -> None:
    target.require("host tensors")


@pytest.fixture
def pool(platform: Platform) -> Pool:
    return platform.create_pool("weights")


@pytest.mark.parametrize("name", [*FACTORIES, *OPERATORS])
def test_values_shapes_and_strides_are_torchs_own(pool: Pool, name: str) -> None:
    make = FACTORIES.get(name) or OPERATORS[name]
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    with pool.use():
        made = make()
    assert pool.owns(made.data_ptr())
    assert not pool.owns(expected.data_ptr())
    assert (made.dtype, made.shape, made.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert torch.equal(made, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 4),
        lambda: torch.empty_like(X),
        lambda: torch.empty_strided((2, 3), (1, 2)),
        lambda: X.new_empty(7),
    ],
)
def test_uninitialised_tensors_are_in_the_pool(pool: Pool, make: Make) -> None:
    with pool.use():
        made = make()
    assert pool.owns(made.data_ptr())
    assert made.stride() == make().stride()


def test_views_aliases_in_place_and_out_keep_their_storage(pool: Pool) -> None:
    own, out = X.clone(), torch.empty_like(X)
    with pool.use():
        assert own.view(7, 5).data_ptr() == own.data_ptr()
        assert own.add_(1) is own
        assert torch.add(own, 1, out=out) is out
        assert own.detach().data_ptr() == own.data_ptr()
    assert not pool.owns(own.data_ptr())
    assert not pool.owns(out.data_ptr())


def test_outputs_that_share_a_storage_still_share_it(pool: Pool) -> None:
    with pool.use():
        pair = torch.ones(8).chunk(2)
    assert pair[0].untyped_storage().data_ptr() == pair[1].untyped_storage().data_ptr()


def test_modules_gradients_and_optimizers_are_in_the_pool(pool: Pool) -> None:
    with pool.use():
        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        layer(torch.randn(3, 64)).sum().backward()
    for parameter in layer.parameters():
        assert isinstance(parameter, torch.nn.Parameter)
        assert pool.owns(parameter.data_ptr())
        assert pool.owns(parameter.grad.data_ptr())


def test_a_factory_never_takes_twice_its_size(target: Target) -> None:
    platform = target.make(capacity=10 * MIB)
    pool = platform.create_pool("weights")
    for make in (torch.zeros, torch.ones, torch.empty, torch.rand):
        with pool.use():
            tensor = make(2 * MIB, dtype=torch.float32)
        assert pool.owns(tensor.data_ptr())
        del tensor
        gc.collect()


def test_what_bypasses_the_dispatcher_is_listed_as_outside(sleeper: SleepManager) -> None:
    data = bytearray(b"\1" * 64)
    with sleeper.pool("weights"):
        inside = torch.ones(16)
        outside = torch.frombuffer(data, dtype=torch.uint8)
    assert sleeper.outside({"inside": inside, "mapped file": outside}) == ("mapped file",)


def test_nothing_changes_outside_the_scope_or_on_other_threads(pool: Pool) -> None:
    made: list[torch.Tensor] = []
    with pool.use():
        thread = threading.Thread(target=lambda: made.append(torch.ones(10)))
        thread.start()
        thread.join()
        hold(torch.ones(10))
    made.append(torch.ones(10))
    assert not any(pool.owns(tensor.data_ptr()) for tensor in made)


def test_r49_trim_returns_bytes_also_from_another_thread(pool: Pool) -> None:
    freed: list[int] = []
    with pool.use():
        tensor = torch.ones(4 * MIB, dtype=torch.uint8)
        del tensor
        gc.collect()
        thread = threading.Thread(target=lambda: freed.append(pool.trim()))
        thread.start()
        thread.join()
    assert freed == [4 * MIB]


def test_too_little_memory_is_typed_and_leaves_the_pool_usable(target: Target) -> None:
    pool = target.make(capacity=8 * MIB).create_pool("weights")
    with pytest.raises(OutOfDeviceMemory, match="'weights'"), pool.use():
        torch.empty(100 * MIB, dtype=torch.uint8)
    with pool.use():
        assert torch.ones(10).sum() == 10


def test_r46_a_tensor_may_outlive_its_pool_and_the_interpreter(run_python: Callable) -> None:
    code = """
import torch
from hal.cpu.platform import CpuPlatform
platform = CpuPlatform()
def make():
    pool = platform.create_pool("weights")
    with pool.use():
        return torch.ones(1000)
kept = make()
import gc; gc.collect()
assert kept.sum() == 1000
at_exit = make()
del kept; gc.collect()
assert platform.device().counters().segments == 1
print("end")
"""
    for _ in range(2):
        done = run_python("-c", code)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_pool_is_closed_with_its_last_tensor(pool: HostPool) -> None:
    with pool.use():
        tensor = torch.ones(MIB)
    pool.close()
    assert len(pool.device.segments(pool.id)) == 1
    del tensor
    gc.collect()
    assert pool.device.segments(pool.id) == []
