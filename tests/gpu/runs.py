"""Runs on GPUs: on one that all ranks share, or on one for each rank.

NCCL refuses two ranks on one GPU. Of its ways around that, `nccl by host` lets each rank believe to
be on a host of its own (NCCL_HOSTID): its check is by host, up to 2.29 at least, though its authors
do not support it; and messages then go over sockets. `nccl by switch` came with NCCL 2.30
(NCCL_MULTI_RANK_GPU_ENABLE; torch 2.13.0 has 2.29.7). Gloo moves tensors on every GPU, but has no
send and recv for them.
"""

from __future__ import annotations

import os

import torch

from lab.settings.config import build, load
from tests.distributed.test_strategies import distance
from tests.gpu.conftest import DEVICE
from tests.support.cases import is_exact
from tests.support.ranks import Outcome, composed, execute, join, spawn

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=20", "warmup_steps=2")
APART = "apart"  # each rank has a GPU of its own
BY_NCCL = ("nccl by host", "nccl by switch")


def needs_send_recv(strategy: str, *settings: str) -> bool:
    """Whether its exchange sends from rank to rank."""
    return build(load([f"strategy={strategy}", *settings]).exchange).needs_send_recv


def train(size: int, *settings: str, sharing: str = "gloo") -> list[Outcome]:
    """A run; each rank's outcome. `sharing`: how ranks share one GPU, or APART."""
    return spawn(size, _be_rank, settings, sharing, timeout_s=100)


def train_on_cpu(*settings: str) -> Outcome:
    return spawn(1, execute, *composed(*settings))[0]


def first_way_to_share() -> str:
    """The first that works here."""
    for way in BY_NCCL if DEVICE == "cuda" else ():
        try:
            if spawn(2, _reduce_once, way, timeout_s=60) == [2000.0, 2000.0]:
                return way
        except AssertionError:
            continue
    return "gloo"


def check_exact(strategy: str, outcome: Outcome, alone: Outcome) -> None:
    """The weights of an exact strategy are those of a run alone; others are not compared."""
    if is_exact(strategy):
        weights, reference = ({n: w.cpu() for n, w in o.weights.items()} for o in (outcome, alone))
        assert distance(weights, reference) < 1e-3  # GPUs add in other orders, maybe in TF32


def transform_of(strategy: str) -> str:
    return f"transform={'fc1x1' if strategy == 'fc1x1' else 'none'}"


def _be_rank(settings: tuple[str, ...], sharing: str) -> Outcome:
    _prepare(sharing)
    by_nccl = DEVICE == "cuda" and (sharing in (APART, *BY_NCCL) or os.environ["WORLD_SIZE"] == "1")
    shared = sharing != APART or DEVICE != "cuda"
    backend = f"backend={'nccl' if by_nccl else 'gloo'}"
    device = (f"device={DEVICE}", f"share_gpus={str(shared).lower()}")
    return execute(*composed(*device, backend, *settings))


def _prepare(sharing: str) -> None:
    """Set what a rank's environment must hold before it first asks for a GPU."""
    if sharing != APART:  # one GPU, also where there are several
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # of several ranks
    if sharing == "nccl by host":
        os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    if sharing == "nccl by switch":
        os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


def _reduce_once(sharing: str) -> float:
    """Whether two NCCL ranks on one GPU can do anything at all."""
    _prepare(sharing)
    world = join("device=cuda", "share_gpus=true", "backend=nccl", "exchange_timeout_s=20")
    ones = torch.ones(1000, device=world.device)
    world.comm.all_reduce(ones)
    return float(ones.sum())
