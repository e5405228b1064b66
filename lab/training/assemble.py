"""The composition root: settings become data, task, model, exchange and trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lab.certificate.check import CertificateCheck, check_of
from lab.cluster.settings import straggler_of
from lab.data import Data
from lab.distributed import replicas
from lab.distributed import world as worlds
from lab.distributed.worker import Watchdog, Worker, make_worker
from lab.distributed.world import Disagreement, Facts, World
from lab.exchange.base import Exchange
from lab.exchange.gate import admit, require_values
from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.exchange.layout import trainable
from lab.problem import build_data, build_model, build_task, output_shapes, transformed
from lab.settings.config import ConfigError, RunSettings, build, global_batch_size
from lab.settings.errors import SharedError, as_config_error, one_line
from lab.sync.base import Sync, SyncParts
from lab.sync.drift import GradientNoise
from lab.sync.gradsync import GradSync
from lab.sync.pattern import pattern_of
from lab.sync.refusals import refuse_optimizer, require_elementwise, require_piecewise
from lab.task.base import Task
from lab.training import graph
from lab.training.optim import Optim
from lab.training.rank_consistency import data_facts, parameters, settings_and_software
from lab.training.trainer import Delay, Trainer

OVERRIDE = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS and cuDNN; it overrides torch
BACKEND = "inductor"
NEVER_S = 1e9  # of a watchdog for `assembled`: the process group's timeout ends a hang


@dataclass(frozen=True)
class Assembly:
    """One rank's parts of a run.

    Attributes: sizes: the model's, before and after its transform, as a record holds them.
    """

    trainer: Trainer
    worker: Worker
    sizes: dict[str, Any]

    def close(self) -> None:
        """Release threads, streams and the graph; call this before the ranks leave."""
        self.worker.close()
        if self.trainer.graph:
            self.trainer.graph.close()


def join(config: DictConfig) -> World:
    """Join the ranks that were started with this one, and set their arithmetic by `config`.

    Raises: ConfigError: more ranks than GPUs, or a communication or arithmetic setting that this
    machine does not support.
    """
    try:
        set_arithmetic(config.tf32, config.deterministic, config.threads, config.benchmark_limit)
        return worlds.start(
            build(config.comm),
            config.device,
            config.backend,
            config.exchange_timeout_s,
            config.share_gpus,
            settings_and_software(config),
        )
    except Disagreement as error:
        raise SharedError(str(error)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def require_alike(world: World, facts: Facts) -> None:
    """Refuse ranks that have something else than others. A collective call.

    Raises: SharedError: names what differs, with the values and their ranks.
    """
    try:
        world.require_equal(facts)
    except Disagreement as error:
        raise SharedError(str(error)) from None


def assemble(config: DictConfig, world: World, watch: Watchdog) -> Assembly:
    """Build everything that trains, in the order in which it can fail.

    Raises: ConfigError: a setting does not fit the data, devices or files.
    """
    seed = config.seed + config.repeat
    if config.graph:
        graph.leave_default_stream(world.device)
    torch.manual_seed(seed)
    data = build_data(config.data, seed, world.device)
    task = build_task(config.task)
    shapes = output_shapes(task, data)
    model, sizes = _build_model(config, data, shapes[0][-1], world)
    sample = torch.zeros(1, *data.input_shape, dtype=data.input_dtype, device=world.device)
    _check_outputs(task, model, data, shapes, sample)  # lazy modules get their weights here
    batch_size = global_batch_size(config, world.size)
    settings = cast(RunSettings, config)
    optim = Optim(config.optim, batch_size, config.graph)
    exchange: Exchange = build(config.exchange)
    with as_config_error():
        admit(model, exchange)
    sizes |= count(model)
    if world.size > 1:
        require_alike(world, {**data_facts(data), **parameters(model)})
    replicas.broadcast_state(model, world)
    asynchronous = exchange.asynchronous(world.comm)
    worker = make_worker(config.overlap, world.device, world.comm.backend, asynchronous)
    watch.worker = worker
    parts = SyncParts(
        model,
        compiled(model, config),
        exchange,
        world.comm,
        worker,
        config.overlap,
        config.bucket_mb,
        config.precision,
        config.accumulate,
        sample,
    )
    sync: Sync = build(config.sync, parts)
    if not isinstance(cast(object, sync), Sync) or not hasattr(sync, "pattern"):
        raise ConfigError(
            f"sync={type(sync).__qualname__}: must be a subclass of lab.sync.base.Sync, whose "
            "__init__ takes `parts` and passes it to super().__init__"
        )
    if sync.pattern.waits_in_forward:
        require_piecewise(
            cast(Mapping[str, Any], config),
            Optim(config.optim, batch_size).optimizer,
            trainable(model).values(),
        )
    if why := sync.pattern.only_elementwise:
        require_elementwise(optim.target, why, optim.optimizer, optim.prepare)
    require_like_gpus(world, exchange, sync)
    observe(sync, settings)
    at_first = (
        first_check(config, model, sync, world) if config.check == "first" else CertificateCheck()
    )
    trainer = Trainer(settings, world, watch, data, task, model, sync, optim, at_first)
    _require_optimizer(config, sync, trainer.optimizer)
    _inject_delay(config, trainer)
    if config.graph:
        graph.refuse(trainer)
        trainer.graph = graph.StepGraph(trainer, graph.CudaGraph())
    torch.manual_seed(seed + 1 + world.rank)  # dropout differs between the ranks
    return Assembly(trainer, worker, sizes)


def _inject_delay(config: DictConfig, trainer: Trainer) -> None:
    """Delay this rank's steps, if the settings ask for it."""
    world, sync = trainer.world, trainer.sync
    straggler = straggler_of(config, world.size)
    if straggler and straggler.phase == "exchange" and not sync.pattern.takes_exchanges:
        raise ConfigError(
            f"straggler.phase=exchange: the lab does not run the exchange of "
            f"strategy={config.strategy}; allowed: input, forward, backward, update"
        )
    world.comm.before_sending = None  # perhaps set for another assembly
    if straggler and straggler.rank == world.rank:
        trainer.delay = Delay(straggler, trainer)


