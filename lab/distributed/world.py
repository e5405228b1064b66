"""The ranks of one run: rendezvous, devices, agreement and a control plane."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from lab.distributed import launcher
from lab.distributed.comm import Comm
from lab.distributed.launcher import RankInfo, nodes_of
from lab.distributed.torch_comm import all_gather_flat, first_line

ROOT = Path("/")
NONE_WANTED = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES: the user or SLURM hides all
REMEDY = (
    "PyPI's torch needs driver 580 or newer and a Turing GPU or newer; for older ones, install "
    "with TORCH_INDEX=https://download.pytorch.org/whl/cu126 (README), or set device=cpu"
)
Facts = Mapping[str, str]  # what a rank states, by name
MOST_NAMED = 4  # facts that differ; of the others, the line gives the number
HEARD_S = 5.0  # for all ranks to read what differs
LONGEST = 80  # characters of a value in the line
NUM_QUESTIONS = 20  # by each rank, to compare clocks; the quickest answer is used
LIBRARY_MARGIN_S = 10.0  # the watchdog comes first: it can name the rank that hangs
JOIN_LIMIT_S = 600.0  # a busy machine may start one rank minutes after another
_counted = False  # whether this process has registered in the store


def pick_device(device: str, local_rank: int, local_size: int) -> torch.device:
    """Choose the device of a rank by its number on the host; a GPU becomes the current one."""
    if not check_gpus(device, local_size):
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()
    try:
        torch.cuda.set_device(index)
    except RuntimeError as error:
        why = first_line(error)
        raise ValueError(
            f"device={device}: {torch_build()} cannot use GPU {index}: {why}"
        ) from None
    major, minor = torch.cuda.get_device_capability(index)
    built_for = [int(name[3:].rstrip("af")) for name in torch.cuda.get_arch_list() if "sm_" in name]
    if built_for and 10 * major + minor < min(built_for):
        raise ValueError(
            f"device={device}: GPU {index} has compute capability {major}.{minor}, older than "
            f"any that {torch_build()} supports; {REMEDY}"
        )
    return torch.device("cuda", index)


def check_gpus(device: str, local_size: int) -> bool:
    """Return whether the `local_size` ranks of this host compute on GPUs, one each.

    Args:
        device: "auto" (GPUs where there are any), "cpu" or "cuda".

    Raises:
        ValueError: more ranks than GPUs, or this torch can use none of them.
    """
    if device == "cpu":
        return False
    if not is_available():
        if driver := _driver():
            raise ValueError(
                f"device={device}: this host has NVIDIA GPUs (driver {driver}), but "
                f"{torch_build()} cannot use them; {REMEDY}"
            )
        if device == "cuda":
            raise ValueError("device=cuda: torch sees no GPU on this host; set device=cpu")
        return False
    num_gpus = torch.cuda.device_count()
    if local_size > num_gpus:
        s = "s" if num_gpus > 1 else ""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={visible}; each rank must see all)" if visible else ""
        raise ValueError(
            f"device={device}: {local_size} ranks on this host but {num_gpus} GPU{s}{shown}; start "
            f"at most {num_gpus} rank{s}, or set device=cpu or share_gpus=true"
        )
    return True


def is_available() -> bool:
    """Return whether torch can use a GPU, silently; device_count() counts unusable ones too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None if this process has no GPU.

    A container sees its host's /proc, but only the devices that it was given; a SLURM job sees all
    devices, but can open only its own. WSL has a driver without either.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in NONE_WANTED:
        return None
    if (ROOT / "dev/dxg").exists() and (ROOT / "usr/lib/wsl/lib/libcuda.so.1").exists():
        return "from Windows"
    try:
        text = (ROOT / "proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", text)
    devices = (ROOT / "dev").glob("nvidia[0-9]*")
    return found[0] if found and any(map(_opens, devices)) else None


