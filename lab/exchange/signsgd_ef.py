"""EF-SignSGD: signs, one magnitude for each tensor, and error feedback."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.codec import signsgd
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.compressible import signed
from lab.exchange.error_feedback import ErrorFeedback
from lab.exchange.uncompressed import ExactMeans, gaps


class SignSGD(Staged, ErrorFeedback):
    """Scaled sign with error feedback (Karimireddy et al. 2019, Algorithm 1), layer by layer.

    With p = gradient + residual of one tensor of d values, a rank sends sign(p) and |p|_1 / d and
    keeps p - |p|_1 / d * sign(p). Every rank receives all bits, adds them in rank order and divides
    by N, so it sends (N-1)(d/8 + 4) bytes for a tensor: cheap for few ranks only.

    Args:
        min_values: smaller tensors travel exactly.
        error_feedback: see ErrorFeedback.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, min_values: int = 4096, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        if not isinstance(min_values, int) or min_values < 1:
            raise ValueError(f"exchange.min_values={min_values}: must be an integer of at least 1")
        self.min_values = min_values

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        spans = {
            name: slice(start, stop)
            for name, start, stop in bucket.spans()
            if signed(bucket.shapes[name], self.min_values)
        }
        exact = ExactMeans(bucket, gaps(spans.values(), len(bucket.flat)), comm)
        if not spans:
            yield exact.collective
            exact.put_back()
            return
        gradients = {name: bucket.flat[span] for name, span in spans.items()}
        message = _message([self._encode(name, part) for name, part in gradients.items()])
        received = message.new_empty(comm.size, len(message))
        arriving = comm.iall_gather(received, message)
        yield exact.collective
        exact.put_back()
        yield arriving
        scale_bytes = 4 * len(spans)
        magnitudes = received[:, :scale_bytes].view(torch.float32) / comm.size
        start = scale_bytes
        for index, out in enumerate(gradients.values()):
            stop = start + signsgd.bit_bytes(len(out))
            for rank in range(comm.size):
                bits = received[rank, start:stop]
                signsgd.decode(magnitudes[rank, index], bits, out, add=rank > 0)
            start = stop

    def _encode(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        p = self.compensated(name, gradient)
        magnitude, bits = signsgd.encode(p)
        p -= torch.copysign(magnitude, p, out=gradient)  # the gradient's memory is free now
        return magnitude, bits


def _message(encoded: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return all magnitudes, then all bits, in whole float32 words: uint8 [bytes]."""
    magnitudes, bits = zip(*encoded, strict=True)
    joined = torch.cat([torch.stack(magnitudes).view(torch.uint8), *bits])
    return F.pad(joined, (0, -len(joined) % 4))
