"""A request of lab.bench: read from the command line, and carried out here or on ranks of its own.

Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lab.benchmarks.catalogue import BENCHES, NUM_RANKS, UNITS, VALUE_BYTES, Bench
from lab.cluster.settings import Cluster, adopt_ranks, cluster_of, num_launched
from lab.distributed.launcher import was_launched
from lab.settings.checks import as_text
from lab.settings.config import FIELDS, check_batch, load
from lab.settings.errors import ConfigError, Failed, as_config_error
from lab.settings.fields import fields_of, file_setting, parsed, setting, split
from lab.settings.hints import choice_hint
from lab.settings.names import root_of
from lab.settings.overrides import config_dir_of, listed, parse_overrides
from lab.settings.storage import write_json
from lab.sync.pattern import Transfer, pattern_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

STARTS = 3  # fewest with an interval of Student's t that is of use
LETTERED = re.compile(r"[a-z]=")
ANSWER = "LAB_BENCH_ANSWER"  # variable with the path of rank 0's result file
REFUSED = "refused"
BYTES = {unit.lower(): num_bytes for unit, num_bytes in UNITS.items()}


def sizes_in_bytes(key: str, text: str) -> list[int]:
    """Parse `[4KiB,1MB]`, in upper or lower case, into bytes, in the order given.

    Raises:
        ConfigError: one of them is not a whole number of float32 values.
    """
    sizes = []
    for word in text.strip("[]").split(","):
        match = re.fullmatch(r"(\d+)([a-z]+)", word.strip().lower())
        size = int(match[1]) * BYTES.get(match[2], 0) if match else 0
        if size == 0 or size % VALUE_BYTES:
            raise ConfigError(
                f"{key}={text}: {word.strip()!r} is not a size; give multiples of 4 bytes "
                "in KiB, MiB, GiB (powers of 1024), kB, MB, GB (powers of 1000) or B, as in "
                "[4KiB,1MiB]"
            )
        sizes.append(size)
    return sizes


@dataclass(frozen=True)
class BenchSettings:
    """The settings that are no run's; each benchmark takes some of them."""

    out: Path | None = file_setting(
        "FILE.json for the result; its figure goes into the same folder", ".json"
    )
    world_size: int | None = setting(
        None,
        "ranks to start, unless a launcher has started them; null: 2, or 1 with one GPU "
        "(recording: 1, straggler: 4)",
        at_least=1,
        at_most=10**6,
    )
    starts: int | None = setting(
        None,
        "aa, host, hook, step: number of starts; null: 3, or 1 under a launcher",
        at_least=1,
        at_most=1000,
    )
    order_seed: int = setting(0, "seed for the order of candidates", at_least=0)
    aa: bool = setting(False, "step: true runs the aa benchmark")
    pairs: int = setting(200, "aa: number of pairs", at_least=1, at_most=10**6)
    runs: int = setting(
        100,
        "straggler: number of runs with an injected delay, and of runs without one",
        at_least=1,
        at_most=10**6,
    )
    rounds: int = setting(
        20,
        "certificate, collective, reduce_scatter, codec, convolution, host, layout, layers, "
        "throughput: number of rounds",
        at_least=1,
        at_most=10**6,
    )
    minutes: float = setting(
        5.0, "calibrate: approximate total time", above=0, at_most=600, unit="min"
    )
    sizes: list[int] = setting(
        "[4KiB,64KiB,1MiB,16MiB,64MiB]",
        "collective, reduce_scatter: sizes; MiB is 2**20 bytes, MB 10**6",
        parse=sizes_in_bytes,
    )
    codec: tuple[str, ...] | None = setting(None, "codec: codecs to measure; null: all")
    algorithm: tuple[str, ...] | None = setting(
        None, "convolution: algorithms to measure; null: all"
    )
    num_values: int | None = setting(
        None, "codec: number of float32 values; null: 25 M on CPUs, 400 M on GPUs", at_least=1
    )
    columns: int = setting(
        4096, "codec: number of values that share two reconstruction values", at_least=1
    )
    trace: Path | None = setting(
        None, "counters, transfer: FILE.json or FILE.json.gz from torch.profiler"
    )
    l1: str = setting("32768,8,64", "counters: first-level data cache: bytes, ways, bytes per line")
    l2: str = setting("8388608,16,64", "counters: second-level data cache, in the same form")
    isa: str = setting(
        "avx", "counters: instruction set for oneDNN and MKL; avx2 is far slower", ("avx", "avx2")
    )
    memory_gb: int | None = setting(
        None,
        "footprint: memory that the largest batch must fit into",
        unit="GB",
        at_least=1,
    )
    num_ranks: int = setting(
        1,
        "footprint: number of ranks that share the batch, and exchange gradients as in strategy=",
        at_least=1,
    )
    measured: bool = setting(
        False, "footprint: true also trains for a few steps, and measures resident memory"
    )
    threads: int = setting(
        2,
        "codec, convolution, layout, layers, throughput, roofline: number of CPU threads",
        at_least=1,
        at_most=1024,
    )
    input_grad: bool = setting(
        False, "layers: true also times the gradient with respect to the input"
    )


