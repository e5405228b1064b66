"""path=symmetric: bits and bytes of two_stage, from memory that ranks read; or that path itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.codecs import Int8, OneBit, Signs, TopK
from lab.codec.kernels import Peers
from lab.distributed.comm import Comm, NoWindow, Window, run_ranks
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.compressed import Symmetric, TwoStage
from lab.exchange.cost import Sizes
from lab.exchange.memory import Memory
from lab.simulate.recorded import META, Collected, MemoryTraffic, Passes, RecordingComm
from tests.support import exact
from tests.support.kernels import Counter, interpret
from tests.support.slow import some_of

CODECS = exact.CODECS | {
    "onebit block": OneBit(granularity="block", block_size=24),
    "signs": Signs(100),
}
ODD = {"a": (7, 65), "bias": (13,), "b": (3, 301), "one": (1,)}
SMALL = {"a": (5, 65), "bias": (3,)}
ONE = {"one": (1,)}  # of which most ranks own nothing
NUM_STEPS = 3
Shapes = dict[str, tuple[int, ...]]


def run(
    path: type[TwoStage],
    codec: Codec,
    gradients: Tensor,
    shapes: Shapes = ODD,
    keeps: bool = True,
    num_nodes: int = 1,
) -> list[tuple[Tensor, dict[str, Any], Any, list[dict[str, Any]]]]:
    """Return each rank's means [steps, n], state, traffic and choices.

    Args:
        gradients: float32 [steps, ranks, n].
    """
    size = gradients.shape[1]
    of_node = size // num_nodes
    nodes = [[*range(low, low + of_node)] for low in range(0, size, of_node)]
    named = {name: torch.Size(shape) for name, shape in shapes.items()}

    def rank_main(comm: Comm) -> Any:
        exchange, plans, means = path(codec, Memory(keeps)), Plans(), list[Tensor]()
        for step, own in enumerate(gradients[:, comm.rank]):
            bucket = GradBucket(named, own.clone(), step, plans=plans)
            exchange.average(bucket, comm)
            assert bucket.finite is not None
            means += [bucket.flat, bucket.finite.float().view(1)]
        return torch.cat(means), exchange.state_dict(), comm.traffic.so_far(), exchange.choices()

    return run_ranks(size, rank_main, nodes)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def check_equal(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Compare means, residuals and traffic of all ranks."""
    for (means, state, traffic, _), (expected, kept, sent, _) in zip(ours, theirs, strict=True):
        assert same_bits(means, expected)
        assert traffic == sent
        for kind, values in kept.items():
            assert state[kind].keys() == values.keys()
            for name, residual in values.items():
                assert torch.equal(state[kind][name], residual)


def drawn(size: int, shapes: Shapes = ODD) -> Tensor:
    num_values = sum(torch.Size(shape).numel() for shape in shapes.values())
    return torch.randn(NUM_STEPS, size, num_values)


@pytest.mark.parametrize("size", some_of([1, 2, 4, 8], also=[1, 4]))
@pytest.mark.parametrize("name", CODECS)
def test_bits_and_bytes_are_those_of_two_stages(name: str, size: int) -> None:
    for keeps, shapes in ((True, ODD), (False, ODD), (True, ONE)):
        gradients = drawn(size, shapes)
        ours = run(Symmetric, CODECS[name], gradients, shapes, keeps)
        check_equal(ours, run(TwoStage, CODECS[name], gradients, shapes, keeps))
        way = [{"path": "symmetric", "parameters": len(shapes)}]
        assert all(choices == way for *_, choices in ours)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_not_finite_reaches_all_ranks(value: float) -> None:
    gradients = drawn(4)
    gradients[-1, 2, 100] = value
    ours = run(Symmetric, CODECS["onebit"], gradients)
    assert all(float(means[-1]) == 0 for means, *_ in ours)  # bucket.finite of the last step
    assert all(same_bits(means, ours[0][0]) for means, *_ in ours)


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize("size", some_of([2, 4, 8], also=[2]))
@pytest.mark.parametrize("name", some_of(CODECS, every=2))
def test_gpu_kernels_read_and_write_the_buffers_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    """In Triton's interpreter without a GPU: N buffers in one process, each for itself."""
    interpret(monkeypatch)
    gradients = drawn(size, SMALL)[:1]  # later steps differ by a residual, as on CPUs
    ours = run(Symmetric, CODECS[name], gradients, SMALL)
    check_equal(ours, run(TwoStage, CODECS[name], gradients, SMALL))


