"""Assemble the page: one HTML file that asks for nothing and runs nothing but its own script.

It keeps from strangers what is not theirs: paths of a machine, a user's name, secrets.
"""

from __future__ import annotations

import base64
import getpass
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lab.analysis.records import refuse_same
from lab.settings.files import conf_dir
from lab.settings.secrets import HIDDEN, is_secret, without_secrets
from lab.settings.storage import read_json, write_text
from lab.settings.streams import CONTROL
from lab.web.contents import Contents, OtherStudy, compare, contents_of
from lab.web.elements import Benched, Drawing, bundle, order_of, read_benched
from lab.web.live import SweepProgress

ASSETS = Path(__file__).parent / "assets"
# What `clean` hides, and does not.
PATH = re.compile(r"(?<![\w./:<])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+,=-]+){2,}[/\\]?")
COMMON = {"root", "user", "admin", "ubuntu"}  # no one's name
WORDS = {"cell", "data", "lab", "loss", "rank", "step", "study", "test", "train", "training"}


@dataclass(frozen=True)
class Parts:
    """The parts of a page.

    Attributes:
        command: makes the page again.
        compared: how the second study differs from the first; None: there is one.
    """

    title: str
    command: str
    studies: Sequence[Contents]
    benched: Sequence[Benched]
    compared: OtherStudy | None


def parts_of(paths: Sequence[Path], command: str) -> Parts:
    """Read studies, folders of runs, and results of lab.bench, JSON files.

    Results that lie in a study's folder belong to it, and are read too.

    Raises:
        ValueError: one cannot be read, or a study is given twice.
        OSError: one cannot be read.
    """
    results = [path for path in paths if path.suffix == ".json"]
    folders = [path for path in paths if path not in results]
    refuse_same(folders)
    studies = [contents_of(path, f"s{at}-") for at, path in enumerate(folders, start=1)]
    names = [each.study.folder.name for each in studies] or [path.stem for path in paths]
    compared = compare(*studies[:2]) if len(studies) > 1 else None
    benched = [read_benched(path) for path in results]
    for study, folder in zip(studies, folders, strict=True):
        benched += _benched_in(folder, study.left_out)
    return Parts(" and ".join(names), command, studies, benched, compared)


def _benched_in(folder: Path, left_out: list[str]) -> Iterator[Benched]:
    """Read the results of lab.bench among a study's files; say which of them are damaged."""
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_json(path)
            if isinstance(result, dict) and "bench" in result:
                yield read_benched(path)
        except (ValueError, OSError) as why:
            left_out.append(str(why))


def render(parts: Parts, progress: SweepProgress | None = None) -> str:
    """Write the page.

    Scripts and styles are inside, and a Content-Security-Policy admits them alone, by their
    hashes. All texts are escaped where the template puts them (jinja2), and cleaned of what
    strangers should not read (`clean`).

    Args:
        progress: of the sweep whose page is served while it runs; such a page may ask its server.
    """
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["order"] = order_of
    charts = [
        replace(chart, spec=clean(chart.spec))
        for study in parts.studies
        for chart in study.drawings
    ]
    library, script = bundle(), (ASSETS / "page.js").read_text(encoding="utf-8")
    license_ = (ASSETS / "vega_license.txt").read_text(encoding="utf-8")
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        parts=parts,
        progress=progress,
        svgs={chart.name: Markup(chart.svg()) for chart in charts},
        data=_data(charts, parts.studies, library),
        license=Markup(license_),
        script=Markup(script),
        style=Markup(style),
        policy=Markup(_policy(library, script, style, "'self'" if progress else "'none'")),
    )


def write(page: str, path: Path) -> None:
    """Write a page. OSError: the file cannot be written."""
    write_text(path, page)


def _data(charts: Iterable[Drawing], studies: Iterable[Contents], library: str) -> Markup:
    """Write charts, records, and the script that draws, packed: a third as long."""
    records = [clean(record) for study in studies for record in study.records]
    texts = {
        "charts": _json({chart.name: chart.spec for chart in charts}),
        "library": library,
        "records": _json(records),
    }
    return Markup(_json({name: _packed(text) for name, text in texts.items()}))


def _packed(text: str) -> str:
    """Pack a text as browsers unpack it: gzip, in base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _policy(library: str, script: str, style: str, server: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            "img-src data:",
            f"script-src {_hash(library)} {_hash(script)}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            f"connect-src {server}",
            f"form-action {server}",
        ]
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _cleaned(value: object) -> object:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def clean(value: Any, name: str = "") -> Any:
    """Return a value of JSON without what a stranger should not read, in keys and texts too.

    Characters that control a terminal, or the direction of text, are replaced as well: they would
    let a name show as another.

    Args:
        name: the key of the value; a secret's value is hidden whatever it is.
    """
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(str(key)): clean(each, str(key)) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [clean(each, name) for each in value]
    return value


def clean_text(text: str) -> str:
    """Return a text without paths but their last part, secrets, the user's name and controls."""
    text = without_secrets(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
    text = PATH.sub(_last_part, text)
    user = _user()
    return re.sub(rf"\b{re.escape(user)}\b", HIDDEN, text) if user else text


def _last_part(path: re.Match[str]) -> str:
    parts = re.split(r"[/\\]", path.group().rstrip("/\\"))
    return f"{HIDDEN}/{parts[-1]}"


@cache
def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return ""
    # A page that hides its own words, such as a strategy's name, could not be read.
    words = COMMON | WORDS | {path.stem for path in conf_dir().rglob("*.yaml")}
    return "" if name in words or len(name) < 3 else name
