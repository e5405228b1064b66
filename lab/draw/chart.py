"""Charts in one style: the looks of strategies, and Vega-Lite by Altair for files and pages.

What draws is imported at its first use. So a machine without Altair, vl-convert and Pillow can
measure, and another one draws its results.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lab.draw.text import sentence
from lab.settings.storage import write_atomically

if TYPE_CHECKING:
    import altair as alt
    import vl_convert
    from PIL import Image
else:

    class _Later:
        """A module that is imported when one of its names is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._name), name)

    alt, vl_convert, Image = map(_Later, ("altair", "vl_convert", "PIL.Image"))

# Okabe and Ito, "Color Universal Design", 2008; without its yellow, which is lost on white.
BLACK, BLUE, GREEN, ORANGE = "#000000", "#0072B2", "#009E73", "#E69F00"
VERMILLION, PURPLE, SKY, BROWN = "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31"
# Three of Paul Tol's muted scheme, which stand apart from those for colour-blind readers too.
TEAL, WINE, INDIGO = "#44AA99", "#882255", "#332288"
COLOURS = (BLUE, GREEN, ORANGE, VERMILLION, PURPLE, SKY, BLACK)
LineStyle = Literal["-", "--", ":", "-."]
LINES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")
INK, PALE_INK, GRID, GREY = "#1a1a1a", "#5c5c5c", "#e3e3e3", "#767676"
VL_VERSION = "6.4"  # of Vega-Lite, Altair's, and one of those that vl-convert has
FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
SCALE, PAPER_PPI = 2.0, 300  # pixels of a PNG for one of the chart, and for an inch of paper
WIDTH = 920  # pixels of a chart that fits its panels into a width
PAPER_PT = 7  # of a label in a paper, whose figures are not scaled: legible there
TITLE_PX, SUBTITLE_PX, LABEL_PX = 16, 12, 11
ROOT = re.compile(r'<svg[^>]*? width="([\d.]+)" height="([\d.]+)" viewBox="[^"]*"')
LETTER = 0.54  # mean width of a letter, of its height
FORMATS = ("png", "svg", "pdf")
CLIP = re.compile(r"(?<=\bid=\")clip\d+(?=\")|(?<=url\(#)clip\d+(?=\))")
DASHES: dict[str, list[float]] = {"-": [1, 0], "--": [6, 3], ":": [2, 2.5], "-.": [7, 2, 2, 2]}
CONFIG: dict[str, Any] = {
    "background": "white",
    "font": FONT,
    "padding": 12,
    "view": {"stroke": None},
    "axis": {
        **{"labelColor": INK, "titleColor": INK, "domainColor": GREY, "tickColor": GREY},
        **{"gridColor": GRID, "labelFontSize": LABEL_PX, "titleFontSize": 12},
        **{
            "titleFontWeight": "normal",
            "labelOverlap": True,
            "labelSeparation": 6,
            "labelLimit": 480,
        },
    },
    "legend": {
        **{"labelColor": INK, "titleColor": INK, "labelFontSize": LABEL_PX, "labelLimit": 560},
        **{"symbolLimit": 0, "title": None, "orient": "bottom", "columns": 4},
    },
    "header": {"labelColor": INK, "labelFontSize": 12, "title": None},
    "title": {
        **{"anchor": "start", "fontSize": TITLE_PX, "color": INK, "subtitleColor": PALE_INK},
        **{"subtitleFontSize": SUBTITLE_PX, "offset": 14, "frame": "bounds"},
    },
}


@dataclass(frozen=True)
class Look:
    """The style of a series: a hex colour, a line as '-' or ':', and a marker as 'o' or '^'."""

    colour: str
    line: LineStyle
    marker: str


