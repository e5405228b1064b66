"""Counts of callgrind: of a loop whose loads and stores are known, and of files that are wrong."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lab.device import callgrind
from lab.device.callgrind import Counts

COPIED = 400_000
LOOP = f"""
static volatile long from[{COPIED}], to[{COPIED}];
int main(void) {{
    begin();
    for (long i = 0; i < {COPIED}; i++) to[i] = from[i];
    end();
    return 0;
}}
"""
COUNTED = """\
version: 1
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw
fn=(0) f
0 90 30 20 1 8 7 1 6 5
totals: 90 30 20 1 8 7 1 6 5
"""
needs_valgrind = pytest.mark.skipif(
    not (shutil.which("valgrind") and shutil.which("cc")), reason="needs valgrind and a C compiler"
)


@needs_valgrind
def test_a_loop_with_known_loads_and_stores_is_counted_right(tmp_path: Path) -> None:
    source, program = tmp_path / "loop.c", tmp_path / "loop"
    source.write_text(callgrind.MARKS + LOOP)
    subprocess.run(["cc", "-O1", "-o", program, source], check=True)
    callgrind.run([str(program)], tmp_path / "counts", "32768,8,64", "1048576,16,64")
    counts = callgrind.read(tmp_path / "counts.1")
    assert counts.loads == pytest.approx(COPIED, rel=0.01)
    assert counts.stores == pytest.approx(COPIED, rel=0.01)
    # Eight values share a line, and 3.2 MB fit into neither cache.
    assert counts.l1_load_misses == pytest.approx(COPIED / 8, rel=0.01)
    assert counts.l2_load_misses == pytest.approx(COPIED / 8, rel=0.01)
    assert counts.instructions >= 3 * COPIED


def test_totals_are_read_by_the_names_of_their_events(tmp_path: Path) -> None:
    path = tmp_path / "counts.1"
    path.write_text(COUNTED)
    counts = callgrind.read(path)
    assert counts == Counts(90, 30, 20, 8, 7, 6, 5)
    assert counts.less(Counts(10, 40, 0, 0, 0, 0, 0)) == Counts(80, 0, 20, 8, 7, 6, 5)


@pytest.mark.parametrize("text", ["", "events: Ir\ntotals: 9\n", "events: Ir Dr Dw D1mr\n"])
def test_files_without_caches_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counts.1"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no file of callgrind with caches"):
        callgrind.read(path)


def test_wrong_caches_and_a_missing_valgrind_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"l2=8MB: must be BYTES,WAYS,LINE"):
        callgrind.command(["true"], tmp_path, "32768,8,64", "8MB")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="needs valgrind, which is not installed"):
        callgrind.command(["true"], tmp_path, "32768,8,64", "8388608,16,64")
