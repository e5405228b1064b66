"""PowerSGD's products in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from lab.codec.native import bind, loader


class Kernels:
    """The functions of one compiled library; lab.codec.powersgd.codec describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._project = bind(library.powersgd_project, tensors=4, numbers=3)
        self._project_back = bind(library.powersgd_project_back, tensors=3, numbers=4)
        self._rebuild = bind(library.powersgd_rebuild, tensors=3, numbers=3)

    def project(self, gradient: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        self._project(gradient, residual, q, p, *gradient.shape, len(q))

    def project_back(self, matrix: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
        self._project_back(matrix, p, q, *matrix.shape, len(q), subtract)

    def rebuild(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        self._rebuild(p, q, out, *out.shape, len(q))


kernels = loader(Path(__file__), Kernels)
