"""The studies and results that `lab.report` was asked to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.settings.reading import read_json
from lab.web.compared import compare
from lab.web.contents import contents_of
from lab.web.page import Parts

if TYPE_CHECKING:
    from lab.web.benched import Benched


def parts_of(paths: Sequence[Path], command: str) -> Parts:
    """Read studies, folders of runs, and results of lab.bench, JSON files.

    Results that lie in a study's folder belong to it, and are read too.

    Raises:
        ValueError: one cannot be read.
        OSError: likewise.
    """
    results = [path for path in paths if path.suffix == ".json"]
    folders = [path for path in paths if path not in results]
    inside = [path for folder in folders for path in _results_in(folder) if path not in results]
    studies = [contents_of(path, f"s{at}-") for at, path in enumerate(folders, start=1)]
    names = [each.study.folder.name for each in studies] or [path.stem for path in paths]
    compared = compare(*studies[:2]) if len(studies) > 1 else None
    return Parts(" and ".join(names), command, studies, _benched([*results, *inside]), compared)


def _benched(results: Sequence[Path]) -> list[Benched]:
    if not results:
        return []
    from lab.web.benched import read_benched  # imports matplotlib

    return [read_benched(path) for path in results]


def _results_in(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_json(path)
        except (OSError, ValueError):  # another program's file: a study may hold anything
            continue
        if isinstance(result, dict) and "bench" in result and "rows" in result:
            yield path
