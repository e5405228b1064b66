"""Composition by Hydra: choices of groups by name, by path of a file, or by path of code."""

from __future__ import annotations

import copy
import functools
import hashlib
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc
from yaml import YAMLError

from lab.settings.errors import ConfigError, one_line
from lab.settings.files import choices_of, conf_dir, file_at, is_file, read_file
from lab.settings.overrides import quoted
from lab.settings.own_code import names_code
from lab.settings.reading import DamagedFile, escaped, read_yaml

# To another setting, as in ${optim.warmup_steps}, or ${oc.select:sync.double_buffer,false}.
REFERENCE = re.compile(r"\$\{(?:[\w.]+|oc\.select:[\w.]+,[\w.]+)\}")
PACKAGE = re.compile(r"^\s*#\s*@package\b", re.MULTILINE)
# Of an exchange that is put together: `path=two_stage codec=int8 memory=error_feedback`.
PARTS = {"path": "two_stage", "codec": "int8", "memory": "error_feedback"}
Files = tuple[tuple[str, str], ...]  # a group and the file that is its choice


def composed(
    overrides: Sequence[Override],
    config_dir: str | None,
    groups: Collection[str],
    of_code: Collection[str],
    of_data: Collection[str],
) -> DictConfig:
    """Compose the choices of groups with Hydra, and set plain values in a copy.

    Hydra could do both in one call, in the same order, but would parse some twenty files for it: a
    grid whose cells differ only in values reads them once. A group whose choice is the path of a
    callable holds that path and the values given to it. A group of data holds what its file says,
    which may be a stranger's, so that Hydra never sees it.

    Args:
        groups: whose choice may be the path of a file. of_code: and of a callable. of_data: whose
            files are data.

    Raises:
        ConfigError: a path names no file, or a file does what none may.
        HydraException, OmegaConfBaseException: there is no such choice or key.
    """
    code = {o.key_or_group: str(o.value()) for o in overrides if _names_code(o, of_code)}
    data = {o.key_or_group: str(o.value()) for o in overrides if o.key_or_group in of_data}
    apart = {*code, *data}
    rest = [o for o in overrides if _root(o) not in apart]
    files = tuple((o.key_or_group, str(o.value())) for o in rest if _names_file(o, groups))
    _check(files)
    _check_of_folder(rest, config_dir)
    # Additions and removals depend on the order of overrides, so all of these stay together.
    ordered = any(str(o.input_line)[0] in "+~" for o in rest)
    plain = [] if ordered else [o for o in rest if not _names_group(o, config_dir, files)]
    lines = tuple(_line(o, files) for o in rest if o not in plain)
    config = copy.deepcopy(_composed(lines, config_dir, files, _changed(files)))
    _refuse_resolvers(OmegaConf.to_container(config), lines)
    for group, name in data.items():
        config[group] = escaped(_data(group, name, config_dir))
    for group, path in code.items():
        config[group] = {"_target_": path.replace(":", ".")}
        OmegaConf.set_struct(config[group], False)
    for override in overrides:
        if override in plain or (_root(override) in apart and override.key_or_group not in apart):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return config


def _check(files: Files) -> None:
    """Refuse a file that is no YAML, which Hydra would not say in a line, or sets other groups."""
    for group, file in files:
        try:
            read_yaml(file_at(group, file))
        except DamagedFile as error:
            raise ConfigError(f"{group}={error}") from None
        if group != "strategy" and PACKAGE.search(Path(file).read_text(encoding="utf-8")):
            raise ConfigError(f"{group}={file}: @package: only a strategy's file sets other groups")


def _check_of_folder(overrides: Sequence[Override], config_dir: str | None) -> None:
    """Refuse choices of the user's folder that are no YAML, which Hydra might read for minutes."""
    for override in overrides:
        group, name = override.key_or_group, str(override.value())
        if config_dir is not None and Path(config_dir, group, f"{name}.yaml").exists():
            read_file(group, name, config_dir)