@dataclass(frozen=True)
class Variant:
    """One of the compared candidates.

    Attributes:
        label: the settings that only its run has, without the group's name: "overlap bucket_mb=4".
        arguments: all settings of its run.
    """

    label: str
    arguments: tuple[str, ...]
    config: DictConfig


@dataclass(frozen=True)
class BenchRequest:
    """A benchmark, its variants, and its own settings, parsed.

    Attributes:
        own: values by key; None where the machine decides (world_size, num_values).
    """

    bench: str
    variants: list[Variant]
    own: dict[str, Any]
    arguments: list[str]

    def cluster(self, alone: Variant | None = None) -> Cluster | None:
        """Return the emulated cluster of the ranks, if any: for all variants, or for `alone`."""
        config = alone.config if alone else self.config
        return cluster_of(config, self.own.get("world_size") or NUM_RANKS)

    @property
    def config(self) -> DictConfig:
        """The settings of the first variant, with which ranks join."""
        return self.variants[0].config


def read(arguments: list[str]) -> BenchRequest:
    """Parse the words after `lab.bench`.

    Raises:
        ConfigError: the words name no benchmark, or a setting is wrong.
    """
    name, *settings = arguments or [""]
    if name not in BENCHES:
        meant = choice_hint("bench", name, [*BENCHES])
        raise ConfigError(
            f"{name or '(nothing)'}: {meant}the first word must be one of {', '.join(BENCHES)}"
        )
    adopt_ranks()
    if ANSWER in os.environ and not was_asked():
        raise ConfigError(f"{ANSWER}={os.environ[ANSWER]}: only lab.bench may set it; unset it")
    bench = BENCHES[name]
    keys, only = ("out", *bench.own.split()), bench.only.split()
    texts, others = split(settings, keys)
    num_ranks = num_launched() if was_launched() else bench.num_ranks
    given = parsed(BenchSettings, ({"world_size": str(num_ranks)} if num_ranks else {}) | texts)
    own = {key: getattr(given, key) for key in keys}
    if "aa" in own:
        if "pairs" in texts and not given.aa:
            raise ConfigError(
                f"pairs={given.pairs} has no effect without aa=true; set it, or leave pairs out"
            )
        bench, name = (BENCHES["aa"], "aa") if given.aa else (bench, name)
    if "starts" in own:
        own["starts"] = _starts(given.starts)
    if was_launched() and given.world_size != num_ranks:
        raise ConfigError(
            f"world_size={as_text(given.world_size)}: the launcher has started {num_ranks} ranks; "
            "leave world_size out"
        )
    _refuse_unused(name, [part for each in others for part in _set(each)], keys, only)
    variants = _variants(bench, others)
    _refuse_unlike(name, bench, variants)
    for variant in () if only else variants:
        check_batch(variant.config, given.world_size or NUM_RANKS)
    request = BenchRequest(bench.runs or name, variants, own, arguments)
    if len({request.cluster(each) for each in variants}) > 1 and not bench.apart:
        raise ConfigError("cluster: must be the same for all candidates")
    return request


def _refuse_unused(name: str, settings: list[str], own: Sequence[str], only: list[str]) -> None:
    """Refuse settings that a benchmark does not use, and its own in a set of settings."""
    of_others = fields_of(BenchSettings).keys() - {*own, *FIELDS, "codec"}  # which runs have too
    for text in settings:
        key, equals, _ = text.partition("=")
        if equals and key in own:
            raise ConfigError(f"{text} holds for all candidates; give it outside of a='...'")
        if key in of_others or (only and root_of(key.lstrip("+")) not in only):
            allowed = ", ".join((*own[1:], "out", *(only or ["all settings of lab.train"])))
            raise ConfigError(f"{text} is not used by {name}; allowed: {allowed}")


