"""The command line of lab.bench. Nothing here imports torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lab.benchmarks.catalogue import BENCHES, NUM_RANKS, OWN
from lab.cluster.settings import Cluster, cluster_of, num_launched
from lab.distributed.launcher import was_launched
from lab.settings.config import check_batch, load
from lab.settings.errors import ConfigError
from lab.settings.overrides import (
    Override,
    config_dir_of,
    file_to_write,
    listed,
    parse_overrides,
    split,
)
from lab.sync.pattern import pattern_of

# Settings that hold for a whole process: torch and NCCL have one value of each.
OF_A_PROCESS = ("deterministic", "tf32", "comm.deterministic")
LETTERED = re.compile(r"[a-z]=")
# Larger units first; of a pair, the one that has powers of two. IEC 80000-13.
UNITS = {
    "GiB": 2**30,
    "GB": 10**9,
    "MiB": 2**20,
    "MB": 10**6,
    "KiB": 2**10,
    "kB": 10**3,
    "B": 1,
}
BYTES = {unit.lower(): num_bytes for unit, num_bytes in UNITS.items()}
VALUE_BYTES = 4  # everything that is measured is float32


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
class Request:
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
        config = (alone or self.variants[0]).config
        return cluster_of(config, self.own.get("world_size") or NUM_RANKS)

    @property
    def only_config(self) -> DictConfig:
        """Return the settings of the only variant.

        Raises:
            ConfigError: there are several.
        """
        if len(self.variants) > 1:
            labels = ", ".join(variant.label for variant in self.variants)
            raise ConfigError(f"{labels}: {self.bench} measures one model at one batch")
        return self.variants[0].config

    @property
    def over_horovod(self) -> bool:
        """Tell whether only horovodrun can start the ranks."""
        return any("horovod" in variant.config.comm["_target_"] for variant in self.variants)


def read(arguments: list[str]) -> Request:
    """Parse the words after `lab.bench`.

    Raises:
        ConfigError: the words name no benchmark, or a setting is wrong.
    """
    name, *settings = arguments or [""]
    if name not in BENCHES:
        raise ConfigError(f"{name or '(nothing)'}: the first word must be {', '.join(BENCHES)}")
    texts = {key: OWN[key][0] for key in ("out", *BENCHES[name].own)}
    if was_launched():
        texts |= {"world_size": str(num_launched())}
    elif BENCHES[name].num_ranks:
        texts |= {"world_size": str(BENCHES[name].num_ranks)}
    own_texts, others = split(settings, texts)
    texts |= own_texts
    if was_launched() and texts["world_size"] != str(num_launched()):
        raise ConfigError(
            f"world_size={texts['world_size']}: a launcher has started {num_launched()} ranks"
        )
    own = {key: PARSERS.get(key, whole_number)(key, text) for key, text in texts.items()}
    variants = _variants(name, others)
    for variant in () if BENCHES[name].only else variants:
        check_batch(variant.config, own["world_size"] or NUM_RANKS)
    request = Request(BENCHES[name].runs or name, variants, own, arguments)
    if len({request.cluster(each) for each in variants}) > 1 and not BENCHES[name].apart:
        raise ConfigError("cluster: what is compared takes turns on the same one")
    return request


def whole_number(key: str, text: str) -> int:
    """Parse an integer of at least 1; digits may be grouped, as in 25_000_000.

    Raises:
        ConfigError: the text is not such an integer.
    """
    if not re.fullmatch(r"\d+(_\d+)*", text) or int(text) < 1:
        raise ConfigError(f"{key}={text}: must be an integer of at least 1")
    return int(text)


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
                f"{key}={text}: {word.strip()!r} is not a size; allowed are whole float32 values "
                "in KiB, MiB, GiB (powers of 1024), kB, MB, GB (of 1000) or B, as in [4KiB,1MiB]"
            )
        sizes.append(size)
    return sizes


def size_name(size: int) -> str:
    """Write a number of bytes in the largest unit that leaves no fraction: 64 KiB, 1 MB."""
    unit = next(unit for unit, num_bytes in UNITS.items() if size % num_bytes == 0)
    return f"{size // UNITS[unit]} {unit}"


def _number_or_null(key: str, text: str) -> int | None:
    return None if text == "null" else whole_number(key, text)


def _text(_key: str, text: str) -> str:
    return text


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{key}={text}: must be true or false")
    return text == "true"


def _isa(key: str, text: str) -> str:
    if text not in ("avx", "avx2"):
        raise ConfigError(f"{key}={text}: must be avx or avx2")
    return text


def _names(_key: str, text: str) -> list[str] | None:
    return None if text == "null" else text.strip("[]").split(",")


def _file_or_null(_key: str, text: str) -> Path | None:
    return None if text == "null" else Path(text)


def _json_file(key: str, text: str) -> Path | None:
    return file_to_write(key, text, ".json")


PARSERS: dict[str, Callable[[str, str], Any]] = {
    "sizes": sizes_in_bytes,
    "codec": _names,
    "algorithm": _names,
    "num_values": _number_or_null,
    "input_grad": _flag,
    "isa": _isa,
    "measured": _flag,
    "l1": _text,
    "l2": _text,
    "memory_gb": _number_or_null,
    "trace": _file_or_null,
    "world_size": _number_or_null,
    "out": _json_file,
}


def _variants(name: str, settings: list[str]) -> list[Variant]:
    _refuse_unused(name, settings)
    common, sets = _compared(name, settings)
    if len(sets) < BENCHES[name].num_variants:
        raise ConfigError(
            "strategy: a comparison needs two, as in strategy=overlap,ddp or "
            "a='strategy=overlap bucket_mb=4' b='strategy=ddp'"
        )
    if BENCHES[name].apart and not was_launched() and ["strategy=none"] not in sets:
        sets = [["strategy=none"], *sets]  # the baseline of the others
    common = [*BENCHES[name].fixed, *common]
    variants = [
        Variant(_label(name, each), (*common, *each), load([*common, *each])) for each in sets
    ]
    if "step" in (name, BENCHES[name].runs):
        _refuse_incomparable(variants)
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"{', '.join(labels)}: the same is listed twice")
    return variants


def _refuse_incomparable(variants: list[Variant]) -> None:
    for key in OF_A_PROCESS:
        # comm=horovod has no settings of NCCL.
        if len({bool(OmegaConf.select(variant.config, key)) for variant in variants}) > 1:
            raise ConfigError(
                f"{key}: what is compared takes turns in one process, which has one value of it; "
                "compare with python -m lab.sweep"
            )
    for variant in variants:
        pattern = pattern_of(variant.config)
        if pattern.outlasts_step or pattern.waits_in_forward:
            raise ConfigError(
                f"{variant.label}: its exchanges outlast their step, and would run during the "
                "others' turns; compare it with python -m lab.sweep turns=4"
            )


def _compared(name: str, settings: list[str]) -> tuple[list[str], list[list[str]]]:
    """Separate the settings that all runs share from those of each run."""
    lettered = [text for text in settings if LETTERED.match(text)]
    common = [text for text in settings if not LETTERED.match(text)]
    overrides = parse_overrides(common)
    lists = [one for one in overrides if one.is_choice_sweep()]
    if len(lists) + bool(lettered) > 1:
        given = " ".join([*(str(one.input_line) for one in lists), *lettered])
        raise ConfigError(f"{given}: one list at a time; for more: a='...' b='...'")
    if lettered:
        return common, [_set(text) for text in lettered]
    group, default = BENCHES[name].group, BENCHES[name].default
    chosen = lists or [one for one in overrides if one.key_or_group == group]
    if not chosen and default:
        chosen = parse_overrides([f"{group}={default}"])
    if not chosen:
        return common, [list(each) for each in BENCHES[name].sets or ((),)]
    config_dir = config_dir_of(common)
    common = [text for text in common if text != chosen[-1].input_line]
    return common, [
        [f"{chosen[-1].get_key_element()}={value}"] for value in _values(chosen[-1], config_dir)
    ]


def _values(override: Override, config_dir: str | None) -> list[str]:
    if override.is_choice_sweep():
        return listed(override, config_dir)
    return [str(override.value())]


def _label(name: str, settings: list[str]) -> str:
    return " ".join(settings).removeprefix(f"{BENCHES[name].group}=")


def _refuse_unused(name: str, settings: list[str]) -> None:
    only = BENCHES[name].only
    parts = [part for text in settings for part in _set(text)]
    for setting in parts if only else ():
        if re.split(r"[.=]", setting)[0] not in only:
            allowed = ", ".join((*BENCHES[name].own, "out", *only))
            raise ConfigError(f"{setting}: is not used by {name}; allowed are {allowed}")


def _set(text: str) -> list[str]:
    """Split the settings in `a='...'`; other text is a single setting."""
    return shlex.split(text[2:]) if LETTERED.match(text) else [text]
