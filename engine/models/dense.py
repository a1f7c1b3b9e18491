"""The C kernels for the dense parts of a decoder layer, as operations on float32 tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.native import core

MULTIPLE = 4
"""Of which the width of a norm or a gate must be one; a head's must be one of twice that."""


class Linear:
    """One product for linear modules of the same input. Their weights move into it: until `give_back` the modules are
    without any, so that nothing lies in memory twice."""

    def __init__(self, *modules: Any) -> None:
        weights = [module.weight.detach() for module in modules]
        self._modules, self._parts = modules, [len(weight) for weight in weights]
        self.outputs, inputs = sum(self._parts), weights[0].shape[1]
        self._panels = _in_panels(torch.cat(weights))
        self._bias = None if modules[0].bias is None else torch.cat([module.bias.detach() for module in modules])
        for module in modules:
            module.weight.data = module.weight.data.new_empty(0)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        self.description = core().ffi.new("kf_linear *", (self._panels.data_ptr(), bias, inputs, self.outputs))

    def give_back(self) -> None:
        """The modules have their weights again, and this is of no more use."""
        weights = self._panels.transpose(1, 2).flatten(0, 1)[: self.outputs]
        for module, weight in zip(self._modules, torch.split(weights, self._parts), strict=True):
            module.weight.data = weight
        self._panels = self._panels.new_empty(0)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """The weights `[len(indices), inputs]` of those outputs."""
        panel = self._panels.shape[2]
        return self._panels[indices // panel, :, indices % panel]


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


def _in_panels(weights: torch.Tensor) -> torch.Tensor:
    """`[outputs, inputs]` as the kernels want it: `[panels, inputs, KF_PANEL]`, zeros behind the last output."""
    panel: int = core().lib.KF_PANEL
    padded = torch.nn.functional.pad(weights, (0, 0, 0, -len(weights) % panel))
    return padded.view(-1, panel, weights.shape[1]).transpose(1, 2).contiguous()
