"""Folders of choices and of code: the lab's conf/, the user's (`config_dir`), the current one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.settings.errors import ConfigError
from lab.settings.hints import choice_hint
from lab.settings.storage import mapped, read_yaml

# A group of this name would make Hydra take a run's setting `study` for a choice among its files.
FOLDERS = {"study": "studies"}
NAMED = ("hardware", "profile")  # whose files have a name, by default that of the file
TOP_LEVEL_KEY = re.compile(r"^(\w+):", re.MULTILINE)


def conf_dir() -> Path:
    """Return the configuration tree, to which a checkout's package has a link."""
    return (Path(__file__).parents[1] / "conf").resolve()


def make_importable(config_dir: str | None) -> None:
    """Let Python find modules in the current folder and in the user's folder of choices."""
    for folder in (str(Path.cwd()), config_dir):
        if folder and folder not in sys.path:
            sys.path.append(folder)


@contextmanager
def standing_here() -> Iterator[None]:
    """Import a user's module as a script in the current folder does, and stay in that folder.

    The folder is last on Python's path otherwise (lab/__init__.py): files in it, perhaps a
    stranger's, are not taken for a library's modules.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)
        os.chdir(here)


def choices_of(group: str, config_dir: str | None = None) -> list[str]:
    """Return the names that `group=` accepts, in alphabetical order."""
    return sorted(files_of(group, config_dir))


def is_file(name: str) -> bool:
    """Return whether a choice is the path of a YAML file, as `./mycluster.yaml`."""
    return name.endswith((".yaml", ".yml"))


def is_folder(path: str) -> bool:
    """Return whether there is such a folder; a path that is empty or too long names none."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises for one that is too long


def file_at(group: str, name: str) -> Path:
    """Return the path of a file that is a choice itself. ConfigError: there is no such file."""
    if not Path(name).is_file():
        raise ConfigError(f"{group}={name}: there is no such file")
    return Path(name)


def read_file(group: str, name: str, config_dir: str | None = None) -> dict[str, Any]:
    """Read the content of <group>/<name>.yaml, or of the file that `name` is the path of.

    Raises:
        ConfigError: there is no such file, or it is not a YAML mapping.
    """
    content = _content_of(group, name, config_dir)
    if group in NAMED and content:
        content.setdefault("name", Path(name).stem)
    names = [name]
    while group == "hardware" and "defaults" in content:
        sibling = str(content.pop("defaults"))
        if sibling in names:
            raise ConfigError(f"{group}={name}: defaults={sibling}: must not lead back to itself")
        names.append(sibling)
        content = _completed(content, _content_of(group, sibling, config_dir))
    return content


def _completed(own: dict[str, Any], sibling: dict[str, Any]) -> dict[str, Any]:
    """Fill in from the file that `defaults` names; a value that a file gives is not assumed."""
    given = {
        f"{key}.{inner}" if isinstance(value, dict) else key
        for key, value in own.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assumed = {
        key: ends
        for key, ends in sibling.get("assumed", {}).items()
        if not {key, key.partition(".")[0]} & given
    }
    merged = {**sibling, "assumed": assumed}
    for key, value in own.items():
        under = merged.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            value = {**under, **value}
        merged[key] = value
    return merged


def no_choice(group: str, choice: str, config_dir: str | None) -> str:
    """Return the message about a choice that a group lacks."""
    allowed = choices_of(group, config_dir)
    return f"{group}={choice}: {choice_hint(group, choice, allowed)}allowed: {', '.join(allowed)}"


def _content_of(group: str, name: str, config_dir: str | None) -> dict[str, Any]:
    files = {name: file_at(group, name)} if is_file(name) else files_of(group, config_dir)
    if name not in files:
        raise ConfigError(f"{no_choice(group, name, config_dir)}, or a path such as ./{group}.yaml")
    try:
        content = read_yaml(files[name])
    except (ValueError, OSError) as error:
        why = str(error).removeprefix(f"{files[name]}: ")
        raise ConfigError(f"{group}={name}: {why}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{group}={name}: must contain keys with values, as in key: value")
    return {str(key): value for key, value in content.items()}


def located(content: Any, config_dir: str | None) -> Any:
    """Replace names of the user's hardware and profiles by the paths of their files.

    Args:
        content: of a YAML file: nested mappings and lists, in which the keys `hardware` and
            `profile` hold names.
    """

    def path_of(group: str, name: Any) -> Any:
        is_name = group in ("hardware", "profile") and isinstance(name, str)
        file = files_of(group, config_dir).get(name) if is_name else None
        return str(file) if file and not file.is_relative_to(conf_dir()) else name

    return mapped(content, path_of)


def keys_of(group: str, config_dir: str | None = None) -> dict[str, set[str]]:
    """Return each choice's settings, without parsing its YAML: help must be quick."""
    return {
        name: set(TOP_LEVEL_KEY.findall(path.read_text(encoding="utf-8"))) - {"defaults"}
        for name, path in files_of(group, config_dir).items()
    }


def files_of(group: str, config_dir: str | None) -> dict[str, Path]:
    """Return files by name. As in Hydra, the lab's win: users can add choices, not replace them."""
    folders = [Path(config_dir)] if config_dir else []
    return {
        path.stem: path
        for folder in [*folders, conf_dir()]
        for path in (folder / FOLDERS.get(group, group)).glob("*.yaml")
    }
