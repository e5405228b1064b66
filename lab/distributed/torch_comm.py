"""Comm over torch.distributed: NCCL on GPUs, Gloo on CPUs; and the memory that ranks share."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lab.distributed.comm import Collective, Comm, NoWindow, Transfer, Window
from lab.distributed.launcher import RankInfo

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree")
PROTOCOLS = ("LL", "LL128", "Simple")
ON_GPUS = ("Ring", "Tree")  # the others sum in a switch, in no fixed order, with Simple only
# A message to one rank from which all_to_all pays for a second call, about 0.2 ms over loopback.
TWO_WAY_BYTES = 2**18
# Three methods were renamed in torch 2.13.
_OLD = not hasattr(dist.ProcessGroup, "all_gather_single")
ALL_GATHER = "_allgather_base" if _OLD else "all_gather_single"
ALL_TO_ALL = "alltoall_base" if _OLD else "all_to_all_single"
REDUCE_SCATTER = "_reduce_scatter_base" if _OLD else "reduce_scatter_single"
IN_MEMORY = "/dev/shm"  # files there are in memory alone
TEXT_BYTES = 512  # of what a rank tells others
CPU = torch.device("cpu")
_num_groups = Counter[tuple[int, ...]]()  # that were made, by this rank and the ranks in them
_naming = threading.local()


class Works(list[dist.Work]):
    """A batch of transfers: one work in all under NCCL, one each under Gloo."""

    def wait(self) -> None:
        for work in self:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self)


def _let_go(recent: Iterable[Collective]) -> None:
    """Let the last collectives end before Python does, for at most a second.

    Gloo's thread drops the tensors of a collective that has ended, for which it needs Python's
    lock. A process whose Python ends in between is aborted, after a run that went well.
    """
    until = time.monotonic() + 1
    while time.monotonic() < until and not all(each.is_completed() for each in recent):
        time.sleep(1e-3)
    time.sleep(1e-3)


class TorchComm(Comm):
    """Collectives over the ranks of a torch process group.

    Under NCCL a collective runs in the current stream, the worker's own: in one of NCCL's it would
    wait for that stream, and that stream for it. Transfers to one rank run in NCCL's stream, since
    several may be under way. Under Gloo a wait returns once the call is complete.

    Args:
        second: under Gloo another group of the same ranks, for all_gather and for sends to lower
            ranks; under NCCL the same as `group`.
        limit: timeout of a collective; `split` gives it to its groups.
    """

    no_windows = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        second: dist.ProcessGroup,
        device: torch.device,
        limit: timedelta | None = None,
    ) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group
        self._second = second
        self._down: dist.ProcessGroup | None = None  # connections to lower ranks, for all_to_all
        self._made: list[dist.ProcessGroup] = []  # that one, and those of `split`
        self.device = device
        self._limit = limit
        self.backend = dist.get_backend(group)
        self._recent: deque[Collective] = deque(maxlen=2)
        if self.backend == "gloo":
            weakref.finalize(self, _let_go, self._recent)
        self.asynchronous = self.backend == "gloo" and device.type == "cpu"
        self.times_waits = self.backend == "gloo"  # NCCL's calls return, and streams wait
        self._in_stream = self.backend == "nccl"
        if self.backend == "gloo" and device.type == "cuda":
            self.no_send_recv = "Gloo cannot send tensors on GPUs; use backend=nccl"

    def leave(self) -> None:
        """Leave its process groups, and those made of their ranks, as all of these do."""
        for group in dict.fromkeys([self.group, self._second, *self._made]):
            dist.destroy_process_group(group)

    def _begin(self, call: Callable[..., Any], *arguments: Any) -> Collective:
        """Begin a collective, and keep the last two for `_let_go`."""
        collective = super()._begin(call, *arguments)
        if self.backend == "gloo":
            self._recent.append(collective)
        return collective

    def _iall_reduce(self, tensor: Tensor) -> Collective | None:
        return self.group.allreduce([tensor], *self._options(dist.AllreduceOptions))

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Collective | None:
        options = self._options(distributed_c10d.AllgatherOptions)
        return all_gather_flat(self._second, output.view(-1), tensor.view(-1), *options)

    def _iall_gather_rows(self, rows: Tensor) -> Collective:
        if self.backend == "nccl" or self.no_send_recv:
            return super()._iall_gather_rows(rows)
        # Gloo's own takes twice the time of a core, as it copies, and it waits between its pieces.
        others = [*range(self.rank), *range(self.rank + 1, self.size)]
        sends = [(rows[self.rank], rank) for rank in others]
        transfers = self.isend_irecv(sends, [(rows[rank], rank) for rank in others])
        return cast(Collective, transfers)  # Works can tell whether they are complete

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> Collective | None:
        if self.backend == "gloo" and tensor[0].nbytes >= TWO_WAY_BYTES:
            return self._both_ways(output, tensor)
        options = self._options(dist.AllToAllOptions)
        return all_to_all_flat(self.group, output, tensor, [], [], *options)

    def _options(self, kind: Callable[[], Any]) -> list[Any]:
        """Return options of a collective that runs in the current stream; [] for the defaults."""
        if not self._in_stream:
            return []
        options = kind()
        options.asyncOp = False
        return [options]

    def _both_ways(self, output: Tensor, tensor: Tensor) -> Works:
        """Begin an all_to_all over two sets of connections, one to higher and one to lower ranks.

        Over one connection, the rank that begins first waits for a short answer, and the other rank
        sends this after its own data: so Gloo sends in one direction at a time.
        """
        if self._down is None:
            self._down = self._group_of(list(range(self.size)))
        output[self.rank].copy_(tensor[self.rank])
        low, high = range(self.rank), range(self.rank + 1, self.size)

        def one_way(come: range, go: range, group: dist.ProcessGroup) -> dist.Work:
            rows = output[come.start : come.stop], tensor[go.start : go.stop]
            splits = [[int(rank in way) for rank in range(self.size)] for way in (come, go)]
            return all_to_all_flat(group, *rows, *splits)

        return Works([one_way(low, high, self.group), one_way(high, low, self._down)])

    def _ireduce_scatter(self, output: Tensor, tensor: Tensor, parts: Tensor | None) -> Collective:
        if self.backend != "nccl":
            return super()._ireduce_scatter(output, tensor, parts)
        flat = output.view(-1), tensor.view(-1)
        options = self._options(dist.ReduceScatterOptions)
        return self._begin(reduce_scatter_flat, self.group, *flat, *options)

    def _ibroadcast(self, tensor: Tensor, source: int) -> Collective | None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = not self._in_stream
        return self.group.broadcast([tensor], options)

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Works:
        if self.backend == "nccl":
            # One NCCL group, within which transfers do not wait for each other. Outside a group
            # they would: a communicator runs all of them on one stream.
            operations = [
                dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
                for operation, transfers in ((dist.irecv, receives), (dist.isend, sends))
                for tensor, peer in transfers
            ]
            return Works(dist.batch_isend_irecv(operations) if operations else [])
        works = [
            dist.irecv(tensor, group=self._connections(peer, self.rank), group_src=peer)
            for tensor, peer in receives
        ]
        works += [
            dist.isend(tensor, group=self._connections(self.rank, peer), group_dst=peer)
            for tensor, peer in sends
        ]
        return Works(filter(None, works))  # only ranks outside the group get None

    def _window(self, num_bytes: int, device: torch.device) -> Window:
        if device.type == "cuda":
            return symmetric(self, self.group, num_bytes, device)
        return in_file(self, num_bytes)

    def _imeet(self, window: Window, num_bytes: int, last: bool) -> Collective | None:
        if window.handle is not None:
            limit = timedelta() if self._limit is None else self._limit
            window.handle.barrier(0, timeout_ms=int(1000 * limit.total_seconds()))
            return None
        # No rank has the result before all have begun.
        words = torch.zeros(self.size, dtype=torch.uint8)
        if last:
            return all_gather_flat(self._second, words, words[self.rank : self.rank + 1].clone())
        return self.group.allreduce([words])

    def _split(self, color: int) -> tuple[TorchComm, list[int]]:
        colors = torch.empty(self.size, dtype=torch.int64, device=self.device)
        own = torch.tensor([color], device=self.device)
        all_gather_flat(self.group, colors, own).wait()
        everyones = cast(list[int], colors.tolist())  # pyright: ignore[reportUnknownMemberType]
        members = [rank for rank, other in enumerate(everyones) if other == color]
        group = self._group_of(members)
        second = group if self._second is self.group else self._group_of(members)
        return TorchComm(group, second, self.device, self._limit), members

    def _group_of(self, members: list[int]) -> dist.ProcessGroup:
        ranks = [dist.get_global_rank(self.group, rank) for rank in members]
        self._made.append(group := group_of(ranks, self.backend, self._limit))
        return group

    def _connections(self, source: int, to: int) -> dist.ProcessGroup:
        """Give each direction its own connection: Gloo locks one while it reads or writes."""
        return self.group if source < to else self._second


def group_of(
    ranks: list[int], backend: str, limit: timedelta | None, options: Any = None
) -> dist.ProcessGroup:
    """Make a group of this rank and others, without waiting for ranks of other groups.

    torch would name it by the number of all groups that this rank is in. Others of `ranks` may be
    in more or fewer, and ranks with unlike names wait for each other in vain. After
    destroy_process_group, a name would come again, with addresses of before in the store.
    """
    _let_threads_name_groups()
    members = dist.get_rank(), *ranks
    _num_groups[members] += 1
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    _naming.name = f"lab-{digest}-{_num_groups[members]}"
    try:
        group = dist.new_group(
            ranks, limit, backend, pg_options=options, use_local_synchronization=True
        )
    finally:
        _naming.name = ""
    assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
    return group


@cache
def _let_threads_name_groups() -> None:
    """Have torch name a group by `_naming.name` in a thread that sets it: new_group takes none."""
    c10d = cast(Any, distributed_c10d)
    torchs = c10d._process_group_name

    def name(*given: Any, **settings: Any) -> str:
        return getattr(_naming, "name", "") or torchs(*given, **settings)

    c10d._process_group_name = name


def connect(
    place: RankInfo,
    device: torch.device,
    backend: str,
    limit: timedelta,
    nccl_algo: str | None = None,
    nccl_proto: str | None = None,
    deterministic: bool = False,
) -> TorchComm:
    """Join the process group of all ranks, or make another one of the same ranks.

    Args:
        backend: "auto" (NCCL on GPUs, Gloo otherwise), "gloo" or "nccl".
        limit: timeout of a collective.
        nccl_algo, nccl_proto: algorithm and protocol of NCCL's all-reduce, see
            lab.distributed.torch_comm.
        deterministic: NCCL sums in the same order in every run.

    Raises:
        ValueError: the backend cannot use the device; NCCL is not used or does not know the
            algorithm or protocol; or `deterministic` is no bool.
    """
    if not isinstance(cast(object, deterministic), bool):
        raise ValueError(f"comm.deterministic={deterministic}: must be true or false")
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise ValueError("backend=nccl: needs GPUs; on CPUs use backend=gloo")
    for name, value in (("nccl_algo", nccl_algo), ("nccl_proto", nccl_proto)):
        if value is not None and backend != "nccl":
            raise ValueError(
                f"comm.{name}={value} has an effect only with NCCL, but these ranks use {backend}"
            )
    if backend == "nccl":
        settings = nccl_variables(nccl_algo, nccl_proto, deterministic)
        with told(settings):
            # Bound to its device, NCCL connects now, and not at the first collective.
            group = _group(place, backend, limit, nccl_options(limit), device)
        comm = TorchComm(group, group, device, limit)
        comm.settings = settings
        return comm
    group = _group(place, backend, limit)
    return TorchComm(group, _group(place, backend, limit), device, limit)


def _group(
    place: RankInfo,
    backend: str,
    limit: timedelta,
    options: Any = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """Return the first process group of all ranks, or another one if they have joined before."""
    common: dict[str, Any] = {"timeout": limit, "pg_options": options, "device_id": device}
    if dist.is_initialized():
        group = dist.new_group(backend=backend, **common)
    else:
        try:
            dist.init_process_group(
                backend, store=place.store, rank=place.rank, world_size=place.size, **common
            )
        except dist.DistError:  # about other ranks
            raise
        except RuntimeError as error:  # as of Gloo where there is no network, not even loopback
            raise ValueError(f"backend={backend}: cannot be used here: {error}") from None
        group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


# Collectives are a process group's own methods: torch.distributed's functions check and log each
# call, which takes several times as long.


def all_gather_flat(
    group: dist.ProcessGroup, output: Tensor, tensor: Tensor, *options: Any
) -> dist.Work:
    """Begin to fill `output` [ranks * n] with every rank's `tensor` [n]."""
    return getattr(group, ALL_GATHER)(output, tensor, *options)


