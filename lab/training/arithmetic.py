"""Process-wide switches of torch for rounding, determinism and threads."""

from __future__ import annotations

import os
import warnings

import torch

OVERRIDE = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS and cuDNN; it overrides torch


def set_arithmetic(tf32: bool, deterministic: bool, threads: int | None = None) -> None:
    """Set how products and convolutions round, whether runs are bit-identical, and CPU threads.

    Args: tf32: float32 operations on a GPU may round their inputs to TF32 (10 bits of mantissa).
    False is IEEE float32, in cuDNN too, where torch's default is TF32. deterministic: use slower
    algorithms that add in the same order in every run. threads: of an operation on a CPU; None: as
    OMP_NUM_THREADS says.

    Raises: ValueError: the environment contradicts `tf32`.
    """
    override = os.environ.get(OVERRIDE)
    if override and override != str(int(tf32)):
        raise ValueError(
            f"tf32={str(tf32).lower()}: {OVERRIDE}={override} overrides it; unset it, or set "
            f"tf32={str(not tf32).lower()}"
        )
    with warnings.catch_warnings():
        # torch 2.9 prefers fp32_precision, with which its torch.compile fails.
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:  # cuBLAS reads it when it starts; torch before 2.13 requires it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # a second of imports, even for False
    if threads:
        torch.set_num_threads(threads)
