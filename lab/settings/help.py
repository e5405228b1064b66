"""Help on the settings of a run, and completion of command lines in a shell.

Both are made from the schema and the files of choices. Completion is Hydra's, by its flag:
`eval "$(lab -sc install=bash)"`. Bash then asks `lab -sc query=bash` for each word, with the line
so far in COMP_LINE and COMP_POINT.
"""

from __future__ import annotations

import importlib
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lab.settings.checks import as_text
from lab.settings.command import Command
from lab.settings.config import FIELDS, GROUPS, PARTS, ConfigError, load
from lab.settings.fields import columns
from lab.settings.files import choices_of, conf_dir, files_of, keys_of
from lab.settings.overrides import config_dir_of
from lab.settings.storage import nested

GRAMMAR = """\
flags, as in Hydra:
  --config-dir DIR   also use your own choices: DIR/strategy/mine.yaml is strategy=mine
  --cfg job          print the composed and checked settings, and exit; --resolve replaces
                     references, and --package optim prints only that group
  -sc install=bash   print shell completion for `lab`: eval "$(lab -sc install=bash)"
{}you can add settings to a choice or remove them: +exchange.key=value ~exchange.key"""
MULTIRUN = "  -m, --multirun     run a grid, like python -m lab.sweep; settings accept lists\n"
DEFAULT = re.compile(r"^  - (?:override )?/?(\w+): (\w+)", re.MULTILINE)  # of a list of Hydra's
# The first comment of a file that stands on lines of its own.
COMMENT = re.compile(r"^(?:# (?!@package|Bytes sent).*\n)+", re.MULTILINE)
WIDEST = 100  # characters of a line about a choice
# Bash splits words at "=" too, so that a reply must not repeat what stands before it.
BASH = """\
_lab() {
    local IFS=$'\\n' word="${COMP_LINE:0:COMP_POINT}"
    word="${word##* }"
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" lab -sc query=bash 2>/dev/null))
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
}
complete -o nospace -o default -F _lab lab"""
OF_PARTS = {
    "path": "how messages travel; path=, codec= and memory= together define an exchange",
    "codec": "how values are encoded in messages",
    "memory": "what happens to compression errors",
}
SCRIPTS = {"install=bash": BASH, "uninstall=bash": "complete -r lab; unset -f _lab"}


def of_run(command: Command, arguments: Sequence[str]) -> list[str]:
    """Return the lines about groups and settings; `arguments` select choices."""
    config_dir = _config_dir(arguments)
    chosen = chosen_by(arguments, config_dir)
    lines = ["", "groups with their choices (* marks what this command line uses):"]
    headings = {g: FIELDS[g].metadata["help"].removesuffix(" (a group)") for g in GROUPS} | OF_PARTS
    if hardware := command.fields.get("hardware"):
        headings["hardware"] = "machines and links, from files in conf/hardware"
        chosen.setdefault("hardware", str(hardware.default))
    for group, heading in headings.items():
        lines.append(f"  {group}: {heading}")
        for name, file in sorted(files_of(group, config_dir).items()):
            mark = "*" if chosen.get(group) == name else " "
            lines.append(f"  {mark} {name:<22} {_described(file)}".rstrip())
    others = (field for name, field in FIELDS.items() if name not in (*GROUPS, "code"))
    lines += columns((*command.fields.values(), *others))
    lines += ["", "settings of the chosen groups (strategy=onebit --help shows those of onebit):"]
    content = of_choices(arguments, chosen, config_dir)
    lines += [
        f"  {group}.{key}={_as_written(value)}"
        for group in (*GROUPS[1:], *PARTS)
        for key, value in content.get(group, {}).items()
        if not str(key).startswith("_") and not _is_data(value)
    ]
    return [*lines, "", GRAMMAR.format(MULTIRUN if command.sweeps else "")]


