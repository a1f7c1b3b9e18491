"""The C kernels of a decoder layer's dense parts, each variant that this machine runs, against numpy in float64."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.models.dense import DenseKernels, Heads, Linear, RMSNorm
from engine.native import core

Float64 = NDArray[np.float64]
VARIANTS = {"portable": 0, "avx2": 1, "avx512": 2}
TOKENS = [1, 2, 7, 331]
EPSILON = 1e-5


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> DenseKernels:
    number = VARIANTS[request.param]
    if not core().lib.kf_runs_variant(number, 16):
        pytest.skip(f"this CPU has no {request.param}")
    return DenseKernels(number)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear_module(inputs: int, outputs: int, bias: bool = False, seed: int = 1) -> Any:
    module = torch.nn.Linear(inputs, outputs, bias).requires_grad_(False)
    module.weight.copy_(draw(outputs, inputs, seed=seed))
    return module


def norm_of(width: int, seed: int = 0) -> RMSNorm:
    module: Any = torch.nn.Module()
    module.weight = draw(width, seed=seed)
    module.variance_epsilon = EPSILON
    return RMSNorm(module)


def exact(tensor: torch.Tensor) -> Float64:
    return tensor.detach().double().numpy()


def assert_close(found: torch.Tensor, expected: Float64) -> None:
    np.testing.assert_allclose(exact(found), expected, rtol=1e-4, atol=1e-4)


def normalised(rows: Float64, weight: Float64) -> Float64:
    scale: Float64 = 1 / np.sqrt((rows**2).mean(-1, keepdims=True) + EPSILON)
    return rows * scale * weight


def rotated(heads: Float64, angles: Float64) -> Float64:
    """`heads` `[T, heads, dim]`; pair i of a head is its numbers i and i + dim / 2."""
    pairs = heads[..., : heads.shape[-1] // 2] + 1j * heads[..., heads.shape[-1] // 2 :]
    turned = pairs * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1), (64, 7), (100, 50), (36, 200), (5000, 9), (3, 33)])
def test_a_product_of_any_size(kernels: DenseKernels, tokens: int, inputs: int, outputs: int) -> None:
    x, module = draw(tokens, inputs), linear_module(inputs, outputs, bias=True)
    expected = exact(x) @ exact(module.weight).T + exact(module.bias)
    assert_close(kernels.multiply(x, Linear(module)), expected)


def test_a_product_is_added_to_what_is_there(kernels: DenseKernels) -> None:
    x, states, module = draw(5, 32), draw(5, 24, seed=2), linear_module(32, 24, bias=True)
    expected = exact(states) + exact(x) @ exact(module.weight).T + exact(module.bias)
    kernels.add_product(x, Linear(module), to=states)
    assert_close(states, expected)


@pytest.mark.parametrize("inputs", [64, 5000])
def test_a_row_comes_out_the_same_to_the_bit_alone_in_a_batch_and_with_more_threads(
    kernels: DenseKernels, inputs: int
) -> None:
    x, linear = draw(271, inputs), Linear(linear_module(inputs, 400))
    together = kernels.multiply(x, linear)
    for token in (0, 3, 63, 64, 255, 256, 270):
        assert torch.equal(kernels.multiply(x[token : token + 1], linear)[0], together[token])
    torch.set_num_threads(3)
    assert torch.equal(kernels.multiply(x, linear), together)


@pytest.mark.parametrize("bias", [False, True])
def test_joined_modules_are_one_product_and_leave_their_weights_to_it(kernels: DenseKernels, bias: bool) -> None:
    x, modules = draw(3, 32), [linear_module(32, outputs, bias, seed=outputs) for outputs in (24, 8, 4)]
    expected = np.concatenate([exact(module(x)) for module in modules], axis=1)
    linear = Linear(*modules)
    assert_close(kernels.multiply(x, linear), expected)
    assert all(module.weight.untyped_storage().nbytes() == 0 for module in modules)
    linear.give_back()
    assert_close(torch.cat([module(x) for module in modules], dim=1), expected)


def test_rows_of_weights() -> None:
    module, indices = linear_module(36, 50), torch.tensor([49, 0, 15, 16, 49])
    expected = module.weight[indices].clone()
    assert torch.equal(Linear(module).rows(indices), expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [4, 36, 576])
def test_norms(kernels: DenseKernels, tokens: int, width: int) -> None:
    x, norm = draw(tokens, width), norm_of(width, seed=3)
    assert_close(kernels.normalise(x, norm), normalised(exact(x), exact(norm.weight)))


@pytest.mark.parametrize("tokens", TOKENS)
def test_gates(kernels: DenseKernels, tokens: int) -> None:
    x = draw(tokens, 2 * 36) * 10
    gate, up = np.split(exact(x), 2, axis=1)
    assert_close(kernels.gate(x), gate / (1 + np.exp(-gate)) * up)


def test_gates_far_out(kernels: DenseKernels) -> None:
    gate = torch.tensor([[-1e30, -100.0, -88.5, 88.5, 100.0, 1e30, 0.0, torch.inf]])
    found = kernels.gate(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert_close(found, np.array([[0, 0, 0, 88.5, 100, np.float32(1e30), 0, np.inf]]))


def test_what_is_not_a_number_stays_so(kernels: DenseKernels) -> None:
    x = torch.full((1, 32), torch.nan)
    assert kernels.gate(x).isnan().all()
    assert kernels.normalise(x, norm_of(32)).isnan().all()
    assert kernels.multiply(x, Linear(linear_module(32, 8))).isnan().all()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("head_dim", [8, 24, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normalised_and_turned_and_values_left_alone(
    kernels: DenseKernels, tokens: int, head_dim: int, normed: bool
) -> None:
    norms = [norm_of(head_dim, seed=4), norm_of(head_dim, seed=5)] if normed else []
    heads, angles = Heads(5, 2, head_dim, norms), draw(tokens, head_dim // 2, seed=6) * 4
    packed = draw(tokens, 9 * head_dim)
    parts = np.split(exact(packed).reshape(tokens, 9, head_dim), (5, 7), axis=1)
    turned = torch.cat([angles, angles], dim=1)
    kernels.place(packed, heads, turned.cos(), turned.sin())
    if normed:
        parts[:2] = [normalised(part, exact(norm.weight)) for part, norm in zip(parts, norms, strict=False)]
    expected = [rotated(parts[0], exact(angles)), rotated(parts[1], exact(angles)), parts[2]]
    for found, part in zip(heads.split(packed), expected, strict=True):
        assert_close(found.transpose(0, 1), part)
