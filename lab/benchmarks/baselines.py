"""1-bit codecs in eager torch, as other systems write them: baselines for the lab's kernels.

They are written anew from the formulas. They keep the properties that make the originals slow
(full-size temporaries, a pass per operation, scalars that the host reads), and treat the whole
tensor at once, with one pair of reconstruction values or one scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.benchmarks.compressors import Codec


class GraceLike(Codec):
    """GRACE's `onebit` with its residual memory (H. Xu et al., ICDCS 2021; grace_dl, torch).

    The sign of each value travels as one uint8, with the means of both sides. (GRACE's decoder for
    plain torch.distributed takes `~` of a uint8 mask, which is not the complement; this one follows
    its decoder for Horovod, which converts to bool first.)
    """

    passes = 3, 2

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.payload_bytes = rows * columns + 8

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        """Quantise gradient + residual; the residual becomes the quantisation error."""
        values = 1.0 * residual + 1.0 * gradient  # GRACE's beta and gamma
        lower = values < 0
        self.low = _mean_of(values, lower)
        self.high = _mean_of(values, ~lower)
        self.mask = lower.to(torch.uint8)
        residual.copy_(values - self._values())

    def decode(self, out: Tensor) -> None:
        """Add the decoded message to `out`."""
        out += self._values()

    def _values(self) -> Tensor:
        lower = self.mask.bool()
        return lower * self.low + ~lower * self.high


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    total, count = values[chosen].sum(), chosen.sum().float()
    return total / count if count > 0 else total  # the host waits for the device here


class DeepSpeedLike(Codec):
    """The compression of DeepSpeed's 1-bit Adam (H. Tang et al., ICML 2021), one worker's part.

    Signs, 0 counted as +, times one scale for the whole tensor: its root mean square. Signs are
    packed eight to a byte, and unpacked to float32.
    """

    passes = 3, 2

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.payload_bytes = -(-rows * columns // 8) + 4
        self.weights = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        """Quantise gradient + residual; the residual becomes the quantisation error."""
        values = (gradient + residual).view(-1)
        self.scale = torch.linalg.vector_norm(values) / values.numel() ** 0.5
        signs = values.sign().add_(1).bool().float().add_(-0.5).mul_(2.0)
        residual.view(-1).copy_(values - self.scale * signs)
        flags = F.pad((signs > 0).to(torch.uint8), (0, -signs.numel() % 8)).view(-1, 8)
        self.packed = (flags * self.weights).sum(dim=1, dtype=torch.uint8)

    def decode(self, out: Tensor) -> None:
        """Add the decoded message to `out`."""
        flags = self.packed.unsqueeze(1).bitwise_and(self.weights).ne(0).float().view(-1)
        signs = flags[: out.numel()].add_(-0.5).mul_(2.0)
        out.view(-1).add_(signs * self.scale)
