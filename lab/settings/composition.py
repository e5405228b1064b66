"""Composition by Hydra: choices of groups by name, by path of a file, or by path of code.

lab.settings.config.load is its one caller, and imports it late: Hydra takes a fifth of a second.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)
from omegaconf.resolvers import oc
from yaml import YAMLError

from lab.settings import checks, hints
from lab.settings.config import (
    DATA,
    FIELDS,
    GROUPS,
    PARTS,
    RunSettings,
    check_batch,
    check_name,
    expected,
)
from lab.settings.errors import ConfigError, as_config_error, one_line
from lab.settings.files import (
    choices_of,
    conf_dir,
    file_at,
    is_file,
    keys_of,
    make_importable,
    no_choice,
    read_file,
)
from lab.settings.optim import schedule_of
from lab.settings.overrides import config_dir_of, parse_overrides, quoted, with_number
from lab.settings.own_code import OFFERED, OWN, check_choices, names_code
from lab.settings.storage import escaped, nested, read_yaml

# To another setting, as in ${optim.warmup_steps}, or ${oc.select:sync.double_buffer,false}.
REFERENCE = re.compile(r"\$\{(?:[\w.]+|oc\.select:[\w.]+,[\w.]+)\}")
OF_INSTANTIATE = ("_args_", "_convert_", "_partial_", "_recursive_")  # which the lab itself sets
BUILT = ("comm", "data", "task", "model", "optim", "exchange", "sync")  # by every run
PACKAGE = re.compile(r"^\s*#\s*@package\b", re.MULTILINE)
Files = tuple[tuple[str, str], ...]  # a group and the file that is its choice

ConfigStore.instance().store(name="settings", node=RunSettings)


def composed(arguments: Sequence[str]) -> DictConfig:
    """Compose, type-check and validate the settings of one run: see lab.settings.config.load."""
    overrides = parse_overrides(list(map(with_number, arguments)))
    config_dir = config_dir_of(arguments)
    for override in overrides:
        _refuse(override, config_dir)
    parts, overrides = _parts_apart(overrides)
    try:
        config = _with_groups(overrides, config_dir)
        if parts:
            config.exchange = _exchange_of(parts, config_dir)
        _validate(config)
        _refuse_unread(overrides, config)
        make_importable(config_dir)
        config.code = check_choices(config, arguments)
    except (ConfigAttributeError, ConfigKeyError) as error:
        key = str(getattr(error, "full_key", ""))
        line = next((str(o.input_line) for o in overrides if o.key_or_group == key), key)
        raise ConfigError(_unknown(line, key, config_dir)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, arguments, config_dir)) from None
    except ConfigError:
        raise
    except ValueError as error:  # Hydra's own, of a group without a choice
        raise ConfigError(one_line(error)) from None
    return config


def _refuse_unread(overrides: Sequence[Override], config: DictConfig) -> None:
    """Refuse settings that are added to a choice that has none, and so is not built."""
    for override in overrides:
        group, dot, _ = override.key_or_group.partition(".")
        if dot and group in OWN and "_target_" not in config[group]:
            raise ConfigError(f"{override.input_line}: this choice of {group} has no settings")


class ProgramError(ConfigError, CompactHydraException):
    """A wrong setting in a program of Hydra's, which prints its line without a traceback."""


def of_program(config: DictConfig, world_size: int) -> tuple[DictConfig, list[str]]:
    """Check settings that a program of Hydra's has composed, as those of a command line are.

    Returns:
        The settings, without references, and the words that the program was called with; none if
        it was not @hydra.main that composed them.

    Raises:
        ProgramError: a setting is missing, unknown or wrong.
    """
    words = [*HydraConfig.get().overrides.task] if HydraConfig.initialized() else []
    try:
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        typed = OmegaConf.merge(OmegaConf.structured(RunSettings), content)
        assert isinstance(typed, DictConfig)
        _validate(typed)
        check_batch(typed, world_size)
        make_importable(typed.config_dir)
        typed.code = check_choices(typed, words)
    except (ConfigError, OmegaConfBaseException) as error:
        raise ProgramError(one_line(error)) from None
    return typed, words