def _starts(asked: int | None) -> int:
    if was_launched() and (asked or 1) > 1:
        raise ConfigError(
            f"starts={asked}: a launcher has started these ranks once; set starts=1, or let "
            "lab.bench start the ranks"
        )
    return asked or (1 if was_launched() else STARTS)


def _variants(bench: Bench, settings: list[str]) -> list[Variant]:
    common, sets = _compared(bench, settings)
    if len(sets) < bench.num_variants:
        raise ConfigError(
            "strategy: a comparison needs at least two candidates, as in strategy=overlap,ddp or "
            "a='strategy=overlap bucket_mb=4' b='strategy=ddp'"
        )
    if bench.apart and not was_launched() and ["strategy=none"] not in sets:
        sets = [["strategy=none"], *sets]  # the baseline of the others
    common = [*bench.fixed.split(), *common]
    variants = [
        Variant(
            " ".join(each).removeprefix(f"{bench.group}="), (*common, *each), load([*common, *each])
        )
        for each in sets
    ]
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        raise ConfigError(
            f"{', '.join(labels)}: the same candidate is listed twice; to compare equal ones, "
            "use lab.bench step aa=true"
        )
    return variants


def _refuse_unlike(name: str, bench: Bench, variants: list[Variant]) -> None:
    """Refuse variants that would run with each other's settings, or that no table compares."""
    from omegaconf import OmegaConf  # takes a tenth of a second, which help can do without

    if bench.alone and len(variants) > 1:
        labels = ", ".join(variant.label for variant in variants)
        raise ConfigError(f"{labels}: {name} measures only one set of settings")
    for key in bench.alike.split():
        # comm=horovod has no settings of NCCL.
        first, *others = (OmegaConf.select(each.config, key) or None for each in variants)
        if any(other != first for other in others):
            raise ConfigError(
                f"{key}: must be the same for all candidates of lab.bench {name}; to compare its "
                "values, run the benchmark once for each, or use python -m lab.sweep"
            )
    for variant in variants:
        pattern = pattern_of(variant.config)
        goes_on = pattern.outlasts_step or pattern.waits_in_forward
        if name == "host" and (
            goes_on or not {Transfer.MEAN_OF_GRADIENTS}.issuperset(pattern.transfers)
        ):
            raise ConfigError(
                f"strategy={variant.config.strategy}: lab.bench host measures exchanges that give "
                "all ranks the mean of gradients before the update; use lab.bench step or lab.sweep"
            )
        if goes_on and {"aa", "step"} & {name, bench.runs}:
            raise ConfigError(
                f"{variant.label}: its exchanges continue after their step, and would run during "
                "the turns of others; to compare it, use python -m lab.sweep turns=4"
            )


def _compared(bench: Bench, settings: list[str]) -> tuple[list[str], list[list[str]]]:
    """Separate the settings that all runs share from those of each run."""
    lettered = [text for text in settings if LETTERED.match(text)]
    common = [text for text in settings if not LETTERED.match(text)]
    overrides = parse_overrides(common)
    lists = [one for one in overrides if one.is_choice_sweep()]
    if len(lists) + bool(lettered) > 1:
        given = " ".join([*(str(one.input_line) for one in lists), *lettered])
        raise ConfigError(
            f"{given}: only one setting can have a list; to vary several, use a='...' b='...'"
        )
    if lettered:
        return common, [_set(text) for text in lettered]
    chosen = lists or [one for one in overrides if one.key_or_group == bench.group]
    if not chosen and bench.default:
        chosen = parse_overrides([f"{bench.group}={bench.default}"])
    if not chosen:
        return common, [each.split() for each in bench.sets or ("",)]
    one = chosen[-1]
    values = listed(one, config_dir_of(common)) if one.is_choice_sweep() else [str(one.value())]
    common = [text for text in common if text != one.input_line]
    return common, [[f"{one.get_key_element()}={value}"] for value in values]


def _set(text: str) -> list[str]:
    """Split the settings in `a='...'`; other text is a single setting."""
    if not LETTERED.match(text):
        return [text]
    try:
        return shlex.split(text[2:])
    except ValueError as error:
        raise ConfigError(f"{text}: {error}; write settings as in a='overlap=true'") from None


