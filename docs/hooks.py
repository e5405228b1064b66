"""Pages of the site that are made from the code when it is built: settings, choices, commands.

mkdocs calls `on_files`; `GENERATED` maps each page to the function that writes its Markdown.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import Field
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from lab.__main__ import modules
from lab.settings.command import Command
from lab.settings.config import DATA, FIELDS, GROUPS
from lab.settings.fields import allowed, default_text
from lab.settings.files import files_of

MEASURING = ("lab.bench", "lab.calibrate", "lab.cluster", "lab.gpu_report", "lab.profile_layers")
DATA_FILES = "The files contain data, not settings: "


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    for path, write in GENERATED.items():
        files.append(File.generated(config, path, content=write()))
    return files


def settings() -> str:
    """Return the page of a run's settings: plain ones in a table, then the groups."""
    plain = (field for name, field in FIELDS.items() if name not in (*GROUPS, "code"))
    groups = [f"| `{name}=` | {about(name)} | {len(files_of(name, None))} |" for name in GROUPS]
    return f"""# Settings of a run

Every command that trains, measures or predicts accepts these settings, as `key=value`.
`python -m lab.sweep` accepts a list for each setting, such as `batch_size=128,256`.
`python -m lab.train --help` prints the same table. To see the settings that result from a command
line, add `--cfg job`.

{table(plain)}

## Groups

The value of a group is the name of a choice, the import path of your own class, or the path of a
YAML file. A choice has its own settings, which are written `group.key=value`.
[Choices](choices.md) lists the choices and their settings. [Strategies](strategies.md) lists the
choices of `strategy=`.

| group | meaning | choices |
|---|---|---|
{chr(10).join(groups)}
"""


def about(group: str) -> str:
    """Return what a group decides."""
    text: str = FIELDS[group].metadata["help"].removesuffix(" (a group)")
    return text[0].upper() + text[1:]


def table(fields: Iterable[Field[Any]]) -> str:
    """Return a table of settings: default, meaning, and what is allowed."""
    rows = ["| setting | default | meaning | allowed |", "|---|---|---|---|"]
    for field in fields:
        meaning = field.metadata["help"]
        cells = (f"`{field.name}`", f"`{default_text(field)}`", meaning, allowed(field))
        rows.append("| " + " | ".join(re.sub(r"([|*])", r"\\\1", cell) for cell in cells) + " |")
    return "\n".join(rows)


def choices() -> str:
    """Return the page of all choices but strategies: each file as it is, with its comments."""
    parts = [
        "# Choices\n\n"
        "Each choice is a file in `conf/GROUP/`. The keys in the file are the choice's settings, "
        "with their defaults. To change a setting, use `GROUP.KEY=value`. `_target_` names the "
        "class or function that the lab calls with these settings.\n"
    ]
    for group in GROUPS[1:]:
        files = sorted(files_of(group, None).items())
        parts.append(f"## {group}\n\n{about(group)}.\n")
        if group in DATA:
            parts.append(DATA_FILES + ", ".join(f"`{name}`" for name, _ in files) + ".\n")
            continue
        for name, file in files:
            parts.append(f"### `{group}={name}`\n\n```yaml\n{file.read_text().strip()}\n```\n")
    return "\n".join(parts)


def commands(title: str, names: Iterable[str]) -> str:
    """Return a page of the named commands, from what their `--help` says."""
    parts = [
        f"# {title}\n\n"
        "`lab NAME` and `python -m lab.NAME` run the same command. Positional arguments come "
        "first, followed by settings of the form `key=value`. With `--help`, a command prints "
        "the same text.\n"
    ]
    for name in names:
        command: Command = importlib.import_module(modules()[name]).COMMAND
        listed = re.compile(r"(?:^\w+: .*\n?){2,}", re.MULTILINE)
        purpose = listed.sub(lambda found: f"\n```text\n{found[0].strip()}\n```\n", command.purpose)
        runs = (
            "The command also accepts the [settings of a run](settings.md).\n\n"
            if command.runs
            else ""
        )
        own = f"{table(command.fields.values())}\n" if command.fields else ""
        examples = "\n".join(command.examples)
        parts.append(
            f"## {command.name}\n\n{purpose}\n\n```text\n{command.usage}\n```\n\n{own}\n{runs}"
            f"Examples:\n\n```text\n{examples}\n```\n"
        )
    return "\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings,
    "reference/choices.md": choices,
    "reference/commands.md": lambda: commands("Commands", sorted({*modules()} - {*MEASURING})),
    "reference/machine_commands.md": lambda: commands("Commands that measure machines", MEASURING),
}