def _opens(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError:
        return False
    return True


def torch_build() -> str:
    """Describe this torch: its version and the CUDA that it was built for."""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"torch {torch.__version__} (built {built})"


class Disagreement(ValueError):
    """Ranks state unlike facts. All of them have this error, with the same line."""


def written(facts: Facts) -> str:
    return json.dumps(dict(facts), sort_keys=True)


def compare_in_store(place: RankInfo, key: str, limit: timedelta) -> None:
    """Compare facts before ranks connect: each has set `key`/its number to them, as written."""
    store, verdict = place.store, f"{key}/verdict"
    heard = [f"{key}/heard/{rank}" for rank in range(place.size)]
    if place.rank == 0:
        texts = [store.get(f"{key}/{rank}").decode() for rank in range(place.size)]
        store.set(verdict, differences([json.loads(text) for text in texts]))
    store.wait([verdict], limit)
    if line := store.get(verdict).decode():
        store.set(heard[place.rank], "")
        if place.rank == 0:  # the store may be in this process, and end with it
            with suppress(dist.DistError):
                store.wait(heard, timedelta(seconds=HEARD_S))
        raise Disagreement(line)


def differences(stated: Sequence[Facts]) -> str:
    """Return one line that names what differs, with each value and its ranks; empty: nothing does.

    Args: stated: the facts of each rank, in rank order.
    """
    names = dict.fromkeys(name for facts in stated for name in facts)
    names = sorted(names, key=lambda name: name.count("."))  # strategy before exchange.threshold
    unlike = [name for name in names if len({facts.get(name) for facts in stated}) > 1]
    if not unlike:
        return ""
    parts = list[str]()
    for name in unlike[:MOST_NAMED]:
        ranks: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(stated):
            ranks.setdefault(facts.get(name), []).append(rank)
        values = [f"{_short(value)} on {ranks_in_words(on)}" for value, on in ranks.items()]
        parts.append(f"{name}: {', '.join(values)}")
    if more := len(unlike) - len(parts):
        parts.append(f"and {more} more")
    return f"{'; '.join(parts)}; must be equal on all ranks"


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    if len(value) <= LONGEST:
        return value
    return f"{value[:LONGEST]}… ({hashlib.sha256(value.encode()).hexdigest()[:6]})"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-1, 4", of numbers in ascending order."""
    runs = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *rest = [rank for _, rank in run]
        runs.append(f"{first}-{rest[-1]}" if rest else str(first))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"


class Waits:
    """The wait of a rank outside any exchange: its label, and since when."""

    def __init__(self) -> None:
        self._current: tuple[str, float] | None = None

    @contextmanager
    def of(self, label: str) -> Iterator[None]:
        """Record `label` as the current wait while the context lasts."""
        self._current = label, time.monotonic()
        try:
            yield
        finally:
            self._current = None

    def current(self) -> tuple[str, float] | None:
        current = self._current
        return current and (current[0], time.monotonic() - current[1])


@dataclass(frozen=True)
class World:
    """One rank's view of the run.

    Attributes:
        store: key-value store of all ranks, which works even when a rank fails. It lives in the
            launcher, or else in rank 0.
        comm: collectives of the exchanges.
        control: a Gloo group for small messages outside measurements.
        waits: this rank's current wait in `control`.
    """

    place: RankInfo
    device: torch.device
    store: dist.PrefixStore
    comm: Comm
    control: dist.ProcessGroup
    waits: Waits = field(default_factory=Waits)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def num_hosts(self) -> int:
        return len(self.comm.nodes)

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's `text` on every rank."""
        return self.gather_text("" if self.rank else text)[0]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather every rank's `values` [...], of one shape, into [size, ...] in host memory."""
        values = values.cpu().contiguous()
        out = torch.empty(self.size * values.numel(), dtype=values.dtype)
        with self.waits.of("a gather outside exchanges"):
            all_gather_flat(self.control, out, values.view(-1)).wait()
        return out.view(self.size, *values.shape)

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's `text` on every rank."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor(len(data))).tolist()
        padded = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
        rows = self.gather(padded).tolist()
        return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]

    def require_equal(self, facts: Facts) -> None:
        """Compare facts of all ranks, of any number and size: they send digests first."""
        text = written(facts)
        digests = self.gather(torch.tensor(list(hashlib.sha256(text.encode()).digest())))
        if bool((digests != digests[0]).any()):
            raise Disagreement(differences([json.loads(each) for each in self.gather_text(text)]))

    def meet(self, event: str, facts: Facts, limit_s: float) -> str:
        """Wait in the store until all ranks come to `event`, and compare what they state.

        Args: event: of this World, a new one for each call.

        Returns: the ranks that have not come within `limit_s`, in words; empty: all have.

        Raises: Disagreement: facts differ.
        """
        key, limit = f"{self.control.group_name}/{event}", timedelta(seconds=limit_s)
        if absent := _absent(self.place, key, limit_s, written(facts)):
            return ranks_in_words(absent)
        compare_in_store(self.place, key, limit)
        return ""

    def clock_ahead_s(self) -> tuple[float, float]:
        """Return the seconds that `perf_counter` is ahead of rank 0's, and its largest error.

        Rank 0 answers with its time (F. Cristian, "Probabilistic clock synchronization", 1989): it
        was read between a rank's question and the answer, so half of that time bounds the error,
        however long either way took. Ranks of one host share a clock: 0 and 0.
        """
        if self.num_hosts == 1:
            return 0.0, 0.0
        best = 0.0, math.inf
        for asking in range(1, self.size):
            for _ in range(NUM_QUESTIONS):
                found = self._ask_time(asking)
                best = min(best, found or best, key=lambda pair: pair[1])
        return (0.0, 0.0) if self.rank == 0 else best

    def _ask_time(self, asking: int) -> tuple[float, float] | None:
        """Let one rank ask rank 0 for its time; return the offset and its error there."""
        time_there = torch.zeros(1, dtype=torch.float64)
        with self.waits.of("a comparison of clocks"):
            if self.rank == asking:
                asked = time.perf_counter()
                dist.send(time_there, 0, group=self.control)
                dist.recv(time_there, 0, group=self.control)
                answered = time.perf_counter()
                return (asked + answered) / 2 - float(time_there), (answered - asked) / 2
            if self.rank == 0:
                dist.recv(time_there, asking, group=self.control)
                time_there[0] = time.perf_counter()
                dist.send(time_there, asking, group=self.control)
        return None

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self.waits.of("a barrier"):
            dist.barrier(group=self.control)


