"""The page: all of a study in one file, in which names of others stay text."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab.draw.chart import Chart
from lab.draw.plots import bars
from lab.measure.statistics import Interval
from lab.web.contents import compare, contents_of
from lab.web.elements import bundle, drawing, percent_text
from lab.web.page import parts_of, render
from tests.support.records import leave, make_record
from tests.support.studies import HOSTILE, make_study, name_by

RESULTS = Path(__file__).parents[3] / "docs/results/layers"


class Reader(HTMLParser):
    """Counts elements, and keeps attributes and the texts of scripts and of cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags = Counter[str]()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def page_of(*folders: Path) -> str:
    return render(parts_of(folders, "python -m lab.report made"))


def test_a_study_is_not_compared_with_itself(study: Path) -> None:
    with pytest.raises(ValueError, match="the same folder is given twice"):
        parts_of([study, study / ".." / study.name], "python -m lab.report")


def packed(read: Reader, name: str) -> dict[str, Any] | list[Any]:
    """Return the charts or the records that a page holds."""
    return json.loads(gzip.decompress(base64.b64decode(json.loads(read.scripts[0])[name])))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("studies") / "made")


@pytest.fixture(scope="module")
def page(study: Path) -> str:
    return page_of(study)


def test_the_same_records_give_the_same_bytes(study: Path, page: str) -> None:
    assert page_of(study) == page


def test_a_page_of_150_runs_is_small(page: str) -> None:
    assert len(bundle().encode()) < 1e6
    assert len(page.encode()) < 1.5e6


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [2, 67])  # 30 points of 34 runs, and 1005 points of one
def test_a_page_of_1000_runs_has_at_most_3_mb(tmp_path: Path, num_batches: int) -> None:
    batches = [64 * number for number in range(1, num_batches + 1)]
    page = page_of(make_study(tmp_path / "made", 1000, batches=batches))
    assert len(packed(Reader(page), "records")) >= 1000
    assert len(page.encode()) <= 3e6


def test_it_says_first_what_is_fastest_and_how_sure_that_is(page: str) -> None:
    (sentence,) = re.findall(r'<p class="verdict">([^<]*)', page)
    said = r"With onebit, 4 ranks train 3\.\d\d times as fast as one, and 1\.\d\d times as fast as "
    assert re.fullmatch(said + r"with allreduce\.", sentence)
    figures = dict(re.findall(r"<dt>([^<]*)</dt><dd><strong>([^<]*)</strong>", page))
    assert [*figures] == ["Best strategy", "Speedup on 4 ranks", "What limits it"]
    assert figures["Best strategy"] == "onebit"
    assert re.fullmatch(r"3\.\d\d\u2009×", figures["Speedup on 4 ranks"])
    first = page.index("<figure")
    assert page.index(sentence) < first < page.index("<table")


def test_every_point_has_a_line_and_every_record_is_inside(page: str) -> None:
    read = Reader(page)
    table = page.partition('<table id="s1-points">')[2].partition("</table>")[0]
    assert table.count("<tr>") == 1 + 5 * 3 * 2
    charts = packed(read, "charts")
    assert len(packed(read, "records")) == 150
    assert {name.rpartition("-")[2] for name in charts} >= {"speedup", "efficiency"}
    assert read.tags["svg"] >= len(charts)  # drawn without JavaScript


def test_what_is_damaged_is_named_and_all_else_is_shown_results_too(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "made")
    shutil.copy(RESULTS / "layers_alexnet.json", folder)
    (folder / "settings.json").write_text('{"other": "program"}')
    (folder / "none-n1-b64-r0/record.json").write_text("{")
    (folder / "overlap-n4-b128-r0/steps.parquet").write_bytes(b"PAR1 PAR1")
    (folder / "overlap-n4-b64-r0/timeline.json").write_text("[" * 100_000)
    (folder / "layers.json").write_text('{"bench": "layers"}')
    page = page_of(folder).partition("<script")[0]
    headings = re.findall(r"<h2[^>]*>([^<]*)", page)
    assert headings == ["Study made", "Benchmark layers: layers alexnet"]
    assert "data:image/svg+xml" in page
    assert page.partition('<table id="s1-points">')[2].partition("</table>")[0].count("<tr>") == 31
    for damaged in (
        "/record.json: not JSON",
        "/steps.parquet: not a table of steps",
        "/timeline.json: not JSON: nested too deeply",
        "/layers.json: not a result of lab.bench",
    ):
        assert damaged in page