@pytest.mark.parametrize(("name", "num_kernels"), [("onebit", 3), ("signs", 5)])
def test_a_step_launches_kernels_of_the_codec_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str, num_kernels: int
) -> None:
    gpu, counter = pytest.importorskip("lab.codec.gpu", reason="no triton here"), Counter()
    for kernel in ("encode_rows", "decode_rows", "add_magnitudes"):
        monkeypatch.setattr(gpu, kernel, counter)
    monkeypatch.setattr(Codec, "kernels", lambda codec, _: gpu.Triton(codec.reading))
    shapes = {"a": torch.Size((64, 128))}
    bucket = GradBucket(shapes, torch.empty(64 * 128, device=META))
    exchange, comm = Symmetric(CODECS[name], Memory()), RecordingComm(0, 8)
    for _ in range(2):
        counter.launches = 0
        comm.events.clear()
        with Passes(comm.events):
            exchange.average(bucket, comm)
    assert counter.launches == num_kernels
    meetings = [event for event in comm.events if isinstance(event, Collected)]
    assert [event.call for event in meetings] == ["all_to_all", "all_gather"]
    assert not any(isinstance(event, MemoryTraffic) for event in comm.events)


def test_a_window_has_a_message_and_all_sums() -> None:
    sizes = Sizes(n=10**6, gathered=0, largest=10**6, rank=0, N=4)
    exchange, made = Symmetric(Int8(1024), Memory(keeps=False)), list[int]()
    assert exchange.memory_bytes(sizes).kept == 2 * 10**6 * 1032 / 1024

    class Noting(RecordingComm):
        def window(self, num_bytes: int, device: torch.device) -> Window:
            made.append(num_bytes)
            return super().window(num_bytes, device)

    flat = torch.zeros(10**6)
    bucket = GradBucket({"a": flat.shape}, flat)
    exchange.average(bucket, Noting(0, 4))
    exchange.average(bucket, Noting(0, 4))
    assert made == [pytest.approx(2 * 10**6 * 1032 / 1024, rel=0.01)]


def test_ranks_of_several_nodes_take_two_stages_and_one_line_says_so() -> None:
    gradients, why = drawn(4), "they are on 2 nodes"
    text = rf"^path=symmetric: ranks share no memory \({why}\); path=two_stage runs instead$"
    with pytest.warns(UserWarning, match=text):
        ours = run(Symmetric, CODECS["int4"], gradients, num_nodes=2)
    check_equal(ours, run(TwoStage, CODECS["int4"], gradients, num_nodes=2))
    assert ours[0][-1] == [{"path": "two_stage", "parameters": 4, "why": why}]


class FullComm(RecordingComm):
    """One that has memory for the first bucket alone."""

    num_asked = 0

    def window(self, num_bytes: int, device: torch.device) -> Window:
        self.num_asked += 1
        if self.num_asked > 1:
            raise NoWindow("rank 0: No space left on device")
        return super().window(num_bytes, device)


def test_buckets_that_do_not_fit_take_two_stages_and_ask_once() -> None:
    comm, exchange = FullComm(0, 2), Symmetric(Int8(64), Memory())
    with pytest.warns(UserWarning, match="No space left on device"):
        for name in ("a", "b"):
            bucket = GradBucket({name: torch.Size((100,))}, torch.zeros(100))
            exchange.average(bucket, comm)
    with warnings.catch_warnings(action="error"):
        bucket = GradBucket({"c": torch.Size((100,))}, torch.zeros(100))
        exchange.average(bucket, comm)
    why = "rank 0: No space left on device"
    without = {"path": "two_stage", "parameters": 2, "why": why}
    assert exchange.choices() == [{"path": "symmetric", "parameters": 1}, without]
    assert comm.num_asked == 2


@pytest.mark.parametrize("codec", [Int8(64), TopK(0.05)])  # in C++, and in torch
def test_messages_that_lie_apart_are_read_and_written_as_those_in_one_tensor(codec: Codec) -> None:
    kernels, layout = codec.kernels(torch.device("cpu")), codec.layout({"a": (1000,)}, 1000, 1)
    messages = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
    for message in messages:
        kernels.encode(layout, torch.randn(1000), None, message)
    expected, *replies = torch.zeros(4, layout.num_bytes, dtype=torch.uint8)
    kernels.reduce(layout, messages, None, expected)
    kernels.reduce(layout, Peers(message.clone() for message in messages), None, Peers(replies))
    assert all(torch.equal(reply, expected) for reply in replies)
