"""oneDNN's verbose log, and what libraries print from C."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import conv2d

from lab.measure.onednn import Primitive, implementations, parsed, printed

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


def test_executed_operations_are_read_with_their_formats_and_times() -> None:
    reorder, convolution = parsed(LOG)
    assert reorder == Primitive("reorder", "jit:blk", {"src": "abcd", "dst": "aBcd8b"}, 0.0015)
    assert (convolution.kind, convolution.implementation) == ("convolution", "jit:avx2")
    assert convolution.formats == {"src": "aBcd8b", "dst": "aBcd8b"}
    assert convolution.seconds == pytest.approx(0.041804)


def test_what_this_machine_executes_is_in_the_log() -> None:
    x, w = torch.randn(2, 16, 12, 12), torch.randn(16, 16, 3, 3)
    assert len(implementations(lambda: conv2d(x, w))) == 1
    assert implementations(lambda: x + 1) == []


@pytest.mark.parametrize("descriptor", [1, 2])
def test_what_is_printed_from_c_goes_to_a_buffer_and_then_as_before(
    descriptor: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError), printed(descriptor) as text:
        os.write(descriptor, b"inside")
        raise RuntimeError
    os.write(descriptor, b"after")
    assert text.getvalue() == "inside"
    assert capfd.readouterr()[descriptor - 1] == "after"