def chosen_by(arguments: Sequence[str], config_dir: str | None) -> dict[str, str]:
    """Return the choice of each group; a strategy chooses some, and parts replace an exchange."""
    words = {key: value for key, _, value in (word.partition("=") for word in arguments)}
    chosen: dict[str, str] = dict(
        DEFAULT.findall((conf_dir() / "train.yaml").read_text(encoding="utf-8"))
    )
    file = files_of("strategy", config_dir).get(words.get("strategy", chosen["strategy"]))
    chosen |= dict(DEFAULT.findall(file.read_text(encoding="utf-8") if file else ""))
    return chosen | (PARTS | {"exchange": ""} if PARTS.keys() & words else {}) | words


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
    groups = [group for group in (*GROUPS, *PARTS) if chosen.get(group)]
    files = {group: files_of(group, config_dir).get(chosen[group]) for group in groups}
    texts = {group: file.read_text(encoding="utf-8") for group, file in files.items() if file}
    composes = any("\ndefaults:" in text for group, text in texts.items() if group != "strategy")
    named = all(argument.partition("=")[0] in groups for argument in arguments)
    if named and not composes and not config_dir and len(texts) == len(groups):
        import yaml

        content = {group: yaml.safe_load(text) for group, text in texts.items()}
        return content | {
            group: content[group] | values
            for group, values in content["strategy"].items()
            if isinstance(values, dict) and group in content
        }
    from omegaconf import OmegaConf

    try:
        config = load([argument for argument in arguments if "=" in argument])
    except ConfigError:  # help is what was asked for
        config = load([])
    content = cast(Mapping[str, Any], OmegaConf.to_container(config))
    parts = {key: value for key, value in nested(content["exchange"]) if key in PARTS}
    return {**content, **({"path": content["exchange"], "exchange": {}} if parts else {}), **parts}


def _as_written(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_as_written(nested)}" for key, nested in value.items())
        return "{" + ", ".join(items) + "}"
    return as_text(value)


def _is_data(value: Any) -> bool:
    """Return whether `value` is a profile's content or a nested choice, and not a setting."""
    if isinstance(value, Mapping):
        return "_target_" in value
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and any(isinstance(entry, Mapping) for entry in value)


def script(asked: str) -> str:
    """Return what a shell has to evaluate. ConfigError: it is not one of SCRIPTS."""
    if asked not in SCRIPTS:
        raise ConfigError(f"-sc {asked}: must be {' or '.join(SCRIPTS)}")
    return SCRIPTS[asked]


def of_line(modules: Mapping[str, str]) -> list[str]:
    """Return what the last word of the shell's line may become.

    Args:
        modules: of the commands, by name: `lab train` is that of lab.train.
    """
    line = os.environ.get("COMP_LINE", "")
    typed = line[: int(os.environ.get("COMP_POINT", len(line)))]
    _, name, *words = typed.split(" ") if " " in typed else (typed, "")
    if not words:
        return _starting(name, (each.removeprefix("lab.") for each in modules))
    module = modules.get(f"lab.{name}")
    return _continued(words, importlib.import_module(module).COMMAND) if module else []


def _continued(words: Sequence[str], command: Command) -> list[str]:
    *before, word = words
    key, is_setting, value = word.partition("=")
    if is_setting:
        done, comma, rest = value.rpartition(",")  # a list goes on after its last comma
        listed = (f"{key}={done}{comma}{each}" for each in _values(key, before, command))
        return _starting(f"{key}={done}{comma}{rest}", listed)
    flags = (flag.partition(" ")[0] for flag in command.flag_names)
    return _starting(word, [*command.word.split("|"), *_keys(before, command), *flags])


def _values(key: str, before: Sequence[str], command: Command) -> Iterable[str]:
    if command.runs and key in (*GROUPS, *PARTS, "study"):
        return choices_of(key, _config_dir(before))
    field = ({**command.fields, **FIELDS} if command.runs else command.fields).get(key)
    if field is None:
        return ()
    return field.metadata["choices"] or (("true", "false") if field.type == "bool" else ())


def _keys(before: Sequence[str], command: Command) -> Iterable[str]:
    keys = [*command.fields]
    if command.runs:
        config_dir = _config_dir(before)
        keys += [key for key in (*FIELDS, *PARTS) if key != "code"]
        for group, choice in chosen_by(before, config_dir).items():
            names = keys_of(group, config_dir).get(choice, ())
            keys += sorted(f"{group}.{name}" for name in names if group != "strategy")
    return [f"{key}=" for key in keys]


def _config_dir(words: Sequence[str]) -> str | None:
    try:
        return config_dir_of(words)
    except ConfigError:  # which the command itself will tell; help is what was asked for
        return None


def _starting(word: str, candidates: Iterable[str]) -> list[str]:
    return sorted({each for each in candidates if each and each.startswith(word)})
