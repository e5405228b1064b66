"""Records of schema 1, converted to the keys of the current one.

Schema 1 counted images, worded `emulation` as one sentence, and let a run that could not start
leave most keys out.
"""

from __future__ import annotations

import re
from typing import Any

RENAMED = {"images_per_s": "samples_per_s", "wall_images_per_s": "wall_samples_per_s"}
# Keys that every record has today, with the value for "unknown" in an early or failed record.
UNNAMED: dict[str, Any] = {"study": "", "cell": "", "repeat": 0, "variant": {}}
IDENTITY: dict[str, Any] = {
    **{"strategy": "unknown", "scaling": "strong"},
    **{"world_size": 0, "batch_size": 0, "per_rank_batch_size": 0},
}
# The former wording of `emulation` clauses. Any other clause described hosts.
CLAUSES = (
    (re.compile(r"share .*GPUs?$"), "shared_gpus"),
    (re.compile(r"share .*cores$"), "shared_cores"),
    (re.compile(r"^compute replayed from profile "), "replay"),
)


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of a schema 1 record to the current ones; missing keys stay missing."""
    known = {RENAMED.get(k, k): value for k, value in record.items() if value is not None}
    known["unit"] = "image"
    known["emulation"] = _emulation(known.get("emulation", "none"))
    defaults = UNNAMED if known.get("status") == "done" else UNNAMED | IDENTITY
    return defaults | known


def _emulation(sentence: object) -> list[dict[str, str]]:
    if not isinstance(sentence, str):
        raise ValueError(f"emulation={sentence!r:.80}; in a record of schema 1 must be str")
    clauses = sentence.split("; ") if sentence not in ("", "none") else []
    return [{"kind": _kind(clause), "detail": clause} for clause in clauses]


def _kind(clause: str) -> str:
    return next((kind for pattern, kind in CLAUSES if pattern.search(clause)), "hosts")