def first_check(config: DictConfig, model: nn.Module, sync: Sync, world: World) -> CertificateCheck:
    """Return the examination of a run's first exchanges, as check=first asks for it."""
    exchange: Any = OmegaConf.to_container(config.exchange, resolve=True)
    return check_of(model, sync, world.gather, world.size, exchange, config.strategy)


def _require_optimizer(config: DictConfig, sync: Sync, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer, or clipping, that is not what the sync and its exchange stand for."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    momentum = max(group["momentum"] for group in optimizer.param_groups) if is_sgd else None
    settings = cast(Mapping[str, Any], config)
    refuse_optimizer(sync.pattern, sync.exchange.delivers, settings, momentum)


def count(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters, and the bytes of the exchanged gradients."""
    parameters = list(model.parameters())
    return {
        "num_parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
    }


def _check_outputs(
    task: Task, model: nn.Module, data: Data, shapes: list[tuple[int, ...]], inputs: Tensor
) -> None:
    """Refuse, before the first step, a model whose outputs do not fit the task."""
    try:
        with torch.no_grad():
            outputs = model.eval()(inputs)
    except RuntimeError as error:
        if data.vocabulary is None or "Long" not in str(error):  # as torch names int64
            raise
        raise ConfigError(
            f"model: does not accept token ids, int64 {list(data.input_shape)}, the inputs in "
            f"this data: {one_line(error)}"
        ) from error
    model.train()
    try:
        for shape in shapes:
            task.check_outputs(outputs, shape)
        task.require_mean(outputs, data.targets()[0][:1].to(inputs.device))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _build_model(
    config: DictConfig, data: Data, output_size: int, world: World
) -> tuple[nn.Module, dict[str, Any]]:
    if config.channels_last and len(data.input_shape) != 3:
        raise ConfigError(
            f"channels_last=true: inputs of shape {list(data.input_shape)} are not images "
            "[channels, height, width]; leave it false"
        )
    if config.profile and "profile" not in config.model:
        raise ConfigError(
            f"profile={config.profile.get('name')}: model={config.model._target_} does not read "
            "it; set model=replay, or leave profile out"
        )
    model: nn.Module = build_model(config.model, data, output_size)
    sizes: dict[str, Any] = {"transform": None, "untransformed": None}
    if "_target_" in config.transform:
        try:
            untransformed = count(model)
            model, name = transformed(config.transform, model)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"strategy={config.strategy}: {error}") from error
        sizes = {"transform": name, "untransformed": untransformed}
    with as_config_error(f"model={config.model._target_}: "):
        require_values(model)
    model = model.to(world.device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, sizes


def require_like_gpus(world: World, *parts: Exchange | Sync) -> None:
    """Refuse GPUs of several kinds, whose results may differ in a bit, where this does harm.

    It does if one of `parts` computes the same values on every rank instead of sending them. A
    collective call.

    Raises: ConfigError: names the part, the kinds of GPUs, and the ranks that have them.
    """
    who = next((type(part).__name__ for part in parts if part.needs_like_gpus), None)
    if who is None or world.device.type != "cuda":
        return
    ranks_with: dict[str, list[int]] = {}
    for rank, kind in enumerate(world.gather_text(torch.cuda.get_device_name(world.device))):
        ranks_with.setdefault(kind, []).append(rank)
    if len(ranks_with) > 1:
        kinds = ", ".join(f"{kind} (ranks {ranks})" for kind, ranks in ranks_with.items())
        raise ConfigError(
            f"{who}: every rank must compute the same bits, which needs GPUs of one kind, but "
            f"these are {kinds}; use GPUs of one kind, or choose another exchange"
        )


def set_arithmetic(
    tf32: bool, deterministic: bool, threads: int | None = None, benchmark_limit: int = 10
) -> None:
    """Set how products and convolutions round, whether runs are bit-identical, and CPU threads.

    Args: tf32: float32 operations on a GPU may round their inputs to TF32 (10 bits of mantissa).
    False is IEEE float32, in cuDNN too, where torch's default is TF32. deterministic: use slower
    algorithms that add in the same order in every run. threads: of an operation on a CPU; None: as
    OMP_NUM_THREADS says. benchmark_limit: algorithms that cuDNN tries for each convolution, 0 for
    all; with `deterministic` it tries none.

    Raises: ValueError: the environment contradicts `tf32`.
    """
    override = os.environ.get(OVERRIDE)
    if override and override != str(int(tf32)):
        raise ValueError(
            f"tf32={str(tf32).lower()}: {OVERRIDE}={override} overrides this setting; unset the "
            f"variable, or set tf32={str(not tf32).lower()}"
        )
    with warnings.catch_warnings():
        # torch 2.9 prefers fp32_precision, with which its torch.compile fails.
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = not deterministic
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.benchmark_limit = benchmark_limit
    if deterministic:  # cuBLAS reads it when it starts; torch before 2.13 requires it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # a second of imports, even for False
    if threads:
        torch.set_num_threads(threads)


def compiled_as(config: DictConfig) -> str | None:
    """Return how `compiled` compiles: "whole", "regions", or None for not at all.

    Backward of a compiled region is one node of autograd's graph: all its gradients appear with its
    last kernel. So a model is compiled in regions if exchanges overlap backward.
    """
    if not config.compile:
        return None
    return "regions" if config.overlap and config.bucket_mb is not None else "whole"


def compiled(model: nn.Module, config: DictConfig) -> nn.Module:
    """Return the module that runs forward; its parameters keep their names and memory.

    Regions are cut as torch cuts them for DDP: from the end of the graph, whenever the parameters
    fill a bucket. DDP itself cuts them at its own buckets.
    """
    how, backend = compiled_as(config), BACKEND
    if how is None:
        return model
    if how == "regions" and not pattern_of(config).waits_in_backward:
        from torch._dynamo.backends.distributed import DDPOptimizer
        from torch._dynamo.backends.registry import lookup_backend

        cap = max(1, int(config.bucket_mb * MIB))
        regions = DDPOptimizer(cap, lookup_backend(BACKEND), min(cap, FIRST_BUCKET_BYTES))
        backend = regions.compile_fn
    module: Any = torch.compile(model, backend=backend)
    return module


def observe(sync: Sync, settings: RunSettings) -> None:
    """Attach what the settings ask to be observed of each exchange.

    Raises: ConfigError: the sync does not exchange what would be observed.
    """
    if settings.measure == "noise":  # compares norms of gradients before and after an exchange
        if sync.comm.size == 1:
            raise ConfigError(
                "measure=noise: compares the ranks' gradients, so it needs two or more ranks"
            )
        if type(sync) is not GradSync or not sync.exchange.exact:
            raise ConfigError(
                "measure=noise: needs a strategy that averages gradients exactly in every step, "
                "such as allreduce"
            )
        sync.noise = GradientNoise()
    if settings.drift_every is not None:
        observe_drift(sync, settings.drift_every, settings.precision)


def observe_drift(sync: Sync, every: int, precision: str) -> None:
    """Compare what the exchange delivers with what was due.

    Raises: ConfigError: no exchange of the lab leaves a mean on all ranks, or steps may be undone.
    """
    if precision == "fp16":
        raise ConfigError(
            f"drift_every={every}: drift cannot be measured with precision=fp16, which restores "
            "residuals when it skips a step; use precision=fp32 or bf16"
        )
    with as_config_error(f"drift_every={every}: "):
        sync.observe_drift(every)


@contextmanager
def assembled(config: DictConfig, world: World) -> Iterator[Assembly]:
    """Build everything that trains, and release it when the context ends."""
    watch = Watchdog(world, NEVER_S, lambda _: None)
    try:
        parts = assemble(config, world, watch)
        # A certificate is of a run, and its cost of no measurement.
        parts.trainer.check = CertificateCheck()
        yield parts
    finally:
        watch.close()
    parts.close()


def check(config: DictConfig) -> None:
    """Build everything that trains, and release it. ConfigError as `assemble` raises it."""
    world = join(config)
    try:
        with assembled(config, world):
            pass
    finally:
        worlds.stop()
