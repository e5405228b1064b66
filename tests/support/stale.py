"""Pages of results whose code has changed since they were measured: `make stale` lists them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results"
# Pages, and the papers of each.
ALONE = ("tf_benchmarks", "tf_parameter_server", "tf_benchmarks_real", "horovod")
PREDICTED: dict[str, tuple[str, ...]] = {page: (page,) for page in ALONE}
PREDICTED["nvidia"] = ("nvidia_dle", "mlperf", "h100", "nccl_tests")
COMPUTED = ("mutants", "seeds", "gpu_kernels", "published")  # any machine can run them again
MEASURED = sorted({path.stem for path in RESULTS.glob("*.md")} - {*PREDICTED, *COMPUTED, "README"})
# A change here may change what was measured.
CODE = ("codec", "distributed", "exchange", "sync", "training", "cluster", "model/replay.py")


def commit_of(page: str) -> str | None:
    """Return the commit that the head of a page names; None if it names none."""
    head = (RESULTS / f"{page}.md").read_text().splitlines()[:9]
    found = re.search(r"at commits? `?([0-9a-f]{7,40})", "\n".join(head))
    return found and found[1]


def is_marked(page: str) -> bool:
    """Return whether a page's first line says that it is older than the code."""
    return "lder than the code" in (RESULTS / f"{page}.md").read_text().partition("\n")[0]


def main() -> None:
    """Print a line for each page that is older than the code, and whether it says so."""
    for page in MEASURED:
        paths = [f"lab/{part}" for part in CODE]
        since = ["git", "-C", str(ROOT), "diff", "--name-only", str(commit_of(page)), "HEAD", "--"]
        done = subprocess.run([*since, *paths], capture_output=True, text=True)
        if done.returncode or done.stdout:
            changed = f"{len(done.stdout.split())} files" if not done.returncode else "unknown"
            marked = "says so" if is_marked(page) else "does not say so"
            print(f"{page}.md at {commit_of(page)}: {changed} changed since; {marked}")


if __name__ == "__main__":
    main()