# Strategies in reading order. No two share both colour and line.
LOOKS: dict[str, Look] = {
    "none": Look(BLACK, "-", "o"),
    "allreduce": Look(BLUE, "-", "s"),
    "tree": Look(GREEN, "-", "^"),
    "tree_pipelined": Look(GREEN, ":", "^"),
    "tree_double": Look(GREEN, "-.", "v"),
    "ring": Look(SKY, "-", "D"),
    "star": Look(SKY, "--", "v"),
    "tree_overlap": Look(ORANGE, "-.", "^"),
    "overlap": Look(ORANGE, "-", "P"),
    "priority": Look(TEAL, ":", "P"),
    "layerwise": Look(ORANGE, "--", "<"),
    "bf16": Look(BLUE, "--", "X"),
    "fp16": Look(BLUE, ":", "x"),
    "int8": Look(BLUE, "-.", "8"),
    "int4": Look(GREY, "-.", "8"),
    "onebit": Look(VERMILLION, "-", "*"),
    "signsgd_ef": Look(VERMILLION, "--", "+"),
    "topk": Look(BROWN, "-", "p"),
    "randomk": Look(BROWN, "--", "h"),
    "powersgd": Look(PURPLE, "-.", "D"),
    "hierarchical": Look(TEAL, "-", "P"),
    "hierarchical_onebit": Look(TEAL, "--", "*"),
    "onebit_adam": Look(WINE, "-", "*"),
    "zero_one_adam": Look(WINE, ":", "*"),
    "onebit_lamb": Look(WINE, "-.", "*"),
    "muon": Look(WINE, "--", "P"),
    "dion": Look(INDIGO, "-", "D"),
    "auto": Look(BLACK, "--", "*"),
    "schedule": Look(GREY, ":", "*"),
    "fc1x1": Look(PURPLE, "-", "p"),
    "fc1x1_onebit": Look(PURPLE, "--", "h"),
    "local_sgd": Look(SKY, ":", ">"),
    "diloco": Look(VERMILLION, ":", "H"),
    "streaming_diloco": Look(GREY, "-", "H"),
    "des_loc": Look(GREY, "--", ">"),
    "zero1": Look(PURPLE, ":", "P"),
    "fsdp": Look(BROWN, "-.", "X"),
    "hsdp": Look(BLACK, "-.", "X"),
    "zeropp": Look(TEAL, "-.", "X"),
    "ddp": Look(GREEN, "--", "d"),
    "horovod": Look(BLACK, ":", "d"),
    "caffe": Look(BROWN, ":", "^"),
    "torch7": Look(SKY, "-.", "v"),
    "cntk": Look(VERMILLION, "-.", "*"),
    "tensorflow": Look(ORANGE, ":", "<"),
}


