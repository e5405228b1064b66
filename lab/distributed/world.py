"""The ranks of one run: how they find each other, their device, and a control plane."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from lab.distributed.torch_comm import TorchComm, all_gather_flat


@dataclass(frozen=True)
class World:
    """One rank's view of the run.

    Attributes:
        store: key-value store of all ranks; alive as long as the launcher, so that a failing rank
            can still say why.
        comm: what exchanges use (NCCL or Gloo).
        control: a Gloo group for small messages that no measurement sees.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    store: dist.PrefixStore
    comm: TorchComm
    control: dist.ProcessGroup

    def broadcast_text(self, text: str) -> str:
        """Rank 0's `text`, on every rank."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.control)
        if self.rank:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.control)
        return bytes(data.tolist()).decode()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's `values` [...], the same shape on all: [size, ...] on every rank's host."""
        values = values.cpu().contiguous()
        out = torch.empty(self.size * values.numel(), dtype=values.dtype)
        all_gather_flat(out, values.view(-1), group=self.control)
        return out.view(self.size, *values.shape)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        dist.barrier(group=self.control)


def start(device: str, backend: str, timeout_s: float) -> World:
    """Join the ranks that torchrun started, or be the only one.

    Args:
        device: "auto" (GPUs where there are any), "cpu" or "cuda".
        backend: "auto" (NCCL on GPUs, Gloo otherwise), "gloo" or "nccl".
        timeout_s: a collective that takes longer fails. The watch, which can name what hangs,
            has the same limit; the library's comes a little later.

    Raises:
        ValueError: more ranks than GPUs on this host, or a backend the device cannot use.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    where = _pick_device(device, local_rank, local_size)
    if backend == "auto":
        backend = "nccl" if where.type == "cuda" else "gloo"
    if backend == "nccl" and where.type != "cuda":
        raise ValueError("backend=nccl: needs GPUs; on CPUs use backend=gloo")
    if "RANK" in os.environ:
        store, rank, size = next(iter(dist.rendezvous("env://")))
    else:
        store, rank, size = dist.HashStore(), 0, 1
    limit = timedelta(seconds=timeout_s + 10)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=where if backend == "nccl" else None,
    )
    control = dist.new_group(backend="gloo", timeout=limit)
    assert dist.group.WORLD is not None and isinstance(control, dist.ProcessGroup)
    comm = TorchComm(dist.group.WORLD)
    messages = dist.PrefixStore("lab", store)
    return World(rank, size, local_rank, local_size, where, backend, messages, comm, control)


def stop() -> None:
    """Leave the process groups, if this process has joined any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Leave at once, even if threads of this process wait for ranks that will never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_gpus(device: str, local_size: int) -> bool:
    """Whether `local_size` ranks on this host compute on GPUs, one each.

    Raises:
        ValueError: there are fewer GPUs than ranks that want one.
    """
    num_gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return False
    if local_size > num_gpus:
        raise ValueError(
            f"device={device}: {local_size} ranks on this host but {num_gpus} GPUs; start at most "
            f"{num_gpus} ranks, or set device=cpu"
        )
    return True


def _pick_device(device: str, local_rank: int, local_size: int) -> torch.device:
    if not check_gpus(device, local_size):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
