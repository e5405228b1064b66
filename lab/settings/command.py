"""A command, as its help describes it, and its command line once it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.settings.errors import ConfigError
from lab.settings.overrides import split


@dataclass(frozen=True)
class Command:
    """The words and settings that a command takes, as its help shows them.

    Attributes:
        name: as in `python -m NAME`.
        purpose: its description, in a few lines. examples: command lines. settings: its own
        settings, each with its default and a line of help. word: name of its one positional word;
        empty: it has none. several: whether it takes more than one such word. runs: whether it also
        takes the settings of a run, and Hydra's flags. sweeps: whether it accepts `--multirun`.
        stopped: text to print after Ctrl-C; empty: nothing.
    """

    name: str
    purpose: str
    examples: tuple[str, ...]
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    word: str = ""
    several: bool = False
    runs: bool = False
    sweeps: bool = False
    stopped: str = "stopped"

    @property
    def flags(self) -> str:
        """Return the flags that the command accepts."""
        names = ["--help"]
        names += ["--config-dir DIR", "--cfg job"] if self.runs else []
        names += ["--multirun"] if self.sweeps else []
        return ", ".join(names)

    @property
    def usage(self) -> str:
        """Return the command line that the help shows."""
        words = f"{self.word} ..." if self.several else self.word
        return " ".join(filter(None, ("python -m", self.name, words, "[setting=value ...]")))

    def texts(self, arguments: Sequence[str]) -> dict[str, str]:
        """Return the texts of a command's own settings, its only ones; defaults if not given.

        Raises: ConfigError: an unknown setting.
        """
        texts, others = split(arguments, self.settings)
        if unknown := [*others, *(key for key in texts if key not in self.settings)]:
            raise ConfigError(f"{unknown[0]}: allowed are {', '.join(self.settings)} (--help)")
        return {key: default for key, (default, _) in self.settings.items()} | texts


@dataclass(frozen=True)
class CommandLine:
    """The parsed words of a command line.

    Attributes:
        words: the positional words.
        settings: `key=value` words, in order; `--config-dir` is one of them.
        shows_settings: whether `--cfg job` asks only to print the settings.
    """

    words: list[str]
    settings: list[str]
    shows_settings: bool
    is_multirun: bool
    asks_help: bool

    @property
    def word(self) -> str:
        """The first positional word; empty if there is none."""
        return self.words[0] if self.words else ""
