"""The 1-bit codec: its definition, and the fast implementations, which must agree with it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lab.codec import build
from lab.codec.onebit import codec as onebit
from lab.codec.onebit import native, reference
from lab.codec.onebit.message import Matrix, Message
from lab.codec.scratch import ScratchBuffer
from tests.support.kernels import HERE, LEVELS, close, kernels_at
from tests.support.slow import some_of

BYTE = torch.empty(0, dtype=torch.uint8)


class Encoded(NamedTuple):
    scales: Tensor
    bits: Tensor
    residual: Tensor | None


def encode(codec: Any, gradient: Tensor, threshold: str, residual: Tensor | None = None) -> Encoded:
    """Encode `gradient` and a copy of `residual` by `codec`, into buffers filled with garbage."""
    rows, columns = gradient.shape
    scales = torch.full((1, rows, 2), 7.0)
    bits = torch.full((1, rows, onebit.bit_bytes(columns)), 255, dtype=torch.uint8)
    kept = None if residual is None else residual.clone()
    codec.encode(gradient, kept, threshold, scales, bits)
    return Encoded(scales[0], bits[0], kept)


def decode(codec: Any, encoded: Encoded, columns: int) -> Tensor:
    out = torch.full((len(encoded.scales), columns), 7.0)
    codec.decode(encoded.scales[None], encoded.bits[None], out, False)
    return out


def test_threshold_zero_reconstructs_each_side_by_its_mean() -> None:
    values = torch.tensor([[1.0, 3.0, -2.0, -4.0, 0.0, 2.0, -3.0]])
    encoded = encode(reference, values, "zero", residual=torch.zeros(1, 7))
    assert encoded.scales.tolist() == [[-3.0, 1.5]]
    assert encoded.bits.tolist() == [[0b0110011]]
    decoded = decode(reference, encoded, 7)
    assert decoded.tolist() == [[1.5, 1.5, -3.0, -3.0, 1.5, 1.5, -3.0]]
    assert encoded.residual is not None
    assert torch.equal(encoded.residual, values - decoded)


def test_threshold_mean_reconstructs_mean_and_deviation() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    encoded = encode(reference, values, "mean")
    assert encoded.scales.tolist() == [[1.5, 4.5]]  # mean 3, mean absolute deviation 1.5
    assert encoded.bits.tolist() == [[0b1100]]


@pytest.mark.parametrize("threshold", onebit.THRESHOLDS)
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
def test_reference_agrees_with_float64_arithmetic(columns: int, threshold: str) -> None:
    gradient, residual = torch.randn(5, columns), torch.randn(5, columns)
    values = gradient + residual
    encoded = encode(reference, gradient, threshold, residual)
    expected = torch.stack([definition(row.double(), threshold) for row in values])
    assert encoded.bits.shape == (5, onebit.bit_bytes(columns))
    torch.testing.assert_close(
        decode(reference, encoded, columns).double(), expected, rtol=1e-6, atol=1e-7
    )
    assert encoded.residual is not None
    torch.testing.assert_close(
        encoded.residual.double(), values.double() - expected, rtol=1e-5, atol=1e-6
    )


def definition(row: Tensor, threshold: str) -> Tensor:
    """Decode a row as the paper defines it."""
    if threshold == "mean":
        deviation = (row - row.mean()).abs().mean()
        return torch.where(row >= row.mean(), row.mean() + deviation, row.mean() - deviation)
    decoded = torch.zeros_like(row)
    for side in (row < 0, row >= 0):
        decoded[side] = row[side].mean()
    return decoded


@pytest.mark.parametrize("threshold", onebit.THRESHOLDS)
def test_zeros_decode_to_exact_zero_and_signs_may_all_agree(threshold: str) -> None:
    zeros = torch.zeros(2, 20)
    assert torch.equal(decode(reference, encode(reference, zeros, threshold), 20), zeros)
    negative = torch.full((1, 9), -2.0)
    assert torch.equal(decode(reference, encode(reference, negative, threshold), 9), negative)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("threshold", onebit.THRESHOLDS)
def test_a_value_that_is_not_finite_shows_in_its_rows_scales(threshold: str, bad: float) -> None:
    values = torch.randn(3, 16)
    values[1, 5] = bad
    finite = encode(reference, values, threshold).scales.isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]


@pytest.fixture(scope="module", params=[*LEVELS, "triton"])
def implementation(request: pytest.FixtureRequest) -> Any:
    """Return each fast implementation that this machine can run."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="no triton here")
        return OnGPU(importlib.import_module("lab.codec.onebit.triton_codec"))
    return kernels_at(request.param, native)


