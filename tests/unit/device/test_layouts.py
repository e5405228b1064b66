"""Memory layouts: the same values in each, and what libraries move on their own."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.functional import conv2d

from lab.convolution import Pass, Problem
from lab.device.formats import (
    MemoryLayout,
    MixedLayouts,
    Primitive,
    calls_in,
    captured_stdout,
    copies,
    implementation,
    layouts_for,
    moves,
    parsed,
    reorders_among,
    transposes,
)

CPU = torch.device("cpu")
PROBLEMS = {
    "plain": Problem(2, 16, (12, 10), 24, (3, 3), padding=(1, 1)),
    "strided, of data": Problem(2, 3, (20, 20), 16, (5, 5), stride=(2, 2)),
    "one channel": Problem(2, 1, (12, 12), 8, (5, 5)),
    "a group for each channel": Problem(2, 16, (8, 8), 16, (3, 3), (1, 1), (1, 1), 16),
}


@dataclass
class Event:
    """One line of torch.profiler's sums."""

    key: str
    count: int
    self_device_time_total: float
    self_cpu_time_total: float = 0.0
    device_type: DeviceType = DeviceType.CUDA


LOG = """\
onednn_verbose,v1,info,cpu,isa:Intel AVX2
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,exec_time
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,\
src:f32::blocked:abcd::f0 dst:f32:p:blocked:aBcd8b::f0,attr-scratchpad:user,,8x3x27x27,1.5
onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx2,forward_training,\
src:f32:a:blocked:aBcd8b::f0 wei:f32:a:blocked:ABcd8b8a::f0 bia:undef::undef::: \
dst:f32:a:blocked:aBcd8b::f0,attr-scratchpad:user,alg:convolution_direct,mb8_ic64oc192,41.804
another library's line, exec,cpu
"""


@pytest.mark.parametrize("name", PROBLEMS)
def test_all_layouts_compute_the_same_and_keep_their_layout(name: str) -> None:
    problem = PROBLEMS[name]
    tensors = problem.draw()
    plain = calls_in(MemoryLayout.NCHW, problem, *tensors)
    for layout in (MemoryLayout.NHWC, MemoryLayout.BLOCKED):
        calls = calls_in(layout, problem, *tensors, x_is_data=problem.channels == 3)
        for which in Pass:
            found = calls[which]()
            is_activation = which != Pass.BACKWARD_WEIGHTS
            assert found.is_mkldnn == (layout is MemoryLayout.BLOCKED and is_activation)
            if layout is MemoryLayout.NHWC:
                assert found.is_contiguous(memory_format=torch.channels_last)
            dense = found.to_dense() if found.is_mkldnn else found
            torch.testing.assert_close(dense, plain[which](), rtol=1e-4, atol=1e-4)


def test_blocked_is_for_float32_on_cpus() -> None:
    both = [MemoryLayout.NCHW, MemoryLayout.NHWC]
    assert layouts_for(CPU, torch.float32) == [*both, MemoryLayout.BLOCKED]
    assert layouts_for(CPU, torch.bfloat16) == both
    assert layouts_for(torch.device("cuda"), torch.float32) == both


def test_reorders_are_changes_of_format() -> None:
    def primitive(kind: str, source: str, target: str) -> Primitive:
        return Primitive(kind, "jit:blk", {"src": source, "dst": target}, 0.5)

    executed = [
        primitive("reorder", "abcd", "aBcd8b"),
        primitive("reorder", "abcd", "abcd"),
        primitive("convolution", "aBcd8b", "acdb"),
    ]
    assert reorders_among(executed) == [("abcd>aBcd8b", 0.5)]


def test_transposes_of_cudnn_are_known_by_the_names_of_its_kernels() -> None:
    events = [
        Event("void cudnn::engines_precompiled::nchwToNhwcKernel<float, __half, (bool)0>", 2, 6e6),
        Event("void cudnn::ops::nhwcToNchwKernel<__half, __half, float>", 1, 1e6),
        Event("nhwcToFoldedNhwcKernel", 1, 5e5),
        Event("sm80_xmma_fprop_implicit_gemm_f32f32_nhwckrsc_nhwc_tilesize128x128x16", 1, 9e6),
        Event("cudnn::ops::nchwToNhwcKernel", 1, 1e6, device_type=DeviceType.CPU),
    ]
    assert transposes(events) == [
        *[("nchw>nhwc", 3.0)] * 2,
        ("nhwc>nchw", 1.0),
        ("nhwc>foldednhwc", 0.5),
    ]


def test_copies_of_torch_have_the_time_of_their_device() -> None:
    events = [
        Event("aten::copy_", 2, 8e6, 4e6, DeviceType.CPU),
        Event("aten::mm", 1, 1e6, 1e6, DeviceType.CPU),
    ]
    assert copies(events, on_gpu=False) == [2.0, 2.0]
    assert copies(events, on_gpu=True) == [4.0, 4.0]
    assert copies(events[1:], on_gpu=False) == []


def test_a_copy_into_another_layout_is_found_on_this_machine(
    capfd: pytest.CaptureFixture[str],
) -> None:
    image = torch.randn(4, 8, 32, 32)
    moved = moves(lambda: image.contiguous(memory_format=torch.channels_last), CPU)
    assert len(moved.copy_s) == 1 and moved.copy_s[0] > 0 and moved.reorders == ()
    assert moves(image.relu, CPU).copy_s == ()
    assert capfd.readouterr() == ("", "")  # neither the log nor the profiler is seen


def test_a_mixed_model_converts_around_each_convolution_forward_and_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    mixed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    mixed.load_state_dict(plain.state_dict())
    MixedLayouts()(mixed)
    between: list[Tensor] = []
    inside: list[Tensor] = []
    mixed[1].register_forward_hook(lambda _layer, inputs, _output: between.append(inputs[0]))
    mixed[1].register_full_backward_hook(lambda _layer, _dx, dy: between.append(dy[0]))
    mixed[2].register_forward_hook(lambda _layer, inputs, _output: inside.append(inputs[0]))
    image = torch.randn(2, 3, 10, 10)
    for model in (plain, mixed):
        model(image).square().sum().backward()
    assert [each.is_contiguous() for each in between] == [True, True]
    assert [each.is_contiguous(memory_format=torch.channels_last) for each in inside] == [True]
    for expected, found in zip(plain.parameters(), mixed.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)
    filters = mixed.get_parameter("2.weight")
    assert filters.is_contiguous(memory_format=torch.channels_last)


def test_executed_operations_are_read_with_their_formats_and_times() -> None:
    reorder, convolution = parsed(LOG)
    assert reorder == Primitive("reorder", "jit:blk", {"src": "abcd", "dst": "aBcd8b"}, 0.0015)
    assert (convolution.kind, convolution.implementation) == ("convolution", "jit:avx2")
    assert convolution.formats == {"src": "aBcd8b", "dst": "aBcd8b"}
    assert convolution.seconds == pytest.approx(0.041804)


def test_what_this_machine_executes_is_in_the_log() -> None:
    x, w = torch.randn(2, 16, 12, 12), torch.randn(16, 16, 3, 3)
    assert implementation(lambda: conv2d(x, w))
    assert implementation(lambda: x + 1) is None


@pytest.mark.parametrize("descriptor", [1, 2])
def test_what_is_printed_from_c_goes_to_a_buffer_and_then_as_before(
    descriptor: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError), captured_stdout(descriptor) as text:
        os.write(descriptor, b"inside")
        raise RuntimeError
    os.write(descriptor, b"after")
    assert text.getvalue() == "inside"
    assert capfd.readouterr()[descriptor - 1] == "after"
