"""Words of a command line in Hydra's grammar: `key=value`, `+key=value`, `++key=value`, `~key`.

Hydra is imported by the functions that parse: it takes a fifth of a second, and help needs none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.settings.errors import ConfigError
from lab.settings.fields import INTEGER
from lab.settings.files import choices_of, is_folder
from lab.settings.hints import OF_HYDRA, lonely_hint, number
from lab.settings.secrets import redacted_words

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# Whole, and not one of those that `handed_over` makes, whose types it knows.
OF_ENVIRONMENT = re.compile(r"\$\{oc\.env:(?!LAB_)[^{}$]+\}")
MOST_VALUES = 10**4  # of a range, which one digit too many makes endless


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Parse `key=value` arguments in Hydra's grammar.

    Raises:
        ConfigError: an argument is not of that form, or is a setting of Hydra itself.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    overrides: list[Override] = []
    for index, argument in enumerate(arguments):
        try:
            overrides.append(parser.parse_override(argument))
        except RecursionError:
            raise ConfigError(f"{argument:.80}… is nested too deeply") from None
        except ValueError:  # Python's, of an integer
            raise ConfigError(f"{argument:.80}… has too many digits") from None
        except HydraException:
            hint = _hint(arguments, index)
            raise ConfigError(f"{argument!r} is not a setting: {hint}") from None
        if re.match(r"hydra\b", key := overrides[-1].key_or_group):
            named = (hint for name, hint in OF_HYDRA.items() if key.startswith(name))
            raise ConfigError(f"{argument}: {next(named, OF_HYDRA['--hydra-help'])}")
    return overrides


def _hint(arguments: Sequence[str], index: int) -> str:
    """Return what to write instead of an argument that Hydra's grammar refuses."""
    if ":" in (argument := arguments[index]) and argument.count("=") > 1:
        return f"only a grid accepts conditional settings: python -m lab.sweep {argument}"
    meant = None if "=" in argument else lonely_hint(arguments, index, choices_of("strategy"))
    return meant or (
        "write key=value, and quote values that contain commas, brackets, '=' or other letters "
        "than English ones, as in 'cell=\"a=b\"'"
    )


def handed_over(arguments: Sequence[str]) -> list[str]:
    """Return a command line whose secrets stand in the environment, to which it refers.

    So they are in no list of processes of the ranks that it starts, and in no file that keeps it.
    """
    return [word if redacted_words([word]) == [word] else _handed_over(word) for word in arguments]


def _handed_over(word: str) -> str:
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString, Sweep

    key, _, text = word.partition("=")
    if "." not in key or "${" in text:
        return word
    try:
        value = parse_overrides([word])[0].value()
    except ConfigError:  # which whoever reads it will tell
        return word
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    texts = [each.text if isinstance(each, QuotedString) else each for each in values]
    if all(isinstance(each, str) for each in texts):
        references = (_put_away(key, number, str(each)) for number, each in enumerate(texts))
        return f"{key}={','.join(map(repr, references))}"
    if isinstance(value, Sweep):
        return word
    return f"{key}='${{oc.decode:{_put_away(key, 0, text)}}}'"


def _put_away(key: str, number: int, text: str) -> str:
    """Set a variable of the environment; return the reference to it."""
    name = re.sub(r"\W", "_", f"LAB_{key}_{number}".upper())
    os.environ[name] = text
    return f"${{oc.env:{name}}}"