def _refuse(override: Override, config_dir: str | None) -> None:
    """Refuse overrides that no run can use, and of which Hydra does not say so."""
    line, key = override.input_line, override.key_or_group
    if not key:
        raise ConfigError(f"{line}: no such setting; --help lists all settings")
    if override.is_sweep_override():
        raise ConfigError(
            f"{line}: a run accepts only one value; for a list, use python -m lab.sweep"
        )
    if override.is_delete() and ("." not in key or key.endswith("._target_")):
        raise ConfigError(
            f"{line}: a run needs this setting; you can remove only what a choice sets, such as "
            "~data.size"
        )
    if _root(override) == "code":
        raise ConfigError(
            f"{line}: the lab sets this itself, from your own files that the run uses; leave it out"
        )
    adds = override.is_add() or override.is_force_add()
    if (adds and _root(override) not in FIELDS) or key.rpartition(".")[2] in OF_INSTANTIATE:
        raise ConfigError(
            f"{line}: nothing reads this setting; add one only to a choice, as in +data.key=value"
        )
    is_choice = override.is_delete() or isinstance(override.value(), str | int)
    if key in GROUPS and key not in DATA and not is_choice:
        raise ConfigError(no_choice(key, str(line).partition("=")[2], config_dir))


def _validate(config: DictConfig) -> None:
    for name, field in FIELDS.items():
        value, choices, limits = config[name], field.metadata["choices"], field.metadata["limits"]
        if choices:
            checks.one_of(name, value, choices)
        elif checks.is_whole(value):
            checks.integer(name, value, limits.at_least, limits.at_most)
        elif isinstance(value, float):
            checks.number(name, value, **dataclasses.asdict(limits))
        elif value == "":
            raise ConfigError(f"{name}=: must not be empty")
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(f"steps={config.steps} epochs={config.epochs}: set only one of the two")
    for name in ("study", "cell"):
        check_name(name, config[name])
    for group in BUILT:
        if "_target_" not in config[group]:
            raise ConfigError(f"{group}._target_: is missing")
    schedule_of(cast(Any, OmegaConf.to_container(config.optim, resolve=True)))


