"""The C kernels for the dense parts of a decoder layer, as operations on float32 tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.native import core

MULTIPLE = 4
"""Of which every width that a kernel takes must be one; a head must be of twice that."""


class Linear:
    """One product for linear modules of the same input: their weights are joined, and the modules left with views of
    the joined ones, so that nothing lies in memory twice."""

    def __init__(self, *modules: Any) -> None:
        self.weight = _join(modules, "weight")
        self.bias = None if modules[0].bias is None else _join(modules, "bias")
        self.outputs, inputs = self.weight.shape
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self.description = core().ffi.new("kf_linear *", (self.weight.data_ptr(), bias, inputs, self.outputs))


class RMSNorm:
    def __init__(self, module: Any) -> None:
        self.weight = module.weight.detach()
        self.fields = (self.weight.data_ptr(), len(self.weight), module.variance_epsilon)
        self.description = core().ffi.new("kf_norm *", self.fields)


class Heads:
    """Heads of queries, keys and values as one product leaves them: `[T, queries + 2 * keys, head_dim]`. The norms are
    of one head (Qwen3)."""

    def __init__(self, queries: int, keys: int, head_dim: int, norms: Sequence[RMSNorm]) -> None:
        self.queries, self.keys, self.head_dim = queries, keys, head_dim
        self._norms = norms
        fields = [norm.fields for norm in norms] or [(0, 0, 0.0)] * 2
        self.description = core().ffi.new("kf_heads *", (queries, keys, head_dim, *fields))

    def split(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of queries, keys and values, heads first."""
        keys, values = self.queries, self.queries + self.keys
        return (
            self._view(packed, 0, self.queries),
            self._view(packed, keys, self.keys),
            self._view(packed, values, self.keys),
        )

    def _view(self, packed: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """One call: chains of views cost a decode more than its norms do."""
        tokens, width = packed.shape
        return packed.as_strided((count, tokens, self.head_dim), (self.head_dim, width, 1), first * self.head_dim)


class DenseKernels:
    """Inputs and outputs are dense, one row a token. `variant`: the widest compilation that runs; None: the best for
    this CPU. Raises KernelsUnavailable."""

    def __init__(self, variant: int | None = None) -> None:
        self._lib = core().lib
        self._variant = self._lib.kf_best_variant(0) if variant is None else variant

    @property
    def variant(self) -> str:
        """The instruction set that runs."""
        return ("portable", "avx2", "avx512")[self._variant]

    def multiply(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        output = x.new_empty(x.shape[0], linear.outputs)
        self._multiply(x, linear, output, add=False)
        return output

    def add_product(self, x: torch.Tensor, linear: Linear, to: torch.Tensor) -> None:
        self._multiply(x, linear, to, add=True)

    def normalise(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        output = torch.empty_like(x)
        self._lib.kf_normalise(norm.description, x.data_ptr(), x.shape[0], output.data_ptr(), *self._how())
        return output

    def place(self, packed: torch.Tensor, heads: Heads, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """In place: norms of single heads, then rotary positions, on queries and keys. `cosines` and `sines`
        `[T, head_dim]`."""
        addresses = packed.data_ptr(), cosines.data_ptr(), sines.data_ptr()
        self._lib.kf_place_heads(heads.description, *addresses, packed.shape[0], *self._how())

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """silu(left half) * right half, of each row."""
        width = x.shape[1] // 2
        output = x.new_empty(x.shape[0], width)
        self._lib.kf_gate(x.data_ptr(), width, x.shape[0], output.data_ptr(), *self._how())
        return output

    def _multiply(self, x: torch.Tensor, linear: Linear, output: torch.Tensor, add: bool) -> None:
        self._lib.kf_multiply(linear.description, x.data_ptr(), x.shape[0], output.data_ptr(), add, *self._how())

    def _how(self) -> tuple[int, int]:
        return torch.get_num_threads(), self._variant


def _join(modules: Sequence[Any], name: str) -> torch.Tensor:
    parts: list[torch.Tensor] = [getattr(module, name).detach() for module in modules]
    if len(parts) == 1:
        return parts[0].contiguous()
    joined = torch.cat(parts)
    begin = 0
    for module, part in zip(modules, parts, strict=True):
        getattr(module, name).data = joined[begin : begin + len(part)]
        begin += len(part)
    return joined
