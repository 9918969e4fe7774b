"""Tensors without numbers have the shapes, types and memory of torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.planning.shapes import LiveBytes, Shapes, ShapeTensor


def strided(given: Tensor) -> tuple[Tensor, ...]:
    rows, columns = given.transpose(0, 1), given[:, 1:]
    return rows, columns, torch.cat([rows.t(), columns], 1), given.view(2, 6), given.to(torch.bfloat16), given.double()


def mixed(given: Tensor) -> tuple[Tensor, ...]:
    return given * 2, given > 0, given.long() + 1, given.long() + 1.0, given + torch.tensor(1.0), given.sum().mul(3)


def attended(given: Tensor) -> tuple[Tensor, ...]:
    heads = given.view(1, 3, 4, 1).expand(2, 3, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return (
        functional.scaled_dot_product_attention(heads, heads, heads, mask),
        given.softmax(-1),
        torch.var_mean(given, 0)[1],
    )


def layered(given: Tensor) -> tuple[Tensor, ...]:
    images = given.view(1, 3, 2, 2).expand(5, 3, 2, 2)
    last = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # channels last in memory
    weight, bias = torch.zeros(6, 3, 1, 1), torch.zeros(6)
    convolved = [functional.conv2d(each, weight, bias) for each in (images.contiguous(), last)]
    return *convolved, functional.layer_norm(given, (4,)), *given.split([1, 3], -1)


@pytest.mark.parametrize("compute", [strided, mixed, attended, layered], ids=lambda each: each.__name__)
def test_operations_return_what_torchs_do(compute: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    expected = compute(torch.ones(3, 4))
    for _ in range(2):  # the second time it is known
        with Shapes():
            made = compute(torch.ones(3, 4))
        for one, other in zip(made, expected, strict=True):
            assert isinstance(one, ShapeTensor)
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one.device == other.device


def test_memory_is_counted_once_and_given_back() -> None:
    for _ in range(2):  # the second time, what operations return is known
        with Shapes(), LiveBytes([]) as live:
            made = torch.zeros(1000)
            assert live.now == 4000
            views = made.view(10, 100), made[5:], made.add_(1.0)
            assert live.now == 4000
            assert views[2] is made, "what is changed in place is the same tensor"
            other = made * 2
            assert (live.now, live.peak) == (8000, 8000)
            del other
            assert (live.now, live.peak) == (4000, 8000)
            del made
            assert live.now == 4000, "its views are there"
            del views
            assert (live.now, live.peak) == (0, 8000)


def test_gradients_have_the_types_and_shapes_of_real_ones() -> None:
    """Also with lower precision: a layer of float32 that computes in bfloat16."""
    layer = nn.Linear(8, 4)
    fake = nn.Linear(8, 4)
    fake.weight, fake.bias = (nn.Parameter(ShapeTensor.like(each)) for each in (layer.weight.data, layer.bias.data))
    with torch.autocast("cpu", torch.bfloat16):
        real = layer(torch.ones(2, 8))
        with Shapes():
            made = fake(torch.ones(2, 8))
    assert (made.dtype, made.shape) == (real.dtype, real.shape)
    made.sum().backward()
    assert isinstance(fake.weight.grad, ShapeTensor)
    assert (fake.weight.grad.dtype, fake.weight.grad.shape) == (torch.float32, (4, 8))


def test_a_condition_is_false_and_a_number_zero() -> None:
    with Shapes():
        assert not (torch.ones(1) > 0)
        assert int(torch.ones(1)) == 0
        assert torch.ones(2, 3).numpy().shape == (2, 3)