def with_number(argument: str) -> str:
    """Have the number that a variable of the environment holds read as one, as if it were typed.

    The resolver oc.env gives texts alone: optim.lr='${oc.env:LR,0.1}' would be the word "0.1".
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, _, text = argument.partition("=")
    if not OF_ENVIRONMENT.fullmatch(text := text.strip("'\"")):
        return argument
    try:
        value = str(OmegaConf.create({"value": text}).value)
    except OmegaConfBaseException:  # there is no such variable, which composing tells
        return argument
    is_typed = number(value) is not None or value.lower() in ("true", "false", "null")
    return f"{key}={quoted(f'${{oc.decode:{text}}}')}" if is_typed else argument


def own_choices(arguments: Sequence[str]) -> Sequence[str]:
    """Return settings that a file of data gives, after checking that they name no code or file.

    Raises:
        ConfigError: a setting is more than one of the lab's own choices, or a plain value.
    """
    for override in parse_overrides(arguments):
        keys, value = override.key_or_group.split("."), override.value()
        texts = value if isinstance(value, list) else [value]
        named = [text for text in texts if not isinstance(text, int | float | bool | None)]
        are_names = all(isinstance(text, str) and re.fullmatch(r"[\w-]+", text) for text in named)
        is_path = {"config_dir", "runs_dir", "path", "resume"} & {*keys}
        if is_path or any(key.startswith("_") for key in keys) or not are_names:
            raise ConfigError(
                f"{override.input_line}: a file may set only plain values and the lab's own choices"
            )
    return arguments


def expanded(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Expand lists: for each key, its settings as a command line would take them.

    Raises:
        ConfigError: a value is listed twice, or a list is not written a,b,c.
    """
    lists, config_dir = dict[str, list[str]](), config_dir_of(arguments)
    for override in parse_overrides(arguments):
        if override.is_interval_sweep():
            raise ConfigError(
                f"{override.input_line}: a grid needs values: a,b,c or range(1,9,2); "
                "only Hydra's sweepers draw from intervals (docs/how-to/hydra.md)"
            )
        settings = [str(override.input_line)]
        if override.is_discrete_sweep():
            key = override.get_key_element()
            settings = [f"{key}={value}" for value in listed(override, config_dir)]
        if len({_as_number(each.partition("=")[2]) for each in settings}) < len(settings):
            raise ConfigError(f"{override.input_line}: a value is listed twice")
        lists[override.key_or_group] = settings
    return lists


def _as_number(text: str) -> float | str:
    """Return the number that a text is, so that 4 and 4.0 are one value; any other text as it is.

    An integer may have more digits than a float.
    """
    value = number(text)
    return text if value is None else int(text) if INTEGER.fullmatch(text) else value


def one_value(key: str, texts: Mapping[str, str]) -> str:
    """Return the value of a key that takes no list. ConfigError: it has several."""
    (override,) = parse_overrides([f"{key}={texts[key]}"])
    if override.is_sweep_override():
        raise ConfigError(f"{key}={texts[key]}: must be one value")
    value = override.value()
    return value if isinstance(value, str) else texts[key]  # 1_0 is a name too


def listed(override: Override, config_dir: str | None) -> list[str]:
    """Return the values of a list: a,b,c, range(1,9,2), or the choices that glob(a*) matches.

    Raises:
        ConfigError: a glob that matches no choice, or a range of no values or too many.
    """
    from hydra.core.override_parser.types import Glob, RangeSweep

    found = override.value()
    if isinstance(found, RangeSweep):
        ends: Any = (found.start, found.stop)
        length = (ends[1] - ends[0]) * (1 if found.step > 0 else -1)
        if not 0 < length <= abs(found.step) * MOST_VALUES:
            raise ConfigError(f"{override.input_line}: must list from 1 to {MOST_VALUES} values")
    if not isinstance(found, Glob):
        return list(map(str, override.sweep_string_iterator()))
    choices = choices_of(override.key_or_group, config_dir)
    if names := found.filter(choices):
        return names
    allowed = f"allowed: {', '.join(choices)}" if choices else "write the values as a list, a,b,c"
    raise ConfigError(f"{override.input_line} matches no choice; {allowed}")


def config_dir_of(arguments: Sequence[str]) -> str | None:
    """Return the folder of the user's own choices, if the arguments name one.

    Raises:
        ConfigError: there is no such folder.
    """
    words = [argument for argument in arguments if argument.lstrip("+").startswith("config_dir=")]
    folder = parse_overrides(words)[-1].value() if words else None
    if folder is None:
        return None
    if not is_folder(str(folder)):
        raise ConfigError(f"{words[-1]}: there is no such folder")
    return str(Path(str(folder)).absolute())


def quoted(text: str) -> str:
    """Quote any text as one value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
