"""Completion of command lines in a shell: `eval "$(lab -sc install=bash)"`, as Hydra's is named.

Bash asks `lab -sc query=bash` for each word, with the line so far in COMP_LINE and COMP_POINT.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence

from lab.settings.command import Command
from lab.settings.config import FIELDS, GROUPS
from lab.settings.errors import ConfigError
from lab.settings.files import choices_of, keys_of
from lab.settings.help import chosen_by
from lab.settings.overrides import config_dir_of

# Bash splits words at "=" too, so that a reply must not repeat what stands before it.
BASH = """\
_lab() {
    local IFS=$'\\n' word="${COMP_LINE:0:COMP_POINT}"
    word="${word##* }"
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" lab -sc query=bash 2>/dev/null))
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
}
complete -o nospace -o default -F _lab lab"""
SCRIPTS = {"install=bash": BASH, "uninstall=bash": "complete -r lab; unset -f _lab"}


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
    if command.runs and (key in GROUPS or key == "study"):
        return choices_of(key, _config_dir(before))
    field = ({**command.fields, **FIELDS} if command.runs else command.fields).get(key)
    if field is None:
        return ()
    return field.metadata["choices"] or (("true", "false") if field.type == "bool" else ())


def _keys(before: Sequence[str], command: Command) -> Iterable[str]:
    keys = [*command.fields]
    if command.runs:
        config_dir = _config_dir(before)
        keys += [key for key in FIELDS if key != "code"]
        for group, choice in chosen_by(before, config_dir).items():
            names = keys_of(group, config_dir).get(choice, ())
            keys += sorted(f"{group}.{name}" for name in names if group != "strategy")
    return [f"{key}=" for key in keys]


def _config_dir(before: Sequence[str]) -> str | None:
    try:
        return config_dir_of(before)
    except ConfigError:  # which the command itself will tell
        return None


def _starting(word: str, candidates: Iterable[str]) -> list[str]:
    return sorted({each for each in candidates if each and each.startswith(word)})
