"""Write a checklist's results as a page and as JSON, and print each item as it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.checklist.item import place
from lab.record.files import write_json
from lab.settings.atomic import write_atomically

NAMED = ("torch", "cuda", "cudnn", "nccl", "triton")  # of an environment; old ones lack some


def result(found: dict[str, Any], command: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the JSON result from the items of lab.checklist.check and the hardware `found`."""
    return {
        "gpus": found["environment"]["gpus"],
        "commit": found["git_commit"]["commit"],
        "commands": [command],
        "items": items,
        "hardware": found,
    }


def lines(item: dict[str, Any]) -> list[str]:
    """Print the result of an item on a terminal."""
    seconds = sum(each["seconds"] for each in item["commands"])
    end = f"    {item['verdict']}, {seconds:.0f} s"
    figures = [
        f"    {each['name']:<28} {value(each):>16}   expected {each['expected']}: {each['verdict']}"
        for each in item["figures"]
    ]
    return [*(f"    {problem}" for problem in item["problems"]), *figures, end]


def value(figure: dict[str, Any]) -> str:
    """Format a figure with its unit."""
    number = figure["value"]
    shown = "-" if number is None or number != number else f"{number:.4g}"
    return f"{shown} {figure['unit']}".strip()


def merged(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Merge `new` with earlier results of the same GPUs and the same commit."""
    try:
        before = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return new
    if any(before.get(key) != new[key] for key in ("gpus", "commit")):
        return new
    items = {each["key"]: each for each in (*before["items"], *new["items"])}
    ordered = [items[key] for key in sorted(items, key=place)]
    commands = list(dict.fromkeys([*before["commands"], *new["commands"]]))
    return {**new, "items": ordered, "commands": commands}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the page to `path`, and its JSON next to it. OSError: a file cannot be written."""
    write_json(path.with_suffix(".json"), result)
    write_atomically(path, lambda temporary: temporary.write_text(text(result)))


def text(result: dict[str, Any]) -> str:
    """Write the page as Markdown."""
    found = result["hardware"]
    about = found["environment"]
    versions = [f"{name} {about[name]}" for name in NAMED if about.get(name)]
    gpus = f"{len(result['gpus'])} x {result['gpus'][0]}"
    counts = [item["verdict"] for item in result["items"]]
    parts = [
        f"# First hour on {gpus}",
        f"{about['cpu']}, {about['num_cores']} cores; driver {found['driver']}, "
        f"{', '.join(versions)}; at commit {result['commit']}. Made by:",
        "```text\n" + "\n".join(result["commands"]) + "\n```",
        "Of its items "
        + ", ".join(f"{counts.count(each)} {each}" for each in sorted(set(counts)))
        + ". What is expected is an estimate (arithmetic, and what others published), written down "
        "before anything was measured; a figure without one is noted.",
        "\n".join(
            [
                "| item | figure | measured | expected (estimate) | because | |",
                "|---|---|---|---|---|---|",
                *(row for item in result["items"] for row in _rows(item)),
            ]
        ),
        "## Commands",
        "```text\n" + "\n".join(_commands(result["items"])) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _rows(item: dict[str, Any]) -> list[str]:
    name = f"{item['key']} {item['title']}"
    problems = [f"| {name} | | | | {why} | {_marked(item)} |" for why in item["problems"]]
    return problems + [
        f"| {name} | {each['name']} | {value(each)} | {each['expected']} | {each['why']} "
        f"| {_marked(each)} |"
        for each in item["figures"]
    ]


def _marked(judged: dict[str, Any]) -> str:
    """Format a verdict; those that need attention are bold."""
    verdict = judged["verdict"]
    return f"**{verdict}**" if verdict in ("differs", "failed") else verdict


def _commands(items: list[dict[str, Any]]) -> list[str]:
    return [
        f"{item['key']:<4} {each['seconds']:5.0f} s  code {each['code']}  {each['command']}"
        for item in items
        for each in item["commands"]
    ]