def _refuse_resolvers(value: Any, lines: Sequence[str]) -> None:
    """Refuse ${oc.env:…} and the like in what files set: they read the environment.

    Args:
        lines: of the command line, where they may stand.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _refuse_resolvers(each, lines)
    elif isinstance(value, str) and _reads_else(value) and not any(value in n for n in lines):
        raise ConfigError(
            f"{value}: a file may refer to another setting, as in ${{optim.lr}}, and to nothing "
            "else; write it on the command line"
        )


def _reads_else(text: str) -> bool:
    return "${" in REFERENCE.sub("", text)


def _data(group: str, name: str, config_dir: str | None) -> dict[str, Any]:
    """Read a file of data; no key in it may be one by which Hydra would call something."""
    content = read_file(group, name, config_dir)
    if call := _call_in(content):
        raise ConfigError(f"{group}={name}: {call}: no such key; a {group} is data")
    return content


def _call_in(value: Any) -> str | None:
    if isinstance(value, dict):
        own = next((str(key) for key in value if str(key).startswith("_")), None)
        return own or _call_in(list(value.values()))
    return next(filter(None, map(_call_in, value)), None) if isinstance(value, list) else None


def _root(override: Override) -> str:
    return override.key_or_group.partition(".")[0]


def _names_code(override: Override, groups: Collection[str]) -> bool:
    value = override.value()
    group = override.key_or_group
    return group in groups and isinstance(value, str) and names_code(value)


def _names_file(override: Override, groups: Collection[str]) -> bool:
    value = override.value()
    return override.key_or_group in groups and isinstance(value, str) and is_file(value)


def _names_group(override: Override, config_dir: str | None, files: Files) -> bool:
    key = override.key_or_group
    known = override.package is not None or key in dict(files)
    return known or bool(choices_of(key, config_dir))


def _line(override: Override, files: Files) -> str:
    """Return an override as Hydra takes it: a file by the name under which it is linked."""
    file = dict(files).get(override.key_or_group)
    return f"{override.key_or_group}={_name(file)}" if file else str(override.input_line)


def _name(file: str) -> str:
    """Name a choice after its file, unlike any choice of the lab's."""
    digest = hashlib.sha256(str(Path(file).absolute()).encode()).hexdigest()[:8]
    return f"{Path(file).stem}_{digest}"


def _changed(files: Files) -> tuple[int, ...]:
    return tuple(file_at(group, file).stat().st_mtime_ns for group, file in files)


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


def parts_apart(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Separate the overrides that put an exchange together from all others.

    Raises:
        ConfigError: another exchange is chosen as well.
    """
    own = [each for each in overrides if each.key_or_group.partition(".")[0] in PARTS]
    others = [each for each in overrides if each not in own]
    for each in others if own else ():
        if each.key_or_group.partition(".")[0] == "exchange":
            raise ConfigError(
                f"{each.input_line}: path=, codec= and memory= make an exchange; leave it out"
            )
    return own, others


def exchange_of(overrides: Sequence[Override], config_dir: str | None) -> DictConfig:
    """Return the settings of an exchange, as any other has them.

    Args:
        overrides: choices of parts, and settings of these; at least one.

    Raises:
        ConfigError: there is no such choice, or a choice has no such setting.
    """
    chosen = PARTS | {
        each.key_or_group: str(each.value()) for each in overrides if each.key_or_group in PARTS
    }
    parts = {name: _read(name, choice, config_dir) for name, choice in chosen.items()}
    for each in overrides:
        name, _, key = each.key_or_group.partition(".")
        if key and key not in parts[name]:
            has = ", ".join(known for known in parts[name] if known != "_target_") or "none"
            raise ConfigError(
                f"{each.input_line}: no such setting; those of {name}={chosen[name]} are: {has}"
            )
        if key:
            parts[name][key] = each.value()
    coded = {"codec": parts["codec"], "memory": parts["memory"]}
    return OmegaConf.create(_along(parts["path"], coded, config_dir))


def _along(path: dict[str, Any], coded: dict[str, Any], config_dir: str | None) -> dict[str, Any]:
    """Return the exchange of messages along a path, or along the one between its nodes."""
    if "inter" not in path:
        return path | coded
    return path | {
        "inter": _along(_read("path", str(path["inter"]), config_dir), coded, config_dir)
    }


def _read(group: str, choice: str, config_dir: str | None) -> dict[str, Any]:
    if choice not in choices_of(group, config_dir) and names_code(choice):
        return {"_target_": choice.replace(":", ".")}
    return dict(read_file(group, choice, config_dir))