def _explain(error: Exception, arguments: Sequence[str], config_dir: str | None) -> str:
    """Return one line that names the key, the value and what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.strip("/").partition("/")
        return no_choice(group or choice, choice if group else "", config_dir)
    cause = error.__cause__ or error
    quoted_key = re.search(r"'([^']+)'", str(error))
    key = str(getattr(cause, "full_key", None) or (quoted_key.group(1) if quoted_key else ""))
    words = ((a.lstrip("+~").partition("=")[0], a) for a in reversed(arguments))
    refers = key.startswith("${")
    named = (a for name, a in words if f"{name}.".startswith(f"{key}.") or (refers and key in a))
    argument = next(named, key)
    if "Could not append" in str(error):
        return f"{argument}: is set already; write {argument.lstrip('+')}"
    if "Could not override" in str(error):
        return _unknown(argument, key, config_dir)
    is_type = isinstance(cause, ValidationError) and key in FIELDS
    reason = expected(key, argument.removeprefix(f"{key}=")) if is_type else one_line(cause)
    return f"{argument}: {reason}"


def _unknown(argument: str, key: str, config_dir: str | None) -> str:
    keys = {group: keys_of(group, config_dir) for group in GROUPS}
    group, _, name = key.partition(".")
    if has_it := [choice for choice, names in keys.get(group, {}).items() if name in names]:
        return f"{argument}: needs {' or '.join(f'{group}={name}' for name in sorted(has_it))}"
    known = {
        *FIELDS,
        *(f"{group}.{name}" for group in keys for names in keys[group].values() for name in names),
    }
    hint = hints.hint(key, argument.partition("=")[2]) or hints.nearest(key, known)
    return f"{argument}: no such setting; {hint or '--help lists all settings'}"


def _with_groups(overrides: Sequence[Override], config_dir: str | None) -> DictConfig:
    """Compose the choices of groups with Hydra, and set plain values in a copy.

    Hydra could do both in one call, in the same order, but would parse some twenty files for it: a
    grid whose cells differ only in values reads them once. A group whose choice is the path of a
    callable holds that path and the values given to it. A group of data holds what its file says,
    which may be a stranger's, so that Hydra never sees it.
    """
    own = [o for o in overrides if o.key_or_group in OFFERED and names_code(_text(o))]
    code = {_place(o): _text(o) for o in own}
    data = {o.key_or_group: str(o.value()) for o in overrides if o.key_or_group in DATA}
    apart = {*code, *data}
    rest = [o for o in overrides if o not in own and not _lies_in(o, apart)]
    by_file = [o for o in rest if o.key_or_group in GROUPS and is_file(_text(o))]
    files = tuple(dict.fromkeys((o.key_or_group, _text(o)) for o in by_file))
    _check(files, rest, config_dir)
    # Additions and removals depend on the order of overrides, so all of these stay together.
    ordered = any(str(o.input_line)[0] in "+~" for o in rest)
    named = (o for o in rest if o in by_file or _names_group(o, config_dir))
    chosen = rest if ordered else [*named]
    plain = [o for o in rest if o not in chosen]
    lines = tuple(
        f"{str(o.input_line).partition('=')[0]}={_name(_text(o))}"
        if o in by_file
        else str(o.input_line)
        for o in chosen
    )
    changed = tuple(file_at(group, file).stat().st_mtime_ns for group, file in files)
    config = copy.deepcopy(_composed(lines, config_dir, files, changed))
    _refuse_resolvers(OmegaConf.to_container(config), lines)
    for group, name in data.items():
        content = read_file(group, name, config_dir)
        call = next((key for key, _ in nested(content) if key.startswith("_")), None)
        if call:  # by it Hydra would call something
            raise ConfigError(
                f"{group}={name}: {call}: keys that begin with _ are not allowed in a {group}"
            )
        config[group] = escaped(content)
    for place, path in sorted(code.items()):  # a whole choice before a part of it
        target = {"_target_": path.replace(":", ".")}
        OmegaConf.update(config, place, target, merge=False)
        OmegaConf.set_struct(OmegaConf.select(config, place), False)
    for override in overrides:
        inside = _lies_in(override, apart) and _place(override) not in apart
        if inside and override.package and override not in own:
            raise ConfigError(
                f"{override.input_line}: {_root(override)} is your own code, which has no choices "
                "in it; leave this setting out"
            )
        if override in plain or (inside and override not in own):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return config


def _text(override: Override) -> str:
    value = override.value()
    return value if isinstance(value, str) else ""


def _root(override: Override) -> str:
    return override.key_or_group.partition(".")[0]


def _place(override: Override) -> str:
    """Return where a choice goes: exchange.inter of exchange@exchange.inter=mine.Vote."""
    return str(override.package or override.key_or_group)


def _lies_in(override: Override, places: Collection[str]) -> bool:
    """Return whether an override sets one of `places`, or a value in it."""
    return any(f"{_place(override)}.".startswith(f"{place}.") for place in places)


def _names_group(override: Override, config_dir: str | None) -> bool:
    return override.package is not None or bool(choices_of(override.key_or_group, config_dir))


def _check(files: Files, overrides: Sequence[Override], config_dir: str | None) -> None:
    """Refuse files that are no YAML, which Hydra might read for minutes, or set other groups."""
    for group, file in files:
        with as_config_error(f"{group}="):
            read_yaml(file_at(group, file))
        if group != "strategy" and PACKAGE.search(Path(file).read_text(encoding="utf-8")):
            raise ConfigError(
                f"{group}={file}: @package: only the file of a strategy may set other groups"
            )
    for override in overrides:
        group, name = override.key_or_group, str(override.value())
        if config_dir is not None and Path(config_dir, group, f"{name}.yaml").exists():
            read_file(group, name, config_dir)


def _refuse_resolvers(content: Any, lines: Sequence[str]) -> None:
    """Refuse ${oc.env:…} and the like, which read the environment, unless command `lines` do."""
    for _, value in nested(content):
        resolves = isinstance(value, str) and "${" in REFERENCE.sub("", value)
        if resolves and not any(value in line for line in lines):
            raise ConfigError(
                f"{value}: a file may refer only to other settings, as in ${{optim.lr}}; write "
                "anything else on the command line"
            )


def _name(file: str) -> str:
    """Name a choice after its file, unlike any choice of the lab's."""
    digest = hashlib.sha256(str(Path(file).absolute()).encode()).hexdigest()[:8]
    return f"{Path(file).stem}_{digest}"


