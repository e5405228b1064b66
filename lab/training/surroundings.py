"""The machine, software and emulation that a run or a benchmark is measured on."""

from __future__ import annotations

import os
from typing import Any

import torch
from omegaconf import DictConfig

from lab.cluster.settings import EMULATION
from lab.cluster.straggler import straggler_of
from lab.distributed.world import World
from lab.measure.environment import environment, git_commit, num_cores
from lab.record.schema import Emulation, worded


def surroundings(world: World, *configs: DictConfig) -> dict[str, Any]:
    """Describe machine, software and emulation, for the result of a benchmark.

    Args: configs: settings of the runs.
    """
    return {
        "emulation": worded(emulation(world, *configs)) or "none",
        "comm_settings": world.comm.settings,
        "environment": environment_of(world),
        "git_commit": git_commit(),
    }


def environment_of(world: World) -> dict[str, Any]:
    """Describe machine and software of this rank."""
    return environment(world.num_hosts, asks_tools=world.place.local_rank == 0)


def emulation(world: World, *configs: DictConfig) -> list[Emulation]:
    """List the ways in which ranks that run `configs` are emulated."""
    hosts = os.environ.get(EMULATION)
    shared = _sharing(world, bool(hosts))
    replays = [config for config in configs if "profile" in config.model]
    stragglers = [straggler_of(config, world.size) for config in configs]
    profiles = dict.fromkeys(config.profile.get("name") for config in replays)
    return [
        *([Emulation("hosts", hosts)] if hosts else []),
        *([shared] if shared else []),
        *(Emulation("replay", f"compute replayed from profile {name}") for name in profiles),
        *(Emulation("straggler", one.describe()) for one in dict.fromkeys(stragglers) if one),
    ]


def _sharing(world: World, one_machine: bool) -> Emulation | None:
    """List the processors that ranks of this host (or of `one_machine`) share."""
    num_ranks = world.size if one_machine else world.place.local_size
    num_gpus = torch.cuda.device_count()
    if world.device.type == "cuda" and num_ranks > num_gpus:
        return Emulation("shared_gpus", f"{num_ranks} ranks share {num_gpus} GPUs")
    threads = num_ranks * torch.get_num_threads()
    if world.device.type == "cpu" and threads > num_cores():
        detail = f"{threads} threads of {num_ranks} ranks share {num_cores()} CPU cores"
        return Emulation("shared_cores", detail)
    return None
