"""Floating-point operations of a call of one of torch's operations, by its definition.

torch.utils.flop_counter has most formulas. Here are those that it lacks, and those where it differs
from the definition: it forgets the groups of a convolution's backward, and counts what fused
attention computes again in backward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

NAMESPACES = ("aten", "prim", "prims")
# Products by the names that torch gives them; one without a formula must not count as nothing.
PRODUCT = re.compile(
    r"\w*(mm|mv|dot)(_v2|_for_cpu)?|\w*conv(?!ert)\w*|\w*rnn\w*|\w*attention\w*"
    r"|_transformer_encoder_layer_fwd|_trilinear|_euclidean_dist"
)


class Uncountable(Exception):
    """A model's operations cannot be counted; the message says why."""


def operations_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the operations of a call: a multiply-add is two, one of complex numbers eight.

    Only matrix products, convolutions and attention count. Attention counts whole, also where it
    is masked; a convolution also where its filter meets padding.

    Args:
        packet: the called operation, without its overload, such as torch.ops.aten.mm.
        out: what it returned.

    Raises:
        Uncountable: it has no formula, and is a product or not one of torch's.
    """
    name = packet.__name__.removesuffix("_")  # in place, as addmm_
    namespace = packet._qualified_op_name.split("::")[0]
    if namespace == "aten" and name in FORMULAS:
        operations = FORMULAS[name](*args, **kwargs)
    elif formula := flop_registry.get(packet) or _not_in_place(namespace, name):
        operations = formula(*args, **kwargs, out_val=out)
    elif namespace in NAMESPACES and not PRODUCT.fullmatch(name):
        return 0
    else:
        raise Uncountable(
            f"{namespace}.{packet.__name__} has no formula; torch.utils.flop_counter can register "
            "one"
        )
    tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    return operations * (4 if any(each.is_complex() for each in tensors) else 1)


def _not_in_place(namespace: str, name: str) -> Callable[..., float] | None:
    return flop_registry.get(getattr(torch.ops.aten, name, None)) if namespace == "aten" else None


def _product(matrix: Tensor, _vector: Tensor, **_: Any) -> float:
    return 2 * matrix.numel()


def _added(_sum: Tensor, matrix: Tensor, _vector: Tensor, **_: Any) -> float:
    return 2 * matrix.numel()


def _added_matrices(_sum: Tensor, left: Tensor, right: Tensor, **_: Any) -> float:
    return 2 * left.numel() * right.shape[-1]


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> float:
    """Count a product for each group; a matrix that has no dimension of groups is divided."""
    groups = len(left) if left.ndim == right.ndim == 3 else 1
    return 2 * groups * math.prod(left.shape[-2:]) * right.shape[-1]


def _distances(left: Tensor, right: Tensor) -> float:
    """Count the product of a [..., n, width] and [..., m, width] from which distances are made."""
    return 2 * left.numel() * right.shape[-2]


def _along_time(inputs: Tensor, weight: Tensor, _bias: Tensor, pad: int = 0) -> float:
    """Count a convolution of [time, batch, channels] with [kernel, channels, filters]."""
    steps = len(inputs) + 2 * pad - len(weight) + 1
    return 2 * steps * inputs.shape[1] * weight.numel()


def _convolution_backward(
    grad: Tensor,
    inputs: Tensor,
    weight: Tensor,
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: Sequence[bool],
) -> float:
    """Count as much as forward for each gradient that is `wanted`: of inputs, weight (and bias).

    In forward each weight meets each pixel of the output once, or of the inputs if transposed.
    """
    pixels = (inputs if transposed else grad).shape[2:]
    return 2 * len(inputs) * math.prod(pixels) * weight.numel() * sum(wanted[:2])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Count both products of attention over [batch, heads, tokens, width]."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> float:
    return 2 * _attention(query, key, value)


KINDS = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
FORMULAS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("mv", "dot", "vdot"), _product),
    **{"addmv": _added, "addbmm": _added_matrices, "_grouped_mm": _grouped},
    **{"_euclidean_dist": _distances, "conv_tbc": _along_time},
    "convolution_backward": _convolution_backward,
    **{f"_scaled_dot_product_{kind}": _attention for kind in KINDS},
    **{f"_scaled_dot_product_{kind}_backward": _attention_backward for kind in KINDS},
}
