"""The help on the settings of a run, made from the schema and the files of choices."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lab.settings.command import Command
from lab.settings.config import FIELDS, GROUPS, ConfigError, load
from lab.settings.fields import columns
from lab.settings.files import conf_dir, files_of
from lab.settings.overrides import config_dir_of

GRAMMAR = """\
flags, as in Hydra:
  --config-dir DIR   also use your own choices: DIR/strategy/mine.yaml is strategy=mine
  --cfg job          print the composed and checked settings, and exit; --resolve replaces
                     references, and --package optim prints only this group
  -sc install=bash   print the completion of `lab` for the shell: eval "$(lab -sc install=bash)"
{}you can add settings to a choice or remove them: +exchange.key=value ~exchange.key"""
MULTIRUN = "  -m, --multirun     run a grid, like python -m lab.sweep; settings accept lists\n"
DEFAULT = re.compile(r"^  - (?:override )?/?(\w+): (\w+)", re.MULTILINE)  # of a list of Hydra's
# The first comment of a file that stands on lines of its own.
COMMENT = re.compile(r"^(?:# (?!@package|Bytes sent).*\n)+", re.MULTILINE)
WIDEST = 100  # characters of a line about a choice


def of_run(command: Command, arguments: Sequence[str]) -> list[str]:
    """Return the lines about groups and settings; `arguments` select choices."""
    try:
        config_dir = config_dir_of(arguments)
    except ConfigError:  # help is what was asked for
        config_dir = None
    chosen = chosen_by(arguments, config_dir)
    lines = ["", "groups with their choices (* marks what this command line uses):"]
    headings = {g: FIELDS[g].metadata["help"].removesuffix(" (a group)") for g in GROUPS}
    if hardware := command.fields.get("hardware"):
        headings["hardware"] = "machines and links, from files of conf/hardware"
        chosen.setdefault("hardware", str(hardware.default))
    for group, heading in headings.items():
        lines.append(f"  {group}: {heading}")
        for name, file in sorted(files_of(group, config_dir).items()):
            mark = "*" if chosen.get(group) == name else " "
            lines.append(f"  {mark} {name:<22} {_described(file)}".rstrip())
    others = (field for name, field in FIELDS.items() if name not in (*GROUPS, "code"))
    lines += columns((*command.fields.values(), *others))
    lines += ["", "settings of the groups' choices (strategy=onebit --help shows that one's):"]
    content = of_choices(arguments, chosen, config_dir)
    lines += [
        f"  {group}.{key}={_as_written(value)}"
        for group in GROUPS[1:]
        for key, value in content[group].items()
        if not str(key).startswith("_") and not _is_data(value)
    ]
    return [*lines, "", GRAMMAR.format(MULTIRUN if command.sweeps else "")]


def chosen_by(arguments: Sequence[str], config_dir: str | None) -> dict[str, str]:
    """Return the choice of each group; a strategy chooses some."""
    words = {key: value for key, _, value in (word.partition("=") for word in arguments)}
    chosen: dict[str, str] = dict(DEFAULT.findall((conf_dir() / "train.yaml").read_text()))
    file = files_of("strategy", config_dir).get(words.get("strategy", chosen["strategy"]))
    return chosen | dict(DEFAULT.findall(file.read_text() if file else "")) | words


def _described(file: Path) -> str:
    """Return the first sentence of a choice's file."""
    with file.open(encoding="utf-8") as opened:
        found = COMMENT.search(opened.read(4096))
    text = " ".join(line.lstrip("# ") for line in found[0].splitlines()) if found else ""
    sentence = re.split(r"(?<=[a-z0-9)`])\.\s+(?=[A-Z])", text)[0]
    return textwrap.shorten(sentence.rstrip("."), WIDEST, placeholder=" …")


def of_choices(
    arguments: Sequence[str], chosen: Mapping[str, str], config_dir: str | None
) -> Mapping[str, Any]:
    """Return the settings of the groups, as files have them: references stay as they are written.

    The lab's own choices are read without Hydra, whose composition takes ten times as long.
    """
    files = {group: files_of(group, config_dir).get(chosen.get(group, "")) for group in GROUPS}
    texts = {group: file.read_text(encoding="utf-8") for group, file in files.items() if file}
    composes = any("\ndefaults:" in text for group, text in texts.items() if group != "strategy")
    named = all(argument.partition("=")[0] in GROUPS for argument in arguments)
    if named and not composes and not config_dir and len(texts) == len(GROUPS):
        import yaml

        content = {group: yaml.safe_load(text) for group, text in texts.items()}
        return content | {
            group: content[group] | values
            for group, values in content["strategy"].items()
            if isinstance(values, dict)
        }
    from omegaconf import OmegaConf

    try:
        config = load([argument for argument in arguments if "=" in argument])
    except ConfigError:  # help is what was asked for
        config = load([])
    return cast(Mapping[str, Any], OmegaConf.to_container(config))


def _as_written(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_as_written(nested)}" for key, nested in value.items())
        return "{" + ", ".join(items) + "}"
    return json.dumps(value) if value in (None, True, False) else str(value)


def _is_data(value: Any) -> bool:
    """Return whether `value` is a profile's content or a nested choice, and not a setting."""
    if isinstance(value, Mapping):
        return "_target_" in value
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and any(isinstance(entry, Mapping) for entry in value)