def test_it_asks_for_nothing(page: str) -> None:
    read = Reader(page)
    links = [value for _, name, value in read.attributes if name in ("src", "href", "action")]
    assert not [link for link in links if not link.startswith(("data:", "#"))]
    (policy,) = (value for _, name, value in read.attributes if value.startswith("default-src"))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_its_policy_holds_hashes_that_look_like_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no paths to be hidden: the page would lose its style and its script."""
    monkeypatch.setattr("lab.web.page._hash", lambda _: "'sha256-/z6v/6wj/9JqS='")
    assert "style-src 'sha256-/z6v/6wj/9JqS='; " in page_of(RESULTS / "layers_alexnet.json")


def test_names_of_others_stay_text(tmp_path: Path) -> None:
    plain, hostile = (make_study(tmp_path / name) for name in ("plain", "hostile"))
    name_by(plain, [f"name {at}" for at in range(len(HOSTILE))])
    name_by(hostile, HOSTILE)
    expected, found = Reader(page_of(plain)), Reader(page_of(hostile))
    drawn = {"line", "text", "tspan", "path", "g"}  # long names have their place in another legend
    for tags in (found.tags, expected.tags):
        for each in drawn:
            del tags[each]
    assert found.tags == expected.tags
    names = {name for _, name, _ in found.attributes}
    pale = {"opacity"}  # of marks, which another legend may have
    assert names - pale == {name for _, name, _ in expected.attributes} - pale
    assert not [name for name in names if name.startswith("on")]
    assert len(packed(found, "records")) == 150


@pytest.mark.slow
def test_a_drawing_keeps_the_digits_of_its_texts() -> None:
    data = pd.DataFrame({"name": ["topk"], "part": "sent", "value": 1 / 3, "text": "0.00667 MB"})
    body, width = bars(data, "MB", {"sent": "#0072B2"})
    svg = drawing("one", Chart("payload", "message", [], body, width)).svg()
    assert ">0.00667 MB<" in svg and not re.search(r"\.\d{5}[^<>]*>", svg.replace(".00667", ""))


def test_a_difference_that_rounds_to_zero_has_no_minus() -> None:
    assert percent_text(Interval(0.9, 0.9999, 1.1)) == "+0.0 % [-10.0, +10.0]"


def test_two_studies_of_one_thing_do_not_differ(study: Path, tmp_path: Path) -> None:
    again = page_of(study, make_study(tmp_path / "again", seed=1))
    assert "again is not distinguishable at 30 points" in again
    better = page_of(study, make_study(tmp_path / "better", seed=1, faster=1.2))
    assert "better is faster at 20 points and is not distinguishable at 10 points" in better


def test_two_studies_tell_what_sets_them_apart_and_what_is_not_compared(tmp_path: Path) -> None:
    for name, lr, repeats in (("before", 0.1, 3), ("after", 0.2, 2)):
        for repeat in range(repeats):
            record = make_record("tree", 2, 0.1, repeat=repeat, settings={"optim.lr": lr})
            leave(tmp_path / name / str(repeat), record)
    leave(tmp_path / "before" / "alone", make_record("tree", 4, 0.1))
    found = compare(*(contents_of(tmp_path / name, name) for name in ("before", "after")))
    assert found.verdict == (
        "Both studies measured 1 point. Compared with before, after has too few repeats at 1 point."
    )
    assert found.notes == [
        "Not compared, because the other study lacks them: 1 point of before.",
        "The studies differ in optim.lr: 0.1 and 0.2.",
        "Noise floor of before: unknown; noise floor of after: unknown.",
    ]
    assert [row[4] for row in found.table.rows] == ["2"]  # pairs of repeats