def start(
    connect: Callable[..., Comm],
    device: str,
    backend: str,
    timeout_s: float,
    share_gpus: bool = False,
    facts: Facts | None = None,
) -> World:
    """Join the ranks that were started with this one, or be the only one.

    Args:
        connect: makes the Comm, such as lab.distributed.torch_comm.connect.
        device: see check_gpus.
        backend: "auto", or one that `connect` knows.
        timeout_s: longest time of an exchange, which the watchdog limits; the library's own limit
            is LIBRARY_MARGIN_S longer.
        share_gpus: allow several ranks on one GPU.
        facts: what must be equal on all ranks; compared before they connect, which what differs
            may keep them from.

    Raises:
        Disagreement: facts differ, or the kind of device.
        ValueError: more ranks than GPUs on this host, GPUs that this torch cannot use, or a
            backend that cannot use the device; some ranks do not come within JOIN_LIMIT_S, or
            do not connect in time.
    """
    place = _find_rank_info()
    where = pick_device(device, place.local_rank, 1 if share_gpus else place.local_size)
    limit = timedelta(seconds=timeout_s + LIBRARY_MARGIN_S)
    if place.local_size == place.size and sys.platform == "linux":
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")  # ranks of one host need no other interface
    own = written({**(facts or {}), "device": where.type, "number of ranks": str(place.size)})
    # An exchange's limit may be too short for ranks to come.
    if absent := _absent(place, "came", JOIN_LIMIT_S, own):
        raise ValueError(f"ranks {absent} did not join within {JOIN_LIMIT_S:g} s")
    comm, control = _connect(connect, place, where, backend, limit)
    world = World(place, where, dist.PrefixStore("lab", place.store), comm, control)
    places = world.gather(torch.tensor([place.local_rank, place.local_size]))
    comm.nodes = nodes_of([(row[0], row[1]) for row in places.tolist()])
    return world


def _find_rank_info() -> RankInfo:
    if "HOROVOD_RANK" in os.environ:
        from lab.distributed.horovod_comm import find_rank_info

        return find_rank_info()
    if "RANK" not in os.environ:
        launcher.world_size()  # refuses several
        return RankInfo("python", 0, 1, 0, 1, dist.HashStore())
    rank, size, local_rank, local_size = launcher.place()
    try:
        limit = timedelta(seconds=JOIN_LIMIT_S)  # torch would try for half an hour
        store = next(iter(dist.rendezvous("env://", timeout=limit)))[0]
    except (dist.DistNetworkError, ValueError) as error:
        names = ("MASTER_ADDR", "MASTER_PORT")
        where = " ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        raise ValueError(f"{where}: {first_line(error)}") from None
    store = _of_this_join(store, rank, size, local_size)
    return RankInfo(launcher.started_by(), rank, size, local_rank, local_size, store)


def _of_this_join(store: dist.Store, rank: int, size: int, local_size: int) -> dist.Store:
    """Separate this join's keys from others in the same store, which may outlive its ranks.

    A process may join more than once, as often as the other ranks do, but belongs to one start.
    """
    global _counted
    if local_size == size:  # one agent: all ranks see its count of restarts
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    elif not _counted and store.add("started", 1) > size:
        raise ValueError(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE: must be 1 for torchrun on several hosts, as in "
            "launch/node.sh; torchrun's store still contains keys from an earlier start"
        )
    _counted = True
    return dist.PrefixStore(str(store.add(f"joins/{rank}", 1)), store)


def _absent(place: RankInfo, event: str, limit_s: float, said: str = "") -> list[int]:
    """Say that this rank has come to `event`; return the ranks that have not within `limit_s`."""
    keys = [f"{event}/{rank}" for rank in range(place.size)]
    place.store.set(keys[place.rank], said)
    try:
        place.store.wait(keys, timedelta(seconds=limit_s))
    except dist.DistStoreError:
        return [rank for rank, key in enumerate(keys) if not place.store.check([key])]
    return []


def _connect(
    connect: Callable[..., Comm],
    place: RankInfo,
    device: torch.device,
    backend: str,
    limit: timedelta,
) -> tuple[Comm, dist.ProcessGroup]:
    """Compare what ranks said when they came; make the Comm and the control plane."""
    try:
        compare_in_store(place, "came", limit)
        comm = connect(place, device, backend, limit)
        control = dist.new_group(backend="gloo", timeout=limit)
    except dist.DistStoreError:
        # Rank 0 waits longer than the others: the store may be in it, and end with it.
        absent = _absent(place, "gave_up", LIBRARY_MARGIN_S / (1 if place.rank == 0 else 2))
        if not absent:
            raise
        raise ValueError(
            f"ranks {absent} did not connect to the others within {limit.total_seconds():g} s"
        ) from None
    assert isinstance(control, dist.ProcessGroup)
    return comm, control


def stop() -> None:
    """Leave all process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
