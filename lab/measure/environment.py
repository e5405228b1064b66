"""Environment of a run: machine and software, and its GPUs by NVIDIA's tools and driver."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
import platform
import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
from torch import nn

# Variables that shape speed, by library. No other is recorded: it may hold a secret.
VARIABLES = {
    "OMP": "NUM_THREADS PROC_BIND PLACES SCHEDULE DYNAMIC WAIT_POLICY",
    "MKL": "NUM_THREADS DYNAMIC DEBUG_CPU_TYPE ENABLE_INSTRUCTIONS CBWR",
    "KMP": "AFFINITY BLOCKTIME SETTINGS HW_SUBSET",
    "GOMP": "CPU_AFFINITY SPINCOUNT",
    "GLOO": "SOCKET_IFNAME DEVICE_TRANSPORT",
    "HOROVOD": (
        "FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER "
        "AUTOTUNE NUM_NCCL_STREAMS GPU_OPERATIONS CPU_OPERATIONS CONTROLLER THREAD_AFFINITY "
        "BATCH_D2D_MEMCOPIES ENABLE_ASYNC_COMPLETION STALL_CHECK_DISABLE GLOO_IFACE"
    ),
    "NCCL": (
        "ALGO PROTO SOCKET_IFNAME SOCKET_NTHREADS NSOCKS_PERTHREAD SOCKET_FAMILY IB_DISABLE IB_HCA "
        "IB_TIMEOUT IB_RETRY_CNT IB_GID_INDEX IB_SL IB_TC IB_QPS_PER_CONNECTION "
        "IB_SPLIT_DATA_ON_QPS IB_AR_THRESHOLD IB_ADAPTIVE_ROUTING IB_CUDA_SUPPORT "
        "IB_PCI_RELAXED_ORDERING IB_MERGE_NICS IB_ADDR_FAMILY IB_ROCE_VERSION_NUM NET NET_PLUGIN "
        "NET_GDR_LEVEL NET_GDR_READ NET_GDR_C2C NET_SHARED_BUFFERS NET_MERGE_LEVEL CROSS_NIC "
        "P2P_DISABLE P2P_LEVEL P2P_DIRECT_DISABLE P2P_NVL_CHUNKSIZE P2P_NET_CHUNKSIZE "
        "P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL PXN_DISABLE PXN_C2C SHM_DISABLE SHM_USE_CUDA_MEMCPY "
        "BUFFSIZE LL_BUFFSIZE LL128_BUFFSIZE NTHREADS MIN_NCHANNELS MAX_NCHANNELS MIN_CTAS "
        "MAX_CTAS MIN_P2P_NCHANNELS MAX_P2P_NCHANNELS NCHANNELS_PER_NET_PEER CGA_CLUSTER_SIZE "
        "NVLS_ENABLE NVLS_NCHANNELS NVB_DISABLE COLLNET_ENABLE COLLNET_NODE_THRESHOLD MNNVL_ENABLE "
        "CUMEM_ENABLE CUMEM_HOST_ENABLE DMABUF_ENABLE GDRCOPY_ENABLE LAUNCH_MODE CHECKS_DISABLE "
        "CHECK_POINTERS IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P WORK_FIFO_DEPTH WORK_FIFO_BYTES "
        "GRAPH_MIXING_SUPPORT GRAPH_REGISTER LOCAL_REGISTER RUNTIME_CONNECT SET_STACK_SIZE "
        "SET_THREAD_NAME TUNER_PLUGIN PROFILER_PLUGIN DEBUG DEBUG_SUBSYS RAS_ENABLE"
    ),
    "TORCH_NCCL": (
        "ASYNC_ERROR_HANDLING BLOCKING_WAIT AVOID_RECORD_STREAMS HIGH_PRIORITY "
        "USE_COMM_NONBLOCKING ENABLE_TIMING ENABLE_MONITORING CUDA_EVENT_CACHE "
        "HEARTBEAT_TIMEOUT_SEC DESYNC_DEBUG NAN_CHECK TRACE_BUFFER_SIZE"
    ),
    "CUDA": (
        "VISIBLE_DEVICES DEVICE_ORDER LAUNCH_BLOCKING DEVICE_MAX_CONNECTIONS MODULE_LOADING "
        "AUTO_BOOST CACHE_DISABLE FORCE_PTX_JIT DISABLE_PTX_JIT MPS_ACTIVE_THREAD_PERCENTAGE"
    ),
    "NVIDIA": "TF32_OVERRIDE VISIBLE_DEVICES DRIVER_CAPABILITIES",
    "CUBLAS": "WORKSPACE_CONFIG",
    "CUBLASLT": "WORKSPACE_SIZE",
    "PYTORCH": "ALLOC_CONF CUDA_ALLOC_CONF NO_CUDA_MEMORY_CACHING TUNABLEOP_ENABLED",
    "TORCHINDUCTOR": (
        "MAX_AUTOTUNE MAX_AUTOTUNE_GEMM FREEZING COMPILE_THREADS COORDINATE_DESCENT_TUNING "
        "FORCE_DISABLE_CACHES FX_GRAPH_CACHE CPP_WRAPPER"
    ),
    "TRITON": "INTERPRET ALWAYS_COMPILE DEFAULT_FP_FUSION DISABLE_LINE_INFO",
}
NAMES = frozenset(
    f"{library}_{each}" for library, all_ in VARIABLES.items() for each in all_.split()
)
LENGTH = 8  # hexadecimal digits

SMI_S = 30.0  # eight idle GPUs without persistence mode take more than a few seconds
# By key of the record; nvidia-smi --help-query-gpu explains them.
TEXTS = {"name": "name", "driver": "driver_version", "mig": "mig.mode.current"}
TEXTS |= {"pci_bus_id": "pci.bus_id"}
NUMBERS = {"power_limit_w": "power.limit", "sm_clock_mhz": "clocks.current.sm"}
NUMBERS |= {"max_sm_clock_mhz": "clocks.max.sm"}
STYLES = re.compile(r"\x1b\[[0-9;]*m")  # it underlines the head of its table, in pipes too
PCI_DEVICES = Path("/sys/bus/pci/devices")
MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of the driver's API


def environment(num_hosts: int, asks_tools: bool = True) -> dict[str, Any]:
    """Describe machine and software, so that others can judge or repeat a measurement.

    Args:
        asks_tools: also ask nvidia-smi, which takes seconds; one process per host suffices.
    """
    with warnings.catch_warnings(action="ignore"):  # about a driver that is too old
        has_gpus = torch.cuda.is_available()
    visible = range(torch.cuda.device_count() if has_gpus else 0)  # it counts unusable GPUs too
    return {
        "hostname": platform.node(),
        "os": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpus else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpus else None,
        "triton": _version("triton"),
        "tf32": _tf32(),
        "gpus": [torch.cuda.get_device_name(i) for i in visible],
        "compute_capability": [torch.cuda.get_device_capability(i) for i in visible],
        "nvls": [adds_in_switch(i) for i in visible],
        "host_gpus": gpus() if has_gpus and asks_tools else None,
        "cpu": cpu_model(),
        "num_cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "num_threads": torch.get_num_threads(),
        "numa_nodes": _numa_nodes(),
        "num_hosts": num_hosts,
        "gpu_links": links() if has_gpus and asks_tools else None,
        "network_interfaces": _network_interfaces(),
        "variables": {name: os.environ[name] for name in sorted(NAMES & os.environ.keys())},
    }


def device_and_torch(device: torch.device) -> str:
    """Describe device and torch in a few words."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{cpu_model()} ({torch.get_num_threads()} threads)"
    return f"{where}, torch {torch.__version__}"


