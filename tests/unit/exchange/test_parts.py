"""Parts of a bucket: they cover it once, are views of its gradient, and are packed once a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.exchange.bucket import BucketPlan
from lab.exchange.grouping import CUT_VALUES, cut
from lab.sync.priority import in_parts


@pytest.mark.parametrize("num_values", [1, 1024, 1025, 5000, 100_000])
@pytest.mark.parametrize("bucket_mb", [0.004, 0.02, 1.0])
def test_parts_cover_a_parameter_once_and_begin_where_kernels_like(
    num_values: int, bucket_mb: float
) -> None:
    parts = cut(num_values, bucket_mb)
    assert [value for part in parts for value in part] == list(range(num_values))
    assert all(part.start % CUT_VALUES == 0 for part in parts)
    most = max(bucket_mb * 2**20 / 4, CUT_VALUES)
    assert max(map(len, parts)) < most + CUT_VALUES
    assert cut(num_values, bucket_mb * 100, bytes_scale=0.01) == parts
    assert cut(num_values, None) == [range(num_values)]


@pytest.mark.parametrize("in_place", [False, True])
def test_parts_share_one_packed_gradient(in_place: bool) -> None:
    parameter = nn.Parameter(torch.zeros(60, 50))
    plan = BucketPlan({"weight": parameter}, in_place)
    first, second, last = in_parts(plan, [range(1024), range(1024, 2048), range(2048, 3000)])
    assert [part.nbytes for part in (first, second, last)] == [4096, 4096, 3808]
    for step in range(2):
        gradient = torch.randn(60, 50)
        parameter.grad = gradient.clone()
        buckets = [first.pack(step)]
        buckets[0].flat.zero_()  # as if it had been exchanged before the next one leaves
        buckets += [second.pack(step), last.pack(step, divided=True)]
        assert [str(bucket) for bucket in buckets] == [
            "weight[0:1024]",
            "weight[1024:2048]",
            "weight[2048:3000]",
        ]
        assert [bucket.step for bucket in buckets] == [step] * 3
        gradient.view(-1)[:1024] = 0
        assert torch.equal(torch.cat([bucket.flat for bucket in buckets]), gradient.view(-1))
        assert torch.equal(parameter.grad, gradient)
