"""Kernels of each processor level and of GPUs, against the definition in plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lab.codec import build, kernels
from lab.codec.base import Codec, Reference
from lab.codec.codecs import Cast, Float8, Int4, Int8, OneBit, Signs
from lab.codec.layout import MessageLayout
from tests.support.kernels import HERE, KINDS, LEVELS, close, of_codec, unaligned, values_of
from tests.support.slow import some_of

Shape = tuple[int, int]
ROWS: tuple[Shape, ...] = ((1, 1), (3, 7), (35, 33), (2, 64), (2, 2050))
LONG: tuple[Shape, ...] = ((1, 1), (1, 33), (1, 2050), (1, 70_001))  # more than a thread's piece
CODECS: dict[str, tuple[Codec, tuple[Shape, ...]]] = {
    "onebit": (OneBit(min_columns=1), (*ROWS, (1, 70_001))),
    "onebit mean": (OneBit("mean", min_columns=1), (*ROWS, (1, 70_001))),
    "int8": (Int8(64), LONG),
    "int8 blocks of 12": (Int8(12), LONG),
    "int4": (Int4(64), LONG),
    "signs": (Signs(1), LONG),
}
ON_GPUS = {  # on CPUs these are plain torch
    "bf16": (Cast("bfloat16"), LONG),
    "fp16": (Cast("float16"), LONG),
    "float8": (Float8(64), LONG),
    "float8 blocks of 12": (Float8(12), LONG),
}
ALL, FEEDBACK = CODECS | ON_GPUS, (True, False)
QUICK = (True, "normal"), (False, "nan"), (True, "huge")
CASES = [
    *some_of(
        product(LEVELS, CODECS, FEEDBACK, KINDS),
        also=[
            *((HERE, name, *case) for name in CODECS for case in QUICK),
            *((level, name, *QUICK[0]) for level in LEVELS for name in CODECS),
        ],
    ),
    *some_of(
        product(["triton"], ALL, FEEDBACK, KINDS),
        also=[
            *(("triton", name, *QUICK[0]) for name in ALL),
            *(("triton", name, *QUICK[1]) for name in ("onebit", "int8", "fp16")),
        ],
    ),
]
TAIL = 5  # values that a codec of columns does not encode


class Ended(NamedTuple):
    """What three ranks' kernels leave: see lab.codec.base.Reference."""

    messages: Tensor
    residual: Tensor
    sums: Tensor
    owned: Tensor
    mean: Tensor
    finite: Tensor


def run(
    kernels: Reference,
    layout: MessageLayout,
    gradients: Tensor,
    feedback: bool,
    kept: Tensor | None = None,
) -> Ended:
    """Encode three gradients, and sum their messages into another message and into values.

    Args:
        kept: residuals of gradients and of sums, [2, values]; None: they are drawn.
    """
    count = layout.num_values
    generator = torch.Generator().manual_seed(3)
    kept = torch.randn(2, count, generator=generator) if kept is None else kept
    residual, owned = map(unaligned, kept)
    messages = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
    for gradient, message in zip(gradients, messages, strict=True):
        kernels.encode(layout, unaligned(gradient), residual if feedback else None, message)
    sums = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    kernels.reduce(layout, messages, owned if feedback else None, sums)
    mean, finite = unaligned(torch.full((count,), 7.0)), torch.ones((), dtype=torch.bool)
    kernels.add_up(layout, messages, mean, 3, finite)
    return Ended(messages, residual, sums, owned, mean, finite)