def git_commit() -> dict[str, Any]:
    """Return the checkout's commit and whether it has changes; None without a checkout.

    If git cannot tell, as it takes too long, files count as changed: the commit proves nothing.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    git = "git", "-C", str(root)
    commit = _output(*git, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": commit and _output(*git, "status", "--porcelain") != ""}


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _tf32() -> dict[str, bool]:
    """Return where torch may round float32 to TF32 on GPUs."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # see training.assemble
        return {
            "products": bool(torch.backends.cuda.matmul.allow_tf32),
            "convolutions": bool(torch.backends.cudnn.allow_tf32),
        }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numa_nodes() -> dict[str, str | None]:
    """Return the CPUs of each NUMA node as the kernel writes them: 0-15,32-47."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {path.name.removeprefix("node"): _text(path / "cpulist") for path in nodes}


def _network_interfaces() -> dict[str, int | None]:
    """Return the speed in Mbit/s of each network interface that is up, if its driver reports it."""
    speeds = {}
    for path in sorted(Path("/sys/class/net").glob("*")):
        if _text(path / "operstate") in ("up", "unknown"):
            speed = _text(path / "speed") or "-1"  # virtual interfaces report -1
            speeds[path.name] = int(speed) if int(speed) > 0 else None
    return speeds


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # a driver may refuse to answer
        return None


def _output(*command: str, timeout_s: float = 5.0) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def source_hash(model: nn.Module) -> str:
    """Hash the source of all of the model's classes that are not torch's own.

    Shapes and options of layers are settings and do not count. A class without source, as one
    typed at a prompt, counts by its name.
    """
    kinds = {type(module) for module in model.modules()}
    # FSDP2's fully_shard has replaced a class by one that inherits from it.
    kinds = {
        kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind for kind in kinds
    }
    own = (kind for kind in kinds if kind.__module__.partition(".")[0] != "torch")
    return hashlib.sha256("\n".join(sorted(map(_source, own))).encode()).hexdigest()[:LENGTH]


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return kind.__qualname__


def gpus() -> list[dict[str, Any]] | None:
    """Describe all GPUs of this host, hidden ones included; None without nvidia-smi.

    Clocks are current ones; an idle GPU's are low.
    """
    fields = ",".join([*TEXTS.values(), *NUMBERS.values()])
    text = _smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if text is None:
        return None
    return [{**gpu, "numa_node": _numa_node(gpu["pci_bus_id"])} for gpu in parse(text)]


def parse(text: str) -> list[dict[str, Any]]:
    """Parse nvidia-smi's answer, a line per GPU; None for values that a GPU does not report."""
    gpus = []
    for line in text.splitlines():
        values = [None if "[" in value else value for value in line.split(", ")]
        if len(values) != len(TEXTS) + len(NUMBERS):
            continue  # a warning
        numbers = [value and float(value) for value in values[len(TEXTS) :]]
        gpus.append(dict(zip([*TEXTS, *NUMBERS], [*values[: len(TEXTS)], *numbers], strict=True)))
    return gpus


def links() -> str | None:
    """Return nvidia-smi's table of how GPUs and network adapters are connected."""
    return _smi("topo", "--matrix")


def adds_in_switch(index: int) -> bool | None:
    """Return whether the NVSwitch can sum for GPU `index` of this process (NCCL's NVLS)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    errors = (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDeviceGetAttribute(ctypes.byref(value), MULTICAST, device),
    )
    return None if any(errors) else bool(value.value)


def _numa_node(pci_bus_id: str | None) -> int | None:
    """Return the NUMA node of a GPU such as 00000000:18:00.0 (0000:18:00.0 to the kernel)."""
    path = PCI_DEVICES / (pci_bus_id or "")[4:].lower() / "numa_node"
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _smi(*arguments: str) -> str | None:
    text = _output("nvidia-smi", *arguments, timeout_s=SMI_S)
    return text and STYLES.sub("", text).strip()
