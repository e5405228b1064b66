"""The commands of docs/tutorial.md, run in order; their output is written back into the page.

    python -m tests.support.tutorial

A block `sh` is a command and the block `text` below it is its output. A block `yaml` whose first
line is a comment with a file's name is that file. Blocks `bash` are not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorial.md"
CHART = "scaling.png"  # of the study, and below docs/tutorial/
STEP = re.compile(r"^```sh\n(.*?)\n```\n\n```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "…"
FIRST, LAST = 18, 3  # lines that the page shows of a long output


@dataclass(frozen=True)
class Step:
    """A command of the page.

    Attributes:
        line: as typed. shown: its output on the page.
        code: its exit code. out, err: its output now.
    """

    line: str
    shown: str
    code: int
    out: str
    err: str

    @property
    def excerpt(self) -> str:
        """Return the output now as the page shows it: without its middle, if it is long."""
        lines = [line.rstrip() for line in self.out.strip("\n").splitlines()]
        if len(lines) > FIRST + LAST + 1:
            lines = [*lines[:FIRST], LEFT_OUT, *lines[-LAST:]]
        return "\n".join(lines)


def run(folder: Path) -> Iterator[Step]:
    """Run the commands in `folder`, with the example's model and the files of the page in it."""
    page = PAGE.read_text()
    shutil.copy(ROOT / "examples/own_model/nets.py", folder)
    for name, text in FILE.findall(page):
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for line, shown in STEP.findall(page):
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True
        )
        out = done.stdout.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")
        yield Step(line, shown, done.returncode, out, done.stderr)


def main() -> int:
    """Run all commands, and write their output and the study's chart.

    Returns:
        0; 1 if a command failed, of which the error is printed, and nothing is written.
    """
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for step in run(Path(folder)):
            print(f"{step.code} {step.line}", flush=True)
            if step.code:
                print(step.err[-2000:])
                return 1
            block = f"```sh\n{step.line}\n```\n\n```text\n"
            text = text.replace(f"{block}{step.shown}\n```", f"{block}{step.excerpt}\n```")
        chart = Path(folder, "runs/mine/figures", CHART)
        shutil.copy(chart, PAGE.with_suffix("") / CHART)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