def assert_same_message(codec: Codec, layout: MessageLayout, ours: Tensor, theirs: Tensor) -> None:
    """Compare payloads of rows that are finite bit by bit, and scales to rounding.

    A row that is not finite must only be read as such: the sum of two may be infinite or NaN.
    """
    for piece in layout.pieces:
        header, payload = (piece.rows * size for size in codec.row_bytes(piece.columns))
        scales = [m[piece.header :][:header] for m in (ours, theirs)]
        one, other = (scale.view(torch.float32).view(piece.rows, -1) for scale in scales)
        assert torch.equal(one.isfinite(), other.isfinite())
        assert close(one[one.isfinite()], other[one.isfinite()])
        finite = one.isfinite().all(dim=1)
        bits = [m[piece.payload :][:payload].view(piece.rows, -1) for m in (ours, theirs)]
        if isinstance(codec, Cast | Float8):  # NaN has many patterns, and zero two
            read = (
                codec.read(scale.view(piece.rows, -1), payloads, piece.columns)[finite]
                for scale, payloads in zip(scales, bits, strict=True)
            )
            assert close(*read)
        else:
            assert torch.equal(*(each[finite] for each in bits))
    for _, number, at in layout.copies:
        assert close(*(m[at : at + 4 * number].view(torch.float32) for m in (ours, theirs)))


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize(("level", "name", "feedback", "kind"), CASES)
def test_kernels_repeat_the_definition(
    monkeypatch: pytest.MonkeyPatch, level: str, name: str, feedback: bool, kind: str
) -> None:
    if level == "triton":  # whose interpreter reads all of a span
        gpu = pytest.importorskip("lab.codec.gpu", reason="no triton here")
        monkeypatch.setattr(gpu, "SPAN", gpu.TILE)
    codec, shapes = ALL[name]
    fast, slow = of_codec(codec, level), Reference(codec)
    for rows, columns in shapes:
        if level == "triton" and columns > 2050:
            continue  # the interpreter is slow; see test_rows_too_long_for_registers
        count = rows * columns + TAIL
        layout = codec.layout({"w": (rows, columns), "tail": (TAIL,)}, count, 1)
        gradients = torch.stack([values_of(kind, count) for _ in range(3)])
        ours, theirs = (run(kernels, layout, gradients, feedback) for kernels in (fast, slow))
        assert_same_messages(codec, layout, ours, theirs)
        assert close(ours.residual, theirs.residual) and close(ours.owned, theirs.owned)
        # Kernels of GPUs may divide infinity into what is not a number.
        means = (m.where(m.isfinite(), torch.nan) for m in (ours.mean, theirs.mean))
        assert close(*means) and ours.finite == theirs.finite


def assert_same_messages(codec: Codec, layout: MessageLayout, ours: Ended, theirs: Ended) -> None:
    for one, other in zip(ours.messages, theirs.messages, strict=True):
        assert_same_message(codec, layout, one, other)
    assert_same_message(codec, layout, ours.sums, theirs.sums)


@pytest.mark.parametrize("name", ["onebit", "onebit mean"])
def test_rows_too_long_for_registers_are_read_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    gpu = pytest.importorskip("lab.codec.gpu", reason="no triton here")
    monkeypatch.setattr(gpu, "LONGEST", 64)
    monkeypatch.setattr(gpu, "LONG_TILE", 32)
    monkeypatch.setattr(gpu, "TILE", 64)
    codec, gradients = CODECS[name][0], torch.randn(3, 455)
    layout = codec.layout({"w": (3, 150), "tail": (5,)}, 455, 1)
    ours, theirs = (
        run(kernels, layout, gradients, True)
        for kernels in (of_codec(codec, "triton"), Reference(codec))
    )
    assert_same_messages(codec, layout, ours, theirs)
    assert close(ours.residual, theirs.residual) and close(ours.mean, theirs.mean)


@pytest.mark.parametrize("name", CODECS)
def test_threads_change_nothing(name: str) -> None:
    codec, _ = CODECS[name]
    layout = codec.layout({"w": (70, 9000)}, 630_000, 1)
    gradients, before, ended = torch.randn(3, 630_000), torch.get_num_threads(), list[Ended]()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ended.append(run(of_codec(codec, HERE), layout, gradients, True))
    torch.set_num_threads(before)
    for one, three in zip(*ended, strict=True):
        assert torch.equal(one, three)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Start the test as a process that has loaded no kernels."""
    for cached in (build.load, kernels.load):
        cached.cache_clear()
    yield
    for cached in (build.load, kernels.load):
        cached.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_without_a_compiler_plain_torch_serves_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="^cpp/onebit.cpp cannot be built .*no-such-compiler"):
        assert type(OneBit().kernels(torch.device("cpu"))) is Reference
    with warnings.catch_warnings(action="error"):
        assert type(OneBit().kernels(torch.device("cpu"))) is Reference
