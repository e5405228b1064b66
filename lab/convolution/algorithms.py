"""All algorithms by name."""

from __future__ import annotations

from lab.convolution.algorithm import Algorithm
from lab.convolution.direct import Direct
from lab.convolution.fft import FFT
from lab.convolution.gemm import Gemm
from lab.convolution.library import Library
from lab.convolution.winograd import Winograd

LIBRARY = Library()
# Winograd's are named by the sides of their tiles and filters.
ALGORITHMS: dict[str, Algorithm] = {
    each.name: each
    for each in (LIBRARY, Direct(), Gemm(), FFT(), Winograd(2, 3), Winograd(4, 3), Winograd(2, 5))
}