def measure(request: BenchRequest) -> dict[str, Any] | None:
    """Measure; return the result on rank 0, or in the process that started the ranks.

    Raises:
        ConfigError: a setting does not fit the data, devices and ranks at hand.
        Failed: a rank failed.
    """
    request = request if is_rank() else with_world_size(request)
    reason = BENCHES[request.bench].one_rank
    if reason and request.own["world_size"] == 1:
        raise ConfigError(f"world_size=1: {reason}")
    if not is_rank() and BENCHES[request.bench].apart:
        return module_of(request.bench).combine(list(_one_by_one(request)))
    alone = request.own.get("world_size", 1) == 1 and not request.cluster()
    starts = 1 if is_rank() else request.own.get("starts") or 1
    if starts > 1:
        return module_of(request.bench).combine(list(_again(request, starts)))
    if is_rank() or alone:
        return module_of(request.bench).measure(request)
    return ask_ranks(request)


def module_of(bench: str) -> ModuleType:
    """Import what measures and shows a benchmark; it imports torch, which help does not need."""
    return importlib.import_module(f"{BENCHES[bench].package}.{bench}")


def _one_by_one(request: BenchRequest) -> Iterator[dict[str, Any]]:
    for number, variant in enumerate(request.variants, start=1):
        print(f"[{number}/{len(request.variants)}] {variant.label}", file=sys.stderr)
        yield ask_ranks(request, variant)


def _again(request: BenchRequest, starts: int) -> Iterator[dict[str, Any]]:
    """Start ranks several times, each time with another order of the candidates."""
    for number in range(starts):
        print(f"start {number + 1} of {starts}", file=sys.stderr)
        yield ask_ranks(request, order_seed=request.own["order_seed"] + number)


def was_asked() -> bool:
    """Tell whether another lab.bench has started this process as a rank."""
    path = Path(os.environ.get(ANSWER, ""))
    return was_launched() and path.suffix == ".json" and path.parent.is_dir()


def is_rank() -> bool:
    """Tell whether this process is a rank, started by lab.bench or by the user's launcher."""
    return was_asked() or was_launched()


def with_world_size(request: BenchRequest) -> BenchRequest:
    """Set the number of ranks: as requested, or NUM_RANKS, but no more than GPUs.

    Raises:
        ConfigError: GPUs are requested, and there is none.
    """
    if request.own.get("world_size", 0) is not None:
        return request
    import torch

    from lab.distributed.world import check_gpus

    with as_config_error():
        alone = check_gpus(request.config.device, 1) and not request.config.share_gpus
    most = torch.cuda.device_count() if alone else NUM_RANKS
    return replace(request, own={**request.own, "world_size": min(NUM_RANKS, most)})


def ask_ranks(
    request: BenchRequest, alone: Variant | None = None, order_seed: int | None = None
) -> dict[str, Any]:
    """Start fresh ranks under their own torchrun or horovodrun, and return their result.

    Each rank computes on one thread unless OMP_NUM_THREADS says otherwise, as in a sweep.

    Args:
        alone: the only variant that these ranks measure; None: all.
        order_seed: of the one start that these ranks make, where there are several.

    Raises:
        ConfigError: the ranks refused a setting.
        Failed: a rank failed.
    """
    from lab.study.launch import end_with_parent, starter, stop  # imports torch

    arguments = [request.bench, *alone.arguments] if alone else request.arguments
    if order_seed is not None:
        arguments = [*arguments, "starts=1", f"order_seed={order_seed}"]
    defaults = {"OMP_NUM_THREADS": "1", **dict(BENCHES[request.bench].environment)}
    cluster = request.cluster(alone)
    over_horovod = any("horovod" in each.config.comm["_target_"] for each in request.variants)
    launcher = starter(request.own.get("world_size", 1), over_horovod, cluster)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(
            [*launcher, "-m", "lab.bench", *arguments],
            stdin=subprocess.DEVNULL,
            env={**defaults, **os.environ, ANSWER: str(answer)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            process.wait()
        except KeyboardInterrupt:
            stop(process)
            raise
        if process.returncode or not answer.exists():
            raise Failed(f"the ranks ended with exit code {process.returncode}; see above")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if REFUSED in result:
        raise ConfigError(result[REFUSED])
    return result


def hand_over(result: dict[str, Any]) -> int:
    """Pass a result, or a refusal, to the process that started the ranks; return the exit code."""
    write_json(Path(os.environ[ANSWER]), result)
    return 0
