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
    studies = [contents_of(path, f"s{at}-") for at, path in enumerate(folders, start=1)]
    names = [each.study.folder.name for each in studies] or [path.stem for path in paths]
    compared = compare(*studies[:2]) if len(studies) > 1 else None
    benched = [_benched(path) for path in results]
    for study, folder in zip(studies, folders, strict=True):
        benched += _benched_in(folder, study.left_out)
    return Parts(" and ".join(names), command, studies, benched, compared)


def _benched_in(folder: Path, left_out: list[str]) -> Iterator[Benched]:
    """Read the results of lab.bench among a study's files; say which of them are damaged."""
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_json(path)
            if isinstance(result, dict) and "bench" in result:
                yield _benched(path)
        except (ValueError, OSError) as why:
            left_out.append(str(why))


def _benched(path: Path) -> Benched:
    from lab.web.benched import read_benched  # imports matplotlib

    return read_benched(path)
