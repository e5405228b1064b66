"""The report as a page: figures beside their bounds, tables of comparisons, all benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.present import chart_of, text_of
from lab.draw.text import markdown
from lab.gpu_report.items import LENGTHS, PRECISIONS, STRATEGIES, BoundedFigure
from lab.gpu_report.run import DONE, Report, written
from lab.settings.storage import write_text

NAMED = ("torch", "cuda", "cudnn", "nccl", "triton")  # of an environment
PRETENDED = (
    "**Pretended: a CPU ran this report at tiny sizes. No number here is from a GPU. The page "
    "only shows what a report looks like.**"
)
MODELS = ("alexnet", "resnet50", "vgg16", "gpt2")
Table = tuple[list[str], list[list[str]]]  # a header, and lines of its length


def write(path: Path, report: Report) -> list[str]:
    """Write the page and its figures, which lie in a folder of its name.

    Returns:
        Lines to print. Without the libraries that draw, there are no figures.

    Raises:
        OSError: a file cannot be written.
    """
    folder, pictures, missing = path.with_suffix(""), dict[str, list[Path]](), ""
    for key, entry in _done(report):
        try:
            pictures[key] = _drawn(folder, key, entry) if entry["draws"] else []
        except ImportError as error:
            command = f"python -m lab.gpu_report page={path.with_suffix('.json')}"
            missing = (
                f"without figures, because {error.name} is missing: {command} draws them on "
                "another machine"
            )
            break
    text = "\n\n".join(_parts(path, report, pictures, missing)) + "\n"
    write_text(path, text)
    return [f"wrote {path} and {path.with_suffix('.json')}", *([missing] if missing else [])]


def _done(report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, entry in report["items"].items():
        if entry["status"] == DONE:
            yield key, entry


def _drawn(folder: Path, key: str, entry: dict[str, Any]) -> list[Path]:
    paths = list[Path]()
    for number, result in enumerate(entry["result"]["benches"], start=1):
        if chart := chart_of(result):
            folder.mkdir(exist_ok=True)
            paths += chart.write(folder / (f"{key}_{number}" if number > 1 else key), ["png"])
    return paths


def _parts(
    path: Path, report: Report, pictures: dict[str, list[Path]], missing: str
) -> Iterator[str]:
    about, commit = report["environment"], report["git_commit"]["commit"]
    gpus = ", ".join(sorted(set(about["gpus"]))) or about["cpu"]
    yield f"# Fifteen minutes on {gpus}"
    if report["pretended"]:
        yield PRETENDED
    versions = [f"{name} {about[name]}" for name in NAMED if about.get(name)]
    driver = [f"driver {each['driver']}" for each in (about["host_gpus"] or [])[:1]]
    where = f"{about['cpu']}, {about['num_cores']} cores; {', '.join([*driver, *versions])}"
    yield f"{where}; at commit {commit}. Made by:"
    yield "```text\n" + "\n".join(report["commands"]) + "\n```"
    yield from _bounds(report)
    for title, table in TABLES.items():
        header, rows = table(report)
        if known := [row for row in rows if any(row[1:])]:
            yield f"## {title}{_mark(report)}"
            yield "\n".join(markdown(header, known))
    yield from _not_measured(report)
    yield "## All benchmarks" + (f"\n\nThis page is {missing}." if missing else "")
    for key, entry in _done(report):
        yield from _benches(path, key, entry, report, pictures.get(key, []))


def _mark(report: Report) -> str:
    return " (pretended)" if report["pretended"] else ""


def _bounds(report: Report) -> Iterator[str]:
    rows, verdicts = list[list[str]](), list[str]()
    for key, entry in _done(report):
        for figure in (BoundedFigure(**each) for each in entry["figures"]):
            verdict = figure.verdict
            verdicts += [verdict] if verdict else []
            shown = f"**{verdict}**" if verdict not in ("", "met") else verdict
            if figure.bound:
                value = written(figure, report["pretended"])
                rows.append([key, figure.name, value, figure.bound, shown])
    yield f"## Bounds\n\nOf the {len(verdicts)} bounds, {verdicts.count('met')} are met."
    if rows:
        yield "\n".join(markdown(["item", "figure", "measured", "bound", ""], rows))


def _not_measured(report: Report) -> Iterator[str]:
    rows = [
        [key, entry["status"], entry["line"].replace("|", "\\|")]
        for key, entry in report["items"].items()
        if entry["status"] != DONE
    ]
    if rows:
        yield "## What was not measured"
        yield "\n".join(markdown(["item", "", "why"], rows))


def _benches(
    path: Path, key: str, entry: dict[str, Any], report: Report, pictures: Sequence[Path]
) -> Iterator[str]:
    old = "" if entry["commit"] == report["git_commit"]["commit"] else f", at {entry['commit']}"
    yield f"### {key}{_mark(report)}\n\n{entry['about']}; {entry['seconds']:.0f} s{old}"
    for result in entry["result"]["benches"]:
        yield f"```text\n$ {result['command']}\n{text_of(result)}\n```"
    refused = entry["result"].get("refused", {})
    if refused:
        yield "\n".join(f"* {name}: {line}" for name, line in refused.items())
    yield from (f"![{key}]({each.relative_to(path.parent)})" for each in pictures)


def _found(report: Report, key: str) -> list[dict[str, Any]]:
    """Return the benchmarks of an item; none if it was not measured."""
    entry = dict(_done(report)).get(key)
    return entry["result"]["benches"] if entry else []


def _steps(report: Report) -> Table:
    """Return a row for each strategy, plain and as one graph: milliseconds of a step by model."""
    keys = [key.removeprefix("steps-") for key in report["items"] if key.startswith("steps-")]
    lines = list[list[str]]()
    for strategy in STRATEGIES:
        plain, graphs = [strategy], [f"{strategy}, graph"]
        for key in keys:
            of_steps = [row for found in _found(report, f"steps-{key}") for row in found["rows"]]
            plain.append(_ms({row["name"]: row for row in of_steps}.get(strategy)))
            ways = _found(report, f"graph-{key}")
            graphs.append(_ms({way["strategy"]: way["rows"][1] for way in ways}.get(strategy)))
        lines += [plain, graphs]
    return ["ms a step", *keys], lines


def _ms(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{1e3 * row['step_s']['median']:.3g}"


def _codecs(report: Report) -> Table:
    """Return a row for each codec and operation: shares of a copy's rate by length of rows."""
    lengths = sorted(LENGTHS)
    shares = dict[str, dict[int, str]]()
    for length in LENGTHS:
        for row in (row for found in _found(report, f"codecs-{length}") for row in found["rows"]):
            of_lengths = shares.setdefault(f"{row['codec']} {row['operation']}", {})
            of_lengths[length] = f"{row['of_bandwidth']['median']:.2f}"
    return ["share of a copy's rate", *(f"rows of {length}" for length in lengths)], [
        [name, *(of.get(length, "") for length in lengths)] for name, of in shares.items()
    ]


def _utilisations(report: Report) -> Table:
    """Return a row for each model: its share of the peak by precision, and compiled."""
    ways = [*PRECISIONS, "compiled"]
    return ["TFLOP/s (of the peak)", *PRECISIONS, "bf16, compiled"], [
        [model, *(_rate(_found(report, f"mfu-{model}-{way}")) for way in ways)] for model in MODELS
    ]


def _rate(benches: Sequence[dict[str, Any]]) -> str:
    row = benches[0]["rows"][0] if benches else {}
    share, rate = row.get("utilisation"), row.get("flops_per_s")
    of_peak = f" ({100 * share:.2g} %)" if share else ""
    return f"{1e-12 * rate:.3g}{of_peak}" if rate else ""


TABLES: dict[str, Callable[[Report], Table]] = {
    "Steps": _steps,
    "Codecs": _codecs,
    "Utilisation of the peak": _utilisations,
}