class OnGPU:
    """Triton's kernels given copies on the GPU; without one, conftest.py has its interpreter on."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def encode(self, *arguments: Any) -> None:
        self._call(self.codec.encode, arguments)

    def decode(self, *arguments: Any) -> None:
        self._call(self.codec.decode, arguments)

    def reduce(self, *arguments: Any) -> None:
        self._call(self.codec.reduce, arguments)

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        copies = {id(tensor): tensor.to(self.device) for tensor in tensors}
        function(*(copies.get(id(argument), argument) for argument in arguments))
        for tensor in tensors:
            tensor.copy_(copies[id(tensor)])


def inputs(kind: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return a gradient and a residual."""
    gradient, residual = torch.randn(rows, columns), torch.randn(rows, columns)
    scale = {"denormal": 1e-41, "huge": 1e38}.get(kind, 1.0)
    if kind == "zero":
        return torch.zeros(rows, columns), torch.zeros(rows, columns)
    if kind == "negative":
        return -gradient.abs() - 1, -residual.abs()
    if kind in ("nan", "inf", "-inf") and rows:
        gradient[0, columns // 2] = float(kind)
    return gradient * scale, residual * scale


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize(
    "kind",
    some_of(["normal", "zero", "negative", "denormal", "huge", "nan", "-inf"], every=5),
)
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("threshold", onebit.THRESHOLDS)
def test_all_repeat_the_reference(
    implementation: Any, threshold: str, feedback: bool, kind: str
) -> None:
    for rows, columns in ((0, 9), (1, 1), (3, 7), (35, 33), (2, 64), (2, 2050)):
        gradient, residual = inputs(kind, rows, columns)
        kept = residual if feedback else None
        ours = encode(implementation, gradient, threshold, kept)
        theirs = encode(reference, gradient, threshold, kept)
        assert torch.equal(ours.bits, theirs.bits)
        assert close(ours.scales, theirs.scales)
        if ours.residual is not None and theirs.residual is not None:
            assert close(ours.residual, theirs.residual)
        added = torch.randn(rows, columns)
        decoded, expected = added.clone(), added.clone()
        sent = theirs.scales[None], theirs.bits[None]
        implementation.decode(*sent, decoded, True)
        reference.decode(*sent, expected, True)
        assert close(decoded, expected)
        assert close(decode(implementation, theirs, columns), decode(reference, theirs, columns))


def test_rows_go_to_the_lines_of_a_message(implementation: Any) -> None:
    """Seven rows on three ranks: the last line is short, and its other rows stay as they are."""
    gradient, residual = inputs("normal", 7, 33)
    message = Message.within(ScratchBuffer(), [Matrix("w", 0, 7, 33)], 3, 3, BYTE)
    message.bytes.zero_()
    scales, bits = message.part(0)
    kept = residual.clone()
    implementation.encode(gradient, kept, "zero", scales, bits)
    expected = encode(reference, gradient, "zero", residual)
    assert torch.equal(bits.flatten(0, 1)[:7], expected.bits)
    assert close(scales.flatten(0, 1)[:7], expected.scales)
    assert expected.residual is not None and close(kept, expected.residual)
    assert not scales.flatten(0, 1)[7:].any() and not bits.flatten(0, 1)[7:].any()
    decoded = torch.full((7, 33), 7.0)
    implementation.decode(scales, bits, decoded, False)
    assert close(decoded, decode(reference, expected, 33))


@pytest.mark.parametrize("threshold", onebit.THRESHOLDS)
def test_rows_too_long_for_registers_are_read_again(
    monkeypatch: pytest.MonkeyPatch, threshold: str
) -> None:
    pytest.importorskip("triton", reason="no triton here")
    kernels = importlib.import_module("lab.codec.onebit.triton_codec")
    monkeypatch.setattr(kernels, "LONGEST", 64)
    monkeypatch.setattr(kernels, "PIECE", 32)
    gradient, residual = inputs("normal", 3, 150)
    ours, theirs = (encode(c, gradient, threshold, residual) for c in (OnGPU(kernels), reference))
    assert torch.equal(ours.bits, theirs.bits) and close(ours.scales, theirs.scales)
    assert ours.residual is not None and theirs.residual is not None
    assert close(ours.residual, theirs.residual)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("threshold", onebit.THRESHOLDS)
def test_a_fused_sum_is_decoding_adding_and_encoding(
    implementation: Any, threshold: str, feedback: bool
) -> None:
    for rows, columns in ((1, 1), (2, 33), (3, 2050)):
        sent = [encode(reference, torch.randn(rows, columns), threshold) for _ in range(3)]
        message_of_rows = Message.within(
            ScratchBuffer(), [Matrix("w", 0, rows, columns)], 1, 3, BYTE
        )
        scales, bits = message_of_rows.part(0)
        width = onebit.bit_bytes(columns)
        for rank, message in enumerate(sent):
            scales[rank], bits[rank] = message.scales, message.bits
        total = torch.stack([decode(reference, message, columns) for message in sent])
        residual = torch.randn(rows, columns) if feedback else None
        expected = encode(reference, total[0] + total[1] + total[2], threshold, residual)
        ours = Encoded(torch.empty(rows, 2), torch.empty(rows, width, dtype=torch.uint8), residual)
        room = torch.empty(rows, columns)
        implementation.reduce(scales, bits, room, residual, threshold, ours.scales, ours.bits)
        assert torch.equal(ours.bits, expected.bits)
        assert close(ours.scales, expected.scales)
        if residual is not None and expected.residual is not None:
            assert close(residual, expected.residual)


def test_threads_change_nothing() -> None:
    gradient, residual = inputs("normal", 70, 9000)
    kernels = native.kernels(HERE)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(encode(kernels, gradient, "zero", residual))
    torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        assert one is not None and three is not None
        assert torch.equal(one, three)


def test_views_that_are_not_contiguous_give_the_same() -> None:
    gradient, residual = inputs("normal", 6, 40)
    views = gradient.t().contiguous().t(), residual[:, ::2]
    assert not views[0].is_contiguous()
    expected = encode(onebit, gradient[:, ::2].contiguous(), "zero", residual[:, ::2].contiguous())
    kept = residual.clone()[:, ::2]
    scales, bits = torch.empty(1, 6, 2), torch.empty(1, 6, 3, dtype=torch.uint8)
    onebit.encode(views[0][:, ::2], kept, "zero", scales, bits)
    assert torch.equal(bits[0], expected.bits)
    assert close(scales[0], expected.scales)
    assert expected.residual is not None
    assert close(kept, expected.residual)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Start the test as a process that has loaded no kernels."""
    for cached in (build.load, native.kernels):
        cached.cache_clear()
    yield
    for cached in (build.load, native.kernels):
        cached.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_without_a_compiler_plain_torch_serves_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gradient, residual = inputs("normal", 3, 50)
    with pytest.warns(UserWarning, match="^onebit/kernels.cpp cannot be built .*no-such-compiler"):
        first = encode(onebit, gradient, "zero", residual)
    with warnings.catch_warnings(action="error"):
        second = encode(onebit, gradient, "zero", residual)
    assert torch.equal(first.bits, second.bits)
    assert torch.equal(first.bits, encode(reference, gradient, "zero", residual).bits)
