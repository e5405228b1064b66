"""EF-SignSGD: signs, one magnitude for each tensor, and error feedback."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec.signs import codec as signs
from lab.distributed.collective import Collective, Done
from lab.distributed.comm import Comm
from lab.exchange.base import Shapes, Staged
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
            yield Done()  # as many stages as for buckets with signs
            return
        gradients = {name: bucket.flat[span] for name, span in spans.items()}
        byte, size = bucket.flat.new_empty(0, dtype=torch.uint8), _message_bytes(gradients)
        message = bucket.buffers["outgoing"].take(byte, 1, size)
        magnitudes, bits = _parts(message, gradients)
        for index, (name, gradient) in enumerate(gradients.items()):
            kept = self.residual_of(name, gradient)
            signs.encode(gradient, kept, magnitudes[0, index], bits[index][0])
        received = bucket.buffers["received"].take(byte, comm.size, size)
        arriving = comm.iall_gather(received, message[0])
        yield exact.collective
        exact.put_back()
        yield arriving
        magnitudes, bits = _parts(received, gradients)
        scales = (magnitudes / comm.size).T.contiguous()
        for of_ranks, packed, out in zip(scales, bits, gradients.values(), strict=True):
            signs.decode(of_ranks, packed, out)

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        least = self.min_values
        sizes = (shape.numel() for shape in shapes.values() if not signed(shape, least))
        yield sum(sizes), f"tensors of fewer values than {key}.min_values={least}"


def _message_bytes(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of a message: a magnitude for each tensor, and bits, in whole words."""
    bits = sum(signs.bit_bytes(len(tensor)) for tensor in tensors.values())
    return 4 * len(tensors) + -(-bits // 4) * 4


def _parts(messages: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return views of `messages`, uint8 [ranks, bytes].

    Returns:
        Magnitudes, float32 [ranks, tensors], and each tensor's bits, uint8 [ranks, bytes].
    """
    sizes = [signs.bit_bytes(len(tensor)) for tensor in tensors.values()]
    magnitudes = messages.view(torch.float32)[:, : len(tensors)]
    bits = messages[:, 4 * len(tensors) :][:, : sum(sizes)]
    return magnitudes, list(bits.split(sizes, dim=1))
