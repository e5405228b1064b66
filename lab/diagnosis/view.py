"""Show a verdict and its evidence: as lines of text, and as a chart of where a step's time goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.charts import NothingToDraw
from lab.analysis.points import Place, Point, floor_text
from lab.analysis.results import load
from lab.diagnosis.evidence import Evidence, gather, gather_all
from lab.diagnosis.rules import Explanation, Remedy, judge, remedies, worded_phase
from lab.draw.chart import BLUE, GREY, LABEL_PX, LETTER, PURPLE, SKY, VERMILLION, WIDTH, Chart
from lab.draw.plots import bars
from lab.draw.text import short_text
from lab.measure.stragglers import Slow
from lab.record.schema import worded

MAX_REMEDIES = 3
LEAST_SHOWN = 0.005  # of a step, as a part of it
NO_TIME = 0.0005  # ms; less is written as 0.0
LOOK_AT = {
    "between": "logging, checkpoints and garbage collection on that rank",
    "input": "its disk, its decoding processes and the sizes of its samples",
    "exchange": "the load on its cores, which encode, and its codec's kernels",
}
LOOK_AT_DEVICE = "the clock, temperature and other users of its device, and the shapes of its batch"
PARTS = {  # of a step, and their colours
    **{"even compute": BLUE, "compute that did not shrink": SKY, "exposed exchange": VERMILLION},
    **{"waiting for data": GREY, "waiting for a slow rank": PURPLE, "all else": "#C8C8C8"},
}


def explained(path: Path) -> tuple[pd.DataFrame, str]:
    """Explain a run by its remedies, best first, or a study by the verdict of each point.

    Raises:
        ValueError, OSError: it cannot be read, or the run cannot be explained.
    """
    if (path / "record.json").is_file():
        results, name = load(path.resolve().parent), path.resolve().name
        cell = next((each for each in results.study.cells if each.name == name), None)
        if cell is None:
            raise ValueError(results.study.missing[name])
        evidence = gather(results, cell)
        verdict = judge(evidence)
        changes = remedies(evidence, verdict)
        rows = [{"change": one.text, "why": one.why, "saves_s": one.saves_s} for one in changes]
        frame = pd.DataFrame(rows, columns=["change", "why", "saves_s"])
        return frame, f"{headline(evidence, verdict)}\n\n{in_full(evidence, changes)}"
    results = load(path)
    found = [(each, judge(each)) for each in gather_all(results)]
    frame = pd.DataFrame(
        {
            **{"series": each.one.series, "world_size": each.one.world_size},
            **{"fixed_batch_size": each.one.fixed_batch_size, "verdict": verdict.name},
            "reason": reason(each, verdict),
        }
        for each, verdict in found
    )
    lines = [headline(each, verdict) for each, verdict in found]
    more = f"evidence and what to try: python -m lab.explain {path}/CELL"
    others = (
        f"predictions for settings that were not run: python -m lab.advise fit={path} hardware=..."
    )
    troubles = [f"{status}: {name}: {why}" for name, status, why in results.study.troubles]
    return frame, "\n".join([*lines, *troubles, "", more, others])


def headline(evidence: Evidence, verdict: Explanation) -> str:
    """Write the verdict in a line."""
    one = evidence.one
    batch = "batch" if one.scaling == "strong" else "batch per rank"
    run = f"{one.series} on {one.world_size} ranks, {batch} {one.fixed_batch_size}"
    return f"{run}: {verdict.name}: {reason(evidence, verdict)}"


def in_full(evidence: Evidence, changes: list[Remedy]) -> str:
    """Write all that follows the headline: evidence, changes to try, runs that would tell more."""
    sections = (_evidence_lines(evidence), _remedy_lines(changes), _unknown_lines(evidence))
    blocks = ["\n".join(f"  {name:<11} {text}" for name, text in lines) for lines in sections]
    return "\n\n".join(filter(None, blocks))


def best_remedies(
    e: Evidence, verdict: Explanation, points: Sequence[Point]
) -> list[tuple[str, str]]:
    """List changes to try and why, the largest saving first.

    Args:
        points: of the study; strategies that were measured in the same place need not be tried.
    """
    here = [p for p in points if (p.context, p.world_size) == (e.point.context, e.one.world_size)]
    measured = {f"strategy={point.strategy}" for point in here}
    rest = [one for one in remedies(e, verdict) if one.switch not in measured]
    rest.sort(key=lambda one: -one.saves_s if one.saves_s > 0 else 0.0)
    return [(one.text, _because(one, e)) for one in rest[:MAX_REMEDIES]]


def _because(one: Remedy, e: Evidence) -> str:
    if math.isnan(one.saves_s):
        return f"{one.why}."
    return f"{one.why}. It saves up to {_ms(one.saves_s)} of a step, {_share(one.saves_s, e)}."


def reason(e: Evidence, verdict: Explanation) -> str:
    """Say what takes the time, in a clause."""
    if not verdict.decided:
        return "exchange and compute cannot be separated yet"
    if not verdict.losses:
        if math.isnan(e.fixed_s):
            return "exchange, input and stragglers cost little; whether compute shrank is unknown"
        return "little time is lost; more ranks should help"
    return ", ".join(f"{_share(loss.seconds, e)} of the step {loss.what}" for loss in verdict.named)


Lines = Iterator[tuple[str, str]]


def _evidence_lines(e: Evidence) -> Lines:
    yield "step", f"{_ms(e.step_s)}{_speedup(e)}"
    if not math.isnan(e.one_s):
        yield "computing", f"{_ms(e.ideal_s)} ({_share(e.ideal_s, e)}) if compute is divided evenly"
    if not math.isnan(e.exposed_s):
        against = "" if math.isnan(e.ceiling_s) else f"; strategy=none takes {_ms(e.ceiling_s)}"
        ends = e.point.exposed_exchange_s.scaled(1e3)
        between = f", 95 % interval {_number(ends.lo)} to {_number(ends.hi)} ms"
        between = "" if math.isnan(ends.lo) else between
        text = (
            f"{_ms(e.exposed_s)} ({_share(e.exposed_s, e)}{between}) not hidden by compute{against}"
        )
        yield "exchange", text
    if not math.isnan(e.payload_bytes):
        yield "payload", _payload(e)
    if e.codec_s > 0:
        yield "codec", f"{_ms(e.codec_s)} on each rank to encode and decode"
    for slow in e.slow:
        yield "slow rank", _slow(slow, e)
        yield "look at", LOOK_AT.get(slow.phase, LOOK_AT_DEVICE)
    if not e.slow and e.straggler_s > 0:
        rest = f"rank {e.slowest_rank} works {_ms(e.straggler_s)} ({_share(e.straggler_s, e)})"
        yield "ranks", f"{rest} longer than the others"
    if not math.isnan(e.input_s):
        yield "input", f"{_ms(e.input_s)} ({_share(e.input_s, e)}) waiting for data"
    if not math.isnan(e.fixed_s):
        yield "fixed", f"{_ms(e.fixed_s)} ({_share(e.fixed_s, e)}) of compute that did not shrink"
    for line in e.one.record.idle:
        yield "no effect", line
    if floor := floor_text(e.noise_floor):
        yield "noise", floor
    if emulated := worded(e.one.record.emulation):
        yield "emulated", emulated


def _slow(slow: Slow, e: Evidence) -> str:
    often = "" if slow.share == 1 else f" in {100 * slow.share:.0f} % of the steps"
    return (
        f"rank {slow.rank} takes {_ms(slow.delay_s)} ({_share(slow.delay_s, e)}) longer than the "
        f"others {worded_phase(slow)}{often} (noise floor {_ms(slow.floor_s)})"
    )


def _speedup(e: Evidence) -> str:
    if math.isnan(e.one_s):
        return ""
    size = e.one.world_size
    speedup = size * e.ideal_s / e.step_s
    return f": {speedup:.2f} times as fast as one rank ({_ms(e.one_s)}); ideal is {size}"


def _payload(e: Evidence) -> str:
    messages = "1 message" if e.messages == 1 else f"{short_text(e.messages, 4)} messages"
    sent = f"{short_text(e.payload_bytes / 1e6, 4)} MB in {messages} from the busiest rank"
    if not (e.exposed_s > LEAST_SHOWN * e.step_s and e.payload_bytes > 0):
        return sent
    rate = short_text(e.payload_bytes / e.exposed_s / 1e6, 4)
    return f"{sent}: {rate} MB/s in the time that is not hidden"


def _remedy_lines(changes: list[Remedy]) -> Lines:
    for number, remedy in enumerate(changes[:MAX_REMEDIES]):
        saves = "" if math.isnan(remedy.saves_s) else f" (up to {_ms(remedy.saves_s)} less)"
        yield "or" if number else "try", f"{remedy.text}: {remedy.why}{saves}"


def _unknown_lines(e: Evidence) -> Lines:
    for unknown, command in e.to_run.items():
        yield "to see", f"{unknown}:\n{'':14}{command}"


def _ms(seconds: float) -> str:
    return f"{_number(1e3 * seconds)} ms"


def _number(ms: float) -> str:
    """Write milliseconds to a tenth, or two digits of less than one."""
    return short_text(ms, 2) if NO_TIME <= abs(ms) < 0.95 else f"{ms:z.1f}"


def _share(seconds: float, e: Evidence) -> str:
    return f"{100 * seconds / e.step_s:.0f} %"


def time_split(
    several: Sequence[Evidence], called: Mapping[Place, str], width: int = WIDTH
) -> Chart:
    """Chart the parts of a step of some points: a bar for each, the first one's on top.

    Args:
        called: short names of the points.

    Raises:
        NothingToDraw: no part of the first one's step is known.
    """
    first, parts = several[0], _parts(several[0])
    if [*parts] == ["all else"]:
        raise NothingToDraw(
            "where the time goes: there is no run on one rank, and none of strategy=none, "
            "to compare with"
        )
    names = [f"{called[e.point.place]}  N={e.one.world_size}" for e in several]
    room = LETTER * LABEL_PX * max(map(len, names))
    data: Any = pd.DataFrame(
        {"name": name, "part": part, "value": 1e3 * seconds, "text": _text(e) if at == 1 else ""}
        for name, e in zip(names, several, strict=True)
        for at, (part, seconds) in enumerate(reversed(_parts(e).items()), start=1)
    )
    used = {part: colour for part, colour in PARTS.items() if part in set(data["part"])}
    body, _ = bars(data, "step time (ms)", used, width=int(width - room))
    shares = {part: f"{100 * seconds / first.step_s:.0f} %" for part, seconds in parts.items()}
    told = [f"{share} {part}" for part, share in shares.items() if share != "0 %"]
    message = f"A step of {called[first.point.place]} is {', '.join(told)}"
    about = [
        '"Even compute" is at most the step time of one rank, divided by the number of ranks. The '
        "exposed exchange is the part of the exchange that compute does not hide."
    ]
    return Chart("time_split", message, about, body, width)


def _parts(e: Evidence) -> dict[str, float]:
    """Return the seconds of each part of a step that takes some, in the order of PARTS.

    They add up to the step: where ranks compute in less than their even share, this is the rest.
    """
    others = e.fixed_s, e.exposed_s, e.input_s, e.straggler_s
    lost_s = sum(each for each in others if each > 0)
    parts = min(e.ideal_s, e.step_s - lost_s), *others
    known = {name: s for name, s in zip(PARTS, parts, strict=False) if s > 0}
    rest_s = e.step_s - sum(known.values())
    return known | ({"all else": rest_s} if rest_s > LEAST_SHOWN * e.step_s else {})


def _text(e: Evidence) -> str:
    times = e.one.world_size * e.ideal_s / e.step_s
    speedup = "" if math.isnan(times) else f", {times:.2f} ×"
    return f"{short_text(1e3 * e.step_s)} ms{speedup}"
