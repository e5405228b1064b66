"""Ranks join: their devices, the facts they agree on, the store, and their clocks."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.distributed import horovod_comm, world
from lab.distributed.comm import Comm
from lab.distributed.launcher import RankInfo
from lab.distributed.world import MOST_NAMED, Disagreement, differences, written
from lab.settings.config import ConfigError, build, load
from lab.sync.ddp import DDPSync
from lab.training.assemble import require_like_gpus
from tests.support.ports import free_port


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_counted", False)


def test_a_process_that_joins_again_is_no_start_of_its_own(fresh_process: None) -> None:
    store = dist.HashStore()
    for _ in range(3):  # lab.bench step joins once for each way to communicate
        joined = world._of_this_join(store, 0, size=2, local_size=1)
        assert joined.add("came", 1) == 1  # nothing of an earlier join is taken for this one's
    assert store.add("started", 0) == 1


def test_a_store_that_an_earlier_start_has_used_is_refused(fresh_process: None) -> None:
    store = dist.HashStore()
    store.add("started", 2)
    with pytest.raises(ValueError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE: must be 1"):
        world._of_this_join(store, 0, size=2, local_size=1)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("LOCAL_RANK", "", "from 0 to 1"),
        ("RANK", "5", "from 0 to 1"),  # it would wait for ranks that never come
        ("WORLD_SIZE", "0", "from 1 to 999999"),
        ("LOCAL_WORLD_SIZE", "two", "from 1 to 999999"),
    ],
)
def test_a_place_where_no_rank_can_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "2")
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}={value}: must be a number {allowed}, as"):
        world._find_rank_info()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of rank 0 of three, of which none but this one is real."""
    store = dist.HashStore()
    monkeypatch.setattr(world, "_find_rank_info", lambda: RankInfo("env", 0, 3, 0, 1, store))
    return store


GPU = torch.device("cuda", 0)
SAID = written({"device": "cpu", "number of ranks": "3"})  # what a rank says when it comes


def connect_in_vain(*_: Any) -> Comm:
    raise dist.DistStoreError("wait timeout after 5100ms, keys: /0/0//1//cpu//0/1")


def start() -> None:
    world.start(connect_in_vain, "cpu", "gloo", timeout_s=5)


def test_ranks_that_do_not_join_are_named(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "JOIN_LIMIT_S", 0.1)
    store.set("came/2", SAID)
    with pytest.raises(ValueError, match=r"ranks \[1\] did not join within 0.1 s"):
        start()


def test_a_rank_that_hangs_while_others_connect_is_named(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "LIBRARY_MARGIN_S", 0.1)
    for key, value in {"came/1": SAID, "came/2": SAID, "gave_up/2": ""}.items():
        store.set(key, value)
    with pytest.raises(ValueError, match=r"ranks \[1\] did not connect to the others within 5.1 s"):
        start()
    store.set("gave_up/1", "")
    with pytest.raises(dist.DistStoreError):  # none hangs: torch's own error says more
        start()


def test_ranks_of_unlike_facts_are_refused_before_they_connect(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "HEARD_S", 0.1)  # the others hear nothing
    for rank in (1, 2):
        store.set(f"came/{rank}", written({"device": "cuda", "number of ranks": "3"}))
    with pytest.raises(Disagreement, match="device: cpu on rank 0, cuda on ranks 1-2; must be eq"):
        start()


def test_a_rank_that_comes_late_is_waited_for() -> None:
    store = dist.HashStore()
    late = threading.Timer(0.2, store.set, ("came/1", ""))
    late.start()
    assert world._absent(RankInfo("env", 0, 2, 0, 1, store), "came", 60) == []
    late.join()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ValueError, match=f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: .*in use"):
            world._find_rank_info()
        monkeypatch.setenv("MASTER_PORT", "http")
        with pytest.raises(ValueError, match="MASTER_ADDR=127.0.0.1 MASTER_PORT=http: "):
            world._find_rank_info()
        monkeypatch.delenv("MASTER_PORT")
        with pytest.raises(ValueError, match="MASTER_ADDR=127.0.0.1 MASTER_PORT=: "):
            world._find_rank_info()


