"""A user's codec: runs as it is written, and what would go wrong in silence is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.base import Codec, Reference
from lab.codec.codecs import Int8
from lab.codec.kernels import library
from lab.codec.layout import RowBytes
from lab.exchange.compressed import AllGather
from lab.exchange.memory import Memory

CPU = torch.device("cpu")


class Plain(Codec):
    """Values as they are: all that a codec has to define."""

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(0, 4 * columns)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        payload.view(torch.float32).copy_(values)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return payload.view(torch.float32)


class Counting(Plain):
    calls = 0

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        super().write(values + 0 * torch.rand(1), header, payload)
        self.calls += 1


class HalfInt8(Int8):
    """A subclass of a codec that has kernels, which do not do the same."""

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return super().read(header, payload, columns) / 2


def made(**functions: Callable[..., Any]) -> Codec:
    return type("Mine", (Plain,), functions)()


def floats(payload: Tensor) -> Tensor:
    return payload.view(torch.float32)


def test_three_functions_are_enough() -> None:
    before, codec = torch.get_rng_state(), Counting()
    AllGather(codec, Memory())
    assert torch.equal(torch.get_rng_state(), before)
    assert codec.calls == 0  # the trial is none of its own


@pytest.mark.skipif(library("int8") is None, reason="no compiler")
def test_kernels_are_of_the_labs_own_codecs() -> None:
    assert type(HalfInt8(1024).kernels(CPU)) is Reference
    assert type(Int8(1024).kernels(CPU)) is not Reference


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"read": lambda s, h, p, c: floats(p)[:, :1]}, r"read returns torch.float32 \[1, 1\];"),
        ({"read": lambda s, h, p, c: floats(p).half()}, "read returns torch.float16"),
        ({"read": lambda s, h, p, c: None}, "read returns NoneType; must return torch.float32"),
        (
            {"read": lambda s, h, p, c: floats(p) + torch.rand(len(p), c)},
            "a second call of read returns different values",
        ),
        ({"row_bytes": lambda s, c: (0, 4.0 * c)}, r"row_bytes\(6464\) returns \(0, 25856.0\)"),
        ({"row_bytes": lambda s, c: (-4, 4 * c)}, r"row_bytes\(6464\) returns \(-4, 25856\)"),
        ({"row_bytes": lambda s, c: (0, 4 * c, 1)}, r"row_bytes\(6464\) returns \(0, 25856, 1\)"),
        ({"row_bytes": lambda s, c: None}, r"row_bytes\(6464\) returns None; must be two whole"),
        ({"rows": lambda s, shapes: [(0, 6465, 5)]}, r"rows yields \(0, 6465, 5\) after value 0;"),
        ({"rows": lambda s, shapes: [(0, 9, 0)]}, r"rows yields \(0, 9, 0\) after value 0;"),
        (
            {"rows": lambda s, shapes: [(0, 9, 3), (8, 16, 4)]},
            r"rows yields \(8, 16, 4\) after value 9; must yield .* without overlap",
        ),
        (
            {"write": lambda s, v, h, p: floats(p).copy_(v.clamp_(-0.1, 0.1))},
            "write changes the values",
        ),
        (
            {"write": lambda s, v, h, p: floats(p).copy_(v.nan_to_num())},
            "a row with nan is read as finite values",
        ),
        ({"read": lambda s, h, p, c: 3 * floats(p)}, "the values that read returns differ so much"),
    ],
)
def test_what_breaks_a_rule_is_refused(functions: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^codec=Mine: {message}[^\n]*$"):
        AllGather(made(**functions), Memory())


def test_what_is_no_codec_is_refused() -> None:
    other: Any = object()
    with pytest.raises(ValueError, match=r"^codec=object: must be a subclass of"):
        AllGather(other, Memory())
    with pytest.raises(ValueError, match=r"^memory=object: must be a subclass of"):
        AllGather(Plain(), other)
    three_times: dict[str, Any] = {"read": lambda s, h, p, c: 3 * floats(p)}
    AllGather(made(**three_times), Memory(keeps=False))  # keeps nothing that could grow