def all_to_all_flat(
    group: dist.ProcessGroup,
    output: Tensor,
    tensor: Tensor,
    come: list[int],
    go: list[int],
    *options: Any,
) -> dist.Work:
    """Begin to send parts of `tensor` [n, ...] to ranks: `go` rows to each; [] as many to all."""
    return getattr(group, ALL_TO_ALL)(output, tensor, come, go, *options)


def reduce_scatter_flat(
    group: dist.ProcessGroup, output: Tensor, tensor: Tensor, *options: Any
) -> dist.Work:
    """Begin to fill `output` [n] with the sum of a part of the ranks' `tensor` [ranks * n]."""
    return getattr(group, REDUCE_SCATTER)(output, tensor, *options)


def nccl_variables(
    algorithm: str | None, protocol: str | None, deterministic: bool = False
) -> dict[str, str]:
    """Return NCCL's environment variables for a communicator; arguments as of `connect`."""
    found = {}
    if deterministic:
        found |= {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
    if protocol is not None:
        protocol = _one_of(PROTOCOLS, "nccl_proto", protocol)
        found["NCCL_PROTO"] = f"allreduce:{protocol}"
    if algorithm is not None:
        algorithm = _one_of(ALGORITHMS, "nccl_algo", algorithm)
        if algorithm not in ON_GPUS and protocol not in (None, "Simple"):
            raise ValueError(f"comm.nccl_proto={protocol}: {algorithm} supports only Simple")
        if algorithm not in ON_GPUS and deterministic:
            raise ValueError(
                f"comm.nccl_algo={algorithm}: sums in a switch, so deterministic=true cannot "
                f"guarantee the order; allowed: {', '.join(ON_GPUS)}"
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


def nccl_options(limit: timedelta) -> dist.ProcessGroupNCCL.Options:
    """Return the options of a process group of NCCL.

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
    raise ValueError(f"comm.{key}={given}: allowed: {', '.join(allowed)}, null")


# Windows: memory that all ranks of a node read and write, a file that they map or symmetric memory
# of GPUs. What stands in its way on any rank is told to all, so that they agree to do without.


def in_file(comm: Comm, num_bytes: int) -> Window:
    """Return a window in memory of the host, which all ranks map.

    Its file has no name any more when this returns, so nothing is left of it when they end.

    Raises:
        NoWindow: it does not fit, or a rank does not see it, as in a container of its own.
    """
    row_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    path, problem = "", ""
    if comm.rank == 0:
        try:
            path = _new_file(comm.size * row_bytes)
        except OSError as error:
            problem = first_line(error)
    try:
        _agree(comm, problem, CPU)
        rows = torch.empty(0)
        try:
            rows = _mapped(_everyones(comm, path, CPU)[0], comm.size, row_bytes)
        except OSError as error:
            problem = first_line(error)
        _agree(comm, problem, CPU)
    finally:
        if path:
            Path(path).unlink()
    return Window(rows[:, :num_bytes])


def _new_file(num_bytes: int) -> str:
    """Return the path of a new file of zeros, all of which is in memory."""
    descriptor, path = tempfile.mkstemp(prefix="lab-window-", dir=IN_MEMORY)
    try:
        # Of a file that is only made longer, a page that does not fit ends the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        Path(path).unlink()
        raise
    finally:
        os.close(descriptor)
    return path


def _mapped(path: str, size: int, row_bytes: int) -> Tensor:
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size * row_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(size, row_bytes)  # keeps `memory`


def symmetric(comm: Comm, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> Window:
    """Return a window of GPUs' symmetric memory (torch.distributed._symmetric_memory).

    Raises:
        NoWindow: this torch has none, or a GPU does not reach another one's memory.
    """
    _agree(comm, _unreachable(comm, device), device)
    window, problem = Window(()), ""
    try:
        import torch.distributed._symmetric_memory as memory

        own = memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        handle = memory.rendezvous(own, group)
        rows = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(comm.size)]
        window = Window((*rows[: comm.rank], own, *rows[comm.rank + 1 :]), handle)
    except (ImportError, AttributeError, RuntimeError) as error:  # of torch, or of the driver
        problem = first_line(error)
    _agree(comm, problem, device)
    return window


def _unreachable(comm: Comm, device: torch.device) -> str:
    """Name a GPU whose memory this rank's does not reach; empty: all that are seen, it does.

    Where ranks see their own GPU alone, only a trial shows it.
    """
    others = {int(index) for index in _everyones(comm, str(device.index), device)}
    if len(others) < comm.size:
        return ""
    for other in others - {device.index}:
        seen = max(other, device.index) < torch.cuda.device_count()
        if seen and not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} has no access to the memory of GPU {other}"
    return ""


def _agree(comm: Comm, problem: str, device: torch.device) -> None:
    """Raise NoWindow on all ranks if one has a problem; the first one's is named."""
    for rank, told in enumerate(_everyones(comm, problem, device)):
        if told:
            raise NoWindow(f"rank {rank}: {told}")


def _everyones(comm: Comm, text: str, device: torch.device) -> list[str]:
    """Return every rank's text, cut to TEXT_BYTES."""
    texts = torch.zeros(comm.size, TEXT_BYTES, dtype=torch.uint8)
    encoded = list(text.encode()[:TEXT_BYTES])
    texts[comm.rank, : len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
    texts = texts.to(device)
    with comm.traffic.uncounted():
        comm.all_reduce(texts)  # whose order among other collectives is that of first stages
    rows = texts.cpu().numpy()
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if there is none."""
    line = next(filter(str.strip, str(error).splitlines()), type(error).__name__)
    return line.strip()