def test_a_first_rank_that_never_listens_is_waited_for_as_long_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "JOIN_LIMIT_S", 1.0)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**place, **where}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=r"^MASTER_ADDR=127\.0\.0\.1 MASTER_PORT=\d+: .*timed out"):
        world._find_rank_info()


@pytest.mark.parametrize(("device", "built"), [("cuda", False), ("cuda", True), ("cpu", False)])
def test_horovod_without_cuda_names_the_device_to_use(
    monkeypatch: pytest.MonkeyPatch, device: str, built: bool
) -> None:
    hvd = SimpleNamespace(init=lambda: None, size=lambda: 2, cuda_built=lambda: built)
    monkeypatch.setattr(horovod_comm, "horovod", lambda: hvd)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    place = RankInfo("horovodrun", 0, 2, 0, 2, dist.HashStore())
    arguments = place, torch.device(device), "auto", timedelta(seconds=1)
    if device == "cpu" or built:
        assert horovod_comm.connect(*arguments).size == 2
        return
    with pytest.raises(ValueError, match="comm=horovod: .*without CUDA.*set device=cpu"):
        horovod_comm.connect(*arguments)


def test_what_all_ranks_compute_alike_needs_gpus_of_one_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")

    def required(exchange: str, *kinds: str) -> None:
        world: Any = SimpleNamespace(device=GPU, gather_text=lambda own: list(kinds))
        require_like_gpus(world, build(load([f"exchange={exchange}"]).exchange))

    required("powersgd", "A100", "A100")
    for name in ("allreduce", "onebit", "topk", "randomk", "ring"):
        required(name, "A100", "H100")
    for name in ("powersgd", "auto"):  # `auto` is made of it
        with pytest.raises(ConfigError, match=r"kind.* A100 \(ranks \[0, 2\]\), H100 \(ranks \[1"):
            required(name, "A100", "H100", "A100")
    others = load(["exchange=auto", "exchange.among=[bf16,onebit]"])
    assert not build(others.exchange).needs_like_gpus


@pytest.mark.parametrize(("hook", "needs"), [("fp16", False), ("powersgd", True)])
def test_of_ddps_hooks_powersgd_needs_gpus_of_one_kind(hook: str, needs: bool) -> None:
    sync = DDPSync.__new__(DDPSync)
    sync.wrapped = SimpleNamespace(register_comm_hook=lambda *_: None)  # type: ignore[assignment]
    sync._wire_bytes = 4
    sync._register(hook, None, None)  # type: ignore[arg-type]
    assert sync.needs_like_gpus is needs


@pytest.mark.parametrize(
    ("stated", "line"),
    [
        ([{"steps": "3"}] * 4, ""),
        ([{"steps": "3"}], ""),
        (
            [{"batch_size": "24"}, {"batch_size": "24"}, {"batch_size": "48"}],
            "batch_size: 24 on ranks 0-1, 48 on rank 2; must be equal on all ranks",
        ),
        (
            [{"code.nets_py": "1a2b", "seed": "0"}, {"seed": "0"}],
            "code.nets_py: 1a2b on rank 0, nothing on rank 1; must be equal on all ranks",
        ),
        (
            [{"n": "1"}, {"n": "2"}, {"n": "1"}, {"n": "1"}],
            "n: 1 on ranks 0, 2-3, 2 on rank 1; must be equal on all ranks",
        ),
        (  # of many, the first are named and the others counted
            [{f"key{n}": side for n in range(MOST_NAMED + 3)} for side in "ab"],
            "; ".join(f"key{n}: a on rank 0, b on rank 1" for n in range(MOST_NAMED))
            + "; and 3 more; must be equal on all ranks",
        ),
    ],
)
def test_what_differs_is_named_with_its_ranks(stated: list[dict[str, str]], line: str) -> None:
    assert differences(stated) == line


def test_long_values_that_differ_at_their_ends_are_told_apart() -> None:
    line = differences([{"path": "x" * 500 + "a"}, {"path": "x" * 500 + "b"}])
    first, second = line.removeprefix("path: ").split(" on rank 0, ")
    assert len(line) < 300
    assert first != second.partition(" on rank 1")[0]


VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root)\n"
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Make a host: its driver and devices, the CUDA torch is built for, the GPUs torch counts."""

    def make(
        driver: str | None = None,
        devices: tuple[str, ...] = (),
        cuda: str | None = "13.0",
        counted: int = 0,
        usable: bool = False,
        visible: str | None = None,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        (tmp_path / "dev").mkdir()
        for name in devices:
            (tmp_path / "dev" / name).touch()
        if driver:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
            (tmp_path / "proc/driver/nvidia/version").write_text(VERSION.format(driver))
        monkeypatch.setattr(world, "ROOT", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])

    return make


def test_ranks_take_gpus_in_turn(machine: Machine) -> None:
    machine("580.65.06", ("nvidia0", "nvidia1"), counted=2, usable=True)
    picked = [world.pick_device("auto", rank, 1) for rank in range(3)]
    assert [str(each) for each in picked] == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("cuda", "counted", "said"),
    [
        ("13.0", 8, f"torch {torch.__version__} (built for CUDA 13.0)"),  # NVML counts, CUDA fails
        (None, 0, f"torch {torch.__version__} (built without CUDA)"),
    ],
)
def test_gpus_that_torch_cannot_use_are_no_reason_for_the_cpu(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    cuda: str | None,
    counted: int,
    said: str,
) -> None:
    def warn() -> bool:  # as torch does, of a driver that is too old
        warnings.warn("CUDA initialization: The NVIDIA driver is too old", stacklevel=1)
        return False

    machine("535.104.05", ("nvidia0", "nvidiactl"), cuda=cuda, counted=counted)
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    with pytest.raises(ValueError) as error:
        world.pick_device(device, 0, 1)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"device={device}: this host has NVIDIA GPUs (driver 535.104.05), but ")
    assert said in line
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cu126" in line
    assert world.pick_device("cpu", 0, 1) == torch.device("cpu")


@pytest.mark.parametrize(
    "host",
    [
        {},
        {"driver": "535.104.05", "devices": ("nvidiactl",)},  # a container without GPUs
        {"driver": "535.104.05", "devices": ("nvidia0",), "visible": ""},
        {"driver": "535.104.05", "devices": ("nvidia0",), "visible": "-1"},
    ],
)
def test_without_gpus_or_with_hidden_ones_ranks_compute_on_the_cpu(
    machine: Machine, host: dict[str, Any]
) -> None:
    machine(**host)
    assert world.pick_device("auto", 0, 4) == torch.device("cpu")
    with pytest.raises(ValueError, match="device=cuda: torch sees no GPU on this host"):
        world.pick_device("cuda", 0, 1)


def test_a_gpu_that_this_job_may_not_open_is_not_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    machine("535.104.05", ("nvidia0",))
    monkeypatch.setattr(world.os, "open", refuse)
    assert world.pick_device("auto", 0, 1) == torch.device("cpu")


def test_linux_under_windows_has_a_driver_of_its_own(machine: Machine, tmp_path: Path) -> None:
    machine(devices=("dxg",), cuda=None)
    assert world.pick_device("auto", 0, 1) == torch.device("cpu")  # another maker's GPU
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    with pytest.raises(ValueError, match=r"has NVIDIA GPUs \(driver from Windows\), but torch"):
        world.pick_device("auto", 0, 1)


@pytest.mark.parametrize(
    ("local_size", "capability", "message"),
    [
        (2, (9, 0), "device=auto: 2 ranks on this host but 1 GPU;"),
        (1, (7, 0), r"GPU 0 has compute capability 7\.0, older .*whl/cu126"),
    ],
)
def test_too_few_or_too_old_gpus_are_refused(
    machine: Machine, local_size: int, capability: tuple[int, int], message: str
) -> None:
    machine("580.65.06", ("nvidia0",), counted=1, usable=True, capability=capability)
    with pytest.raises(ValueError, match=message):
        world.pick_device("auto", 0, local_size)


def test_a_launcher_that_shows_each_rank_its_own_gpu_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("580.65.06", ("nvidia0",), counted=1, usable=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as srun --gpus-per-task=1 does
    with pytest.raises(ValueError, match=r"1 GPU \(CUDA_VISIBLE_DEVICES=3; each rank must see all"):
        world.pick_device("auto", 0, 2)


def test_a_gpu_that_refuses_is_one_line(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")

    machine("580.65.06", ("nvidia0",), counted=1, usable=True)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(ValueError, match=r"cannot use GPU 0: CUDA-capable .* unavailable$"):
        world.pick_device("cuda", 0, 1)
