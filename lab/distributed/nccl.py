"""Options of NCCL's communicators: algorithm, protocol, stream priority."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree")
PROTOCOLS = ("LL", "LL128", "Simple")
ON_GPUS = ("Ring", "Tree")  # the others sum in a switch, in no fixed order, with Simple only


def variables(
    algorithm: str | None, protocol: str | None, deterministic: bool = False
) -> dict[str, str]:
    """Return NCCL's environment variables for a communicator.

    Args:
        algorithm, protocol: of all-reduce, in upper or lower case; None: NCCL chooses.
        deterministic: sum in the same order in every run.

    Raises:
        ValueError: NCCL has no such algorithm or protocol, or not this combination.
    """
    found = {}
    if deterministic:
        found |= {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
    if protocol is not None:
        protocol = _one_of(PROTOCOLS, "nccl_proto", protocol)
        found["NCCL_PROTO"] = f"allreduce:{protocol}"
    if algorithm is not None:
        algorithm = _one_of(ALGORITHMS, "nccl_algo", algorithm)
        if algorithm not in ON_GPUS and protocol not in (None, "Simple"):
            raise ValueError(f"comm.nccl_proto={protocol}: {algorithm} has only Simple")
        if algorithm not in ON_GPUS and deterministic:
            raise ValueError(
                f"comm.nccl_algo={algorithm}: sums in a switch, in no order that "
                f"deterministic=true could promise; allowed are {', '.join(ON_GPUS)}"
            )
        # Of all-reduce only: broadcast has only a ring, and fails without it.
        found["NCCL_ALGO"] = f"ring,tree;allreduce:{algorithm}"
    return found


@contextmanager
def told(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while a communicator is made, then restore them.

    NCCL reads them for each communicator. It reads those that end in ENABLE only once, so all
    communicators of a process must agree on them.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def options(limit: timedelta) -> dist.ProcessGroupNCCL.Options:
    """Return the options of a process group.

    Collectives run on high-priority streams: they compete with backward's kernels, and every later
    bucket waits for them. The communicator is made before the call returns, whatever
    TORCH_NCCL_USE_COMM_NONBLOCKING says, so that it sees the variables of `told`.
    """
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    made.config.blocking = 1
    made._timeout = limit
    return made


def _one_of(allowed: tuple[str, ...], key: str, given: str) -> str:
    for name in allowed:
        if name.lower() == str(given).lower():
            return name
    raise ValueError(f"comm.{key}={given}: allowed are {', '.join(allowed)}, or null")