@functools.lru_cache(maxsize=128)
def _composed(
    lines: tuple[str, ...], config_dir: str | None, files: Files, _changed: tuple[int, ...]
) -> DictConfig:
    with _linked(files) as folder:
        folders = [f"file://{each}" for each in (config_dir, folder) if each]
        paths = ",".join(quoted(each) for each in folders)
        search = [f"hydra.searchpath=[{paths}]"] if folders else []
        with _apart(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
            try:
                return compose("train", overrides=[*lines, *search])
            except (YAMLError, RecursionError) as error:  # of a file in the user's folder
                mark = getattr(error, "problem_mark", None)
                where = f"{mark.name}:{mark.line + 1}" if mark else f"config_dir={config_dir}"
                raise ConfigError(f"{where}: not YAML: {one_line(error)}") from None
            except HydraException:  # some are OSErrors too
                raise
            except OSError as error:  # a choice whose name no file can have
                raise ConfigError(one_line(error)) from None


@contextmanager
def _linked(files: Files) -> Iterator[str | None]:
    """Link files into a folder of choices, where Hydra finds them by the name of their group."""
    if not files:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        for group, file in files:
            link = Path(folder, group, f"{_name(file)}.yaml")
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(file_at(group, file).absolute())
        yield folder


@contextmanager
def _apart() -> Iterator[None]:
    """Leave the Hydra of a program that uses the lab, if it is a Hydra application, as it was.

    Meanwhile no file can make the value of an environment variable the name of a choice.
    """
    programs = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    OmegaConf.clear_resolver("oc.env")
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env)
        GlobalHydra.instance().hydra = programs


def _parts_apart(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Separate the overrides that put an exchange together from all others."""
    own = [each for each in overrides if _root(each) in PARTS]
    others = [each for each in overrides if each not in own]
    for each in others if own else ():
        if _root(each) == "exchange":
            raise ConfigError(
                f"{each.input_line}: path=, codec= and memory= already define the exchange; "
                "leave this setting out"
            )
    return own, others


def _exchange_of(overrides: Sequence[Override], config_dir: str | None) -> DictConfig:
    """Return the settings of an exchange, as any other has them, from those of its parts."""
    chosen = PARTS | {
        each.key_or_group: str(each.value()) for each in overrides if each.key_or_group in PARTS
    }
    parts = {name: _read(name, choice, config_dir) for name, choice in chosen.items()}
    for each in overrides:
        name, _, key = each.key_or_group.partition(".")
        # Those of a user's own code are checked once it is imported.
        if key and key not in parts[name] and str(parts[name].get("_target_")).startswith("lab."):
            has = ", ".join(known for known in parts[name] if known != "_target_") or "none"
            raise ConfigError(
                f"{each.input_line}: no such setting; the settings of {name}={chosen[name]} are: "
                f"{has}"
            )
        if key:
            parts[name][key] = each.value()
    coded = {"codec": parts["codec"], "memory": parts["memory"]}
    return OmegaConf.create(_along(parts["path"], coded, config_dir))


def _along(path: dict[str, Any], coded: dict[str, Any], config_dir: str | None) -> dict[str, Any]:
    """Return the exchange of messages along a path, or along the one between its nodes."""
    if "inter" not in path:
        return path | coded
    try:
        inter = _read("path", str(path["inter"]), config_dir)
    except ConfigError as error:
        raise ConfigError(str(error).replace("path=", "path.inter=", 1)) from None
    return path | {"inter": _along(inter, coded, config_dir)}


def _read(group: str, choice: str, config_dir: str | None) -> dict[str, Any]:
    if choice not in choices_of(group, config_dir) and names_code(choice):
        return {"_target_": choice.replace(":", ".")}
    return dict(read_file(group, choice, config_dir))
