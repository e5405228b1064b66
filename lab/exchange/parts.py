"""Parts of buckets: a large gradient that leaves in several messages, which others may overtake."""

from __future__ import annotations

import torch

from lab.exchange.bucket import BucketPlan, GradBucket


class _Packed:
    """A bucket's gradients of one step, packed when the first of its parts leaves."""

    def __init__(self, plan: BucketPlan, num_parts: int) -> None:
        self.plan, self._num_parts = plan, num_parts
        self._whole: GradBucket | None = None
        self._left = 0  # parts that have not left in this step

    def take(self, step: int, divided: bool) -> GradBucket:
        """Return the whole bucket; each part calls this once a step."""
        whole = self._whole
        if whole is None:
            whole, self._left = self.plan.pack(step, divided), self._num_parts
        self._left -= 1
        self._whole = whole if self._left else None  # so that its memory can be freed
        return whole


class PartPlan(BucketPlan):
    """A range of values of another bucket's single parameter.

    Its GradBucket has one entry, named by parameter and range. So it is for exchanges that only
    sum: a residual is kept by parameter name.
    """

    def __init__(self, packed: _Packed, part: range) -> None:
        super().__init__(packed.plan.parameters)
        self._packed, self._part = packed, part
        (name,) = self.parameters
        self.shapes = {f"{name}[{part.start}:{part.stop}]": torch.Size([len(part)])}

    @property
    def nbytes(self) -> int:
        (parameter,) = self.parameters.values()
        return len(self._part) * parameter.element_size()

    def pack(self, step: int, divided: bool = False) -> GradBucket:
        whole, part = self._packed.take(step, divided), self._part
        values = whole.flat[part.start : part.stop]
        return GradBucket(self.shapes, values, step, divided, lacking=whole.lacking)


def in_parts(plan: BucketPlan, parts: list[range]) -> list[BucketPlan]:
    """Return the plans of a bucket's `parts`: ranges of values that together are all."""
    if len(parts) == 1:
        return [plan]
    packed = _Packed(plan, len(parts))
    return [PartPlan(packed, part) for part in parts]
