"""Records of schema 1, brought to the keys of the present one.

Schema 1 counted images, worded `emulation` as one sentence, and let a run that could not start
leave most keys out.
"""

from __future__ import annotations

import re
from typing import Any

RENAMED = {"images_per_s": "samples_per_s", "wall_images_per_s": "wall_samples_per_s"}
# Keys that every record has today, with what stands for "unknown" in an early or failed record.
UNNAMED: dict[str, Any] = {"study": "", "cell": "", "repeat": 0, "variant": {}}
IDENTITY: dict[str, Any] = {
    **{"strategy": "unknown", "scaling": "strong"},
    **{"world_size": 0, "batch_size": 0, "per_rank_batch_size": 0},
}
# How clauses of `emulation` were worded. Any other one described hosts.
CLAUSES = (
    (re.compile(r"share .*GPUs?$"), "shared_gpus"),
    (re.compile(r"share .*cores$"), "shared_cores"),
    (re.compile(r"^compute replayed from profile "), "replay"),
)


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """The keys of a record of schema 1 under their present names; those it left out stay out."""
    known = {RENAMED.get(k, k): value for k, value in record.items() if value is not None}
    known["unit"] = "image"
    known["emulation"] = _emulation(known.get("emulation", "none"))
    defaults = UNNAMED if known.get("status") == "done" else UNNAMED | IDENTITY
    return defaults | known


def _emulation(sentence: str) -> list[dict[str, str]]:
    clauses = sentence.split("; ") if sentence not in ("", "none") else []
    return [{"kind": _kind(clause), "detail": clause} for clause in clauses]


def _kind(clause: str) -> str:
    return next((kind for pattern, kind in CLAUSES if pattern.search(clause)), "hosts")
