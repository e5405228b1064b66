"""A parameter's name, its matrix, and the order in which its values travel, whatever its layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

COMPILED = "_orig_mod."  # torch.compile puts it into names
Matrix = tuple[int, int]  # rows and columns


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has made the model, or a part of it.

    Graphs that it has cached do not look for hooks of modules that came later.
    """
    own = COMPILED.rstrip(".")
    return any(
        name.rpartition(".")[2] == own or module._compiled_call_impl is not None
        for name, module in model.named_modules()
    )


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without torch.compile's part, so that all find them."""
    return {name.replace(COMPILED, ""): p for name, p in model.named_parameters()}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by the same names."""
    return {name: p for name, p in named(model).items() if p.requires_grad}


def is_dense(tensor: Tensor) -> bool:
    """Return whether `tensor` fills its memory without gaps or overlaps, in any dimension order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_rows_first(parameter: Tensor) -> bool:
    """Return whether the values travel in the order in which they lie in memory.

    They do if the tensor is dense and its rows (the first dimension) follow each other, as in
    row-major and channels-last tensors: columns may then stand in another order, the same in every
    row, which no matrix algorithm notices. Others (column-major, complex) travel in logical order.
    """
    if parameter.is_complex() or not is_dense(parameter):
        return False
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows < 2 or not parameter.numel() or parameter.stride(0) == parameter.numel() // rows


def order_of(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the strides of dimensions with several values, which tell the order in memory."""
    return [stride for stride, size in zip(strides, shape, strict=True) if size > 1]


def is_fusible(parameter: Tensor) -> bool:
    """Return whether torch's fused optimizers update `parameter` rightly.

    On CPUs they step through consecutive values, whatever the strides; their SGD leaves most of a
    bfloat16 or float16 tensor as it was (torch 2.13); and they refuse complex ones in the first
    step.
    """
    narrow = parameter.dtype in (torch.bfloat16, torch.float16) and not parameter.is_cuda
    return parameter.is_floating_point() and is_dense(parameter) and not narrow


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view with real and imaginary parts in a last dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def dense(gradient: Tensor) -> Tensor:
    """Return a sparse gradient as a dense tensor, and a dense one as it is."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def travel_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the real values that travel for `parameter`."""
    return torch.Size((*parameter.shape, 2)) if parameter.is_complex() else parameter.shape


def travelling(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the values of `tensor`, real [n], in the order in which those of `parameter` travel.

    It is a view of `tensor` where the layouts allow it, otherwise a copy.

    Args:
        tensor: of the parameter's shape, such as its gradient; may be sparse.
    """
    tensor = dense(tensor.detach())
    if not is_rows_first(parameter):
        return as_real(tensor.contiguous()).reshape(-1)
    if tensor.stride() != parameter.stride():
        like = torch.empty_like(parameter, dtype=tensor.dtype)  # keeps the dense layout
        tensor = like.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def low_rank_matrix(shape: Sequence[int], rank: int) -> Matrix | None:
    """Return the matrix shape that PowerSGD factorises; None: factors of `rank` save nothing."""
    matrix = as_matrix(shape)
    return matrix if matrix and rank * sum(matrix) < math.prod(matrix) else None


def rank_of(rows: int, columns: int, fraction: float) -> int:
    """Return the rank of Dion's factors: a fraction of the shorter side, rounded up."""
    return math.ceil(fraction * min(rows, columns))


def num_sent(shape: Sequence[int], ratio: float) -> int:
    """Return how many values of a parameter a sparsifying exchange sends."""
    return math.ceil(ratio * math.prod(shape))


def as_matrix(shape: Sequence[int]) -> Matrix | None:
    """Return `shape` as [outputs, the rest]; None for vectors and empty tensors."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    return shape[0], math.prod(shape[1:])


def hidden_matrices(shapes: Mapping[str, Sequence[int]]) -> dict[str, Matrix]:
    """Return the parameters that may be matrices by their shapes alone, as [outputs, the rest].

    A single row or column is a vector. Of a model, lab.exchange.direction knows more.
    """
    found = {name: as_matrix(shape) for name, shape in shapes.items()}
    return {name: matrix for name, matrix in found.items() if matrix and 1 not in matrix}