def order(series: str) -> tuple[int, list[str | int]]:
    """Return a sort key: strategies in the order of LOOKS, then others; numbers by value."""
    names, strategy = list(LOOKS), series.split(" ")[0]
    place = names.index(strategy) if strategy in LOOKS else len(names)
    return place, [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", series)]


def looks_of(series: Iterable[str]) -> dict[str, Look]:
    """Assign a look to each series of a study, all different while there are enough.

    A known strategy keeps its look. If a setting or a machine splits it into several series, the
    first keeps it, and beside other strategies the rest keep its colour and marker, with other
    lines, as long as there are any. All others take looks that the study does not use.
    """
    ordered = sorted(set(series), key=order)
    known: dict[str, Look] = {}
    for name in ordered:
        look = LOOKS.get(name.split(" ")[0])
        if look and look not in known.values():
            known[name] = look
    taken = {(look.colour, look.line) for look in known.values()}
    beside = len({name.split(" ")[0] for name in ordered}) > 1
    for name in ordered:
        look = LOOKS.get(name.split(" ")[0])
        if look and name not in known and beside:
            other: LineStyle | None
            other = next((each for each in LINES if (look.colour, each) not in taken), None)
            if other:
                known[name] = Look(look.colour, other, look.marker)
                taken.add((look.colour, other))
    pairs: list[tuple[str, LineStyle]] = [(c, line) for line in LINES for c in COLOURS]
    free = [pair for pair in pairs if pair not in taken] or pairs
    spare = (
        Look(colour, line, m)
        for (colour, line), m in zip(itertools.cycle(free), itertools.cycle("osD^vP"), strict=False)
    )
    return {name: known[name] if name in known else next(spare) for name in ordered}


@dataclass(frozen=True)
class Chart:
    """A chart, its message, and how to read it.

    Attributes:
        name: of its files, and on a page.
        message: what it shows, in a line: the title.
        about: what is drawn, and of which runs: lines below the title.
        body: the chart itself, with its data.
        width: pixels of its panels together, for lines of text.
        notes: more lines, which charts of one study share: a page says them once.
    """

    name: str
    message: str
    about: Sequence[str]
    body: Any
    width: int
    notes: Sequence[str] = ()

    @property
    def sentences(self) -> list[str]:
        """The lines below the title."""
        return [*map(sentence, (*self.about, *self.notes))]

    @property
    def caption(self) -> str:
        """Message and notes as sentences."""
        texts = (self.message, *self.sentences)
        return " ".join(f"{text.rstrip('.')}." for text in texts)

    def with_title(self) -> Any:
        """Return the chart of Altair with its title, which notebooks show."""
        wrapped = [line for text in self.sentences for line in wrap(text, self.width, SUBTITLE_PX)]
        title = alt.TitleParams(text=wrap(self.message, self.width, TITLE_PX), subtitle=wrapped)
        return self.body.properties(title=title).configure(**CONFIG)

    def spec(self, title: bool = True) -> dict[str, Any]:
        """Return the specification, as JSON holds it."""
        chart = self.with_title() if title else self.body.configure(**CONFIG)
        return json.loads(chart.to_json())

    def write(
        self, stem: Path, formats: Sequence[str], width_in: float | None = None, title: bool = True
    ) -> list[Path]:
        """Draw the chart to files.

        Args:
            stem: of their paths, without a suffix.
            formats: of FORMATS.
            width_in: exact width in inches, of a chart made for `pixels_of` them; None: its own.

        Raises:
            OSError: a file cannot be written.
        """
        spec, paths = self.spec(title), [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
        for path, kind in zip(paths, formats, strict=True):
            content = drawn(spec, kind, width_in)
            write_atomically(path, lambda temporary, bytes_=content: temporary.write_bytes(bytes_))
        return paths


def drawn(spec: Mapping[str, Any], kind: str, width_in: float | None = None) -> bytes:
    """Draw a specification as a file of FORMATS; see `Chart.write`."""
    if width_in is None and kind == "png":
        return small(vl_convert.vegalite_to_png(dict(spec), VL_VERSION, scale=SCALE))
    if width_in is None and kind == "pdf":
        return vl_convert.vegalite_to_pdf(dict(spec), VL_VERSION)
    svg = vl_convert.vegalite_to_svg(dict(spec), VL_VERSION)
    if width_in is not None:
        svg = _sized(svg, width_in, "pt" if kind == "svg" else "")
    if kind == "png":
        return small(vl_convert.svg_to_png(svg, ppi=PAPER_PPI))
    if kind == "pdf":
        return vl_convert.svg_to_pdf(svg)
    # vl-convert counts these up from one chart to the next: files are to depend on data alone.
    numbers = {each: str(at) for at, each in enumerate(dict.fromkeys(CLIP.findall(svg)))}
    return CLIP.sub(lambda found: f"clip{numbers[found[0]]}", svg).encode()


def small(png: bytes) -> bytes:
    """Return a PNG of 256 colours, an eighth as large; a chart has few besides soft edges."""
    picture, made = Image.open(io.BytesIO(png)), io.BytesIO()
    few = picture.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    resolution: dict[str, Any] = {"dpi": picture.info["dpi"]} if "dpi" in picture.info else {}
    few.save(made, "PNG", optimize=True, **resolution)
    return made.getvalue()


def pixels_of(width_in: float | None) -> int:
    """Return the pixels to make a chart for, so that on paper its labels have PAPER_PT points."""
    return WIDTH if width_in is None else int(72 * width_in * LABEL_PX / PAPER_PT)


def _sized(svg: str, width_in: float, unit: str) -> str:
    """Give a picture its exact width: room on the right if it is narrow, smaller if it is wide."""

    def root(found: re.Match[str]) -> str:
        width, height = max(float(found[1]), pixels_of(width_in)), float(found[2])
        points = 72 * width_in
        size = f'width="{points:g}{unit}" height="{points * height / width:g}{unit}"'
        view = f'viewBox="0 0 {width:g} {height:g}"'
        return f"{found[0].partition(' width=')[0]} {size} {view}"

    return ROOT.sub(root, svg, count=1)


def wrap(text: str, width: int, size: int) -> list[str]:
    """Break a text into lines of at most `width` pixels, of letters of `size` pixels."""
    return textwrap.wrap(text, max(20, int(width / (LETTER * size)))) or [""]


def look_of_series(looks: Mapping[str, Look], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the encodings that tell series apart: colour and dashes, without a legend.

    Args:
        looks: by series. labels: text of each in the chart's data, in its column `series`.
    """
    names = [labels[name] for name in looks]
    colours = alt.Scale(domain=names, range=[look.colour for look in looks.values()])
    dashes = alt.Scale(domain=names, range=[DASHES[look.line] for look in looks.values()])
    return {
        "color": alt.Color("series:N", scale=colours, legend=None, sort=names),
        "strokeDash": alt.StrokeDash("series:N", scale=dashes, legend=None, sort=names),
    }


def spread(
    places: Sequence[float], gap: float, most: float = math.inf, least: float = -math.inf
) -> list[float]:
    """Move places apart, each as little as possible, so that neighbours are `gap` from each other.

    Labels at the ends of lines are put there: the order stays, and groups stay around their mean,
    but none lies beyond `most`, nor below `least` unless there is no other room.
    """
    order = sorted(range(len(places)), key=lambda at: places[at])
    groups: list[tuple[float, list[int]]] = []  # mean of their places, and who they are
    for at in order:
        groups.append((places[at], [at]))
        while len(groups) > 1:
            (below, low), (above, high) = groups[-2:]
            both = [*low, *high]
            if above - below >= len(both) / 2 * gap:
                break
            groups[-2:] = [(sum(places[each] for each in both) / len(both), both)]
    moved = [0.0] * len(places)
    for middle, members in groups:
        for rank, at in enumerate(members):
            moved[at] = middle + (rank - (len(members) - 1) / 2) * gap
    for rank, at in enumerate(order):
        moved[at] = max(moved[at], least + rank * gap)
    for rank, at in enumerate(reversed(order)):
        moved[at] = min(moved[at], most - rank * gap)
    return moved
