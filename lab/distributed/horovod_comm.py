"""Comm over Horovod, and the rendezvous of ranks that horovodrun started.

Horovod, which `make horovod` builds, is imported only here.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from lab.distributed.comm import Comm
from lab.distributed.launcher import RankInfo

ADDRESS_BYTES = 256


def horovod() -> ModuleType:
    """Import Horovod's torch module; ValueError: it is not installed."""
    try:
        import horovod.torch as hvd  # type: ignore[import-not-found]  # make horovod builds it
    except ImportError as error:
        raise ValueError(
            f"comm=horovod: Horovod cannot be imported ({error}); run make horovod"
        ) from None
    return hvd


class HorovodComm(Comm):
    """Collectives over Horovod's ranks. Every call is complete when it returns.

    Horovod matches operations of different ranks by name, and caches names, so an operation has the
    same name in every step. One is in flight at a time. Horovod sums; the caller divides.
    """

    backend = "horovod"
    no_send_recv = "Horovod has only collectives; use comm=torch"
    no_split = "Horovod has only one group; use comm=torch"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._hvd = horovod()

    def _iall_reduce(self, tensor: Tensor) -> None:
        hvd = self._hvd
        name = _name("all_reduce", tensor)
        hvd.synchronize(hvd.allreduce_async_(tensor, name=name, op=hvd.Sum))

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> None:
        # One row per rank: Horovod concatenates along the first dimension.
        gathered = self._hvd.allgather(tensor.view(1, -1), name=_name("all_gather", tensor))
        output.copy_(gathered.view_as(output))

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> None:
        output.copy_(self._hvd.alltoall(tensor, name=_name("all_to_all", tensor)).view_as(output))

    def _ibroadcast(self, tensor: Tensor, source: int) -> None:
        flat = tensor.as_strided((tensor.numel(),), (1,))  # Horovod refuses channels_last
        self._hvd.broadcast_(flat, source, name=_name("broadcast", tensor))


def connect(place: RankInfo, device: torch.device, backend: str, limit: timedelta) -> HorovodComm:
    """Join Horovod's ranks, and a Gloo group of torch for control messages outside measurements.

    Raises:
        ValueError: Horovod is missing, did not start these ranks or cannot use their device; or
            `backend` is not "auto".
    """
    if backend != "auto":
        raise ValueError(f"backend={backend}: comm=horovod has its own backend; leave backend=auto")
    hvd = horovod()
    hvd.init()
    if hvd.size() != place.size:
        raise ValueError(
            f"comm=horovod: {place.launcher} started these ranks; start them with "
            f"horovodrun -np {place.size} python -m lab.train comm=horovod ..."
        )
    if device.type == "cuda" and not hvd.cuda_built():
        raise ValueError(
            "comm=horovod: this Horovod was built without CUDA, as make horovod does, but "
            "the ranks have GPUs; set device=cpu"
        )
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=place.store, rank=place.rank, world_size=place.size, timeout=limit
        )
    return HorovodComm(place.rank, place.size)


def find_rank_info() -> RankInfo:
    """Read this rank from horovodrun's environment; rank 0 opens the store and tells the others."""
    hvd = horovod()
    hvd.init()
    rank, size, local_size = hvd.rank(), hvd.size(), hvd.local_size()
    # Listen on other interfaces than loopback only if other hosts must reach this rank.
    host = os.environ["HOROVOD_HOSTNAME"] if local_size < size else "127.0.0.1"
    listener = socket.create_server((host, 0)) if rank == 0 else None
    address = f"{host} {listener.getsockname()[1]}" if listener else ""
    # Horovod's own broadcast of objects would unpickle received data.
    data = torch.tensor(list(address.encode().ljust(ADDRESS_BYTES)), dtype=torch.uint8)
    host, port = bytes(hvd.broadcast(data, 0, name="lab.address").tolist()).decode().split()
    store = dist.TCPStore(
        host,
        int(port),
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    return RankInfo("horovodrun", rank, size, hvd.local_rank(), local_size, store)


def _name(operation: str, tensor: Tensor) -> str:
    return f"lab.{operation}.{tensor.dtype}.{'x'.join(map(str, tensor.shape))}"
