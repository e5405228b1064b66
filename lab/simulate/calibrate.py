"""Hardware fitted to results of lab.bench: links to `collective`, codecs to `codec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.model.profile import VALUE_BYTES
from lab.settings.config import choices_of, load
from lab.settings.overrides import own_choices
from lab.settings.reading import read_json
from lab.simulate.costs import stages_of
from lab.simulate.fit import LINK, get, least_squares, with_values
from lab.simulate.hardware import Hardware
from lab.simulate.network import Network

CODEC = "onebit"  # codec_bytes_per_s is the rate of this codec


def calibrate(path: Path, preset: Hardware) -> Hardware:
    """Replace the preset's figures by those that a result of lab.bench contains.

    Raises:
        ValueError: the file is not a result about links or codecs. Values that were fitted before
            are none: rates of codecs hold for the costs of their time alone.
        OSError: the file cannot be read.
    """
    try:
        result = read_json(path)
        if "hardware" in result:
            raise ValueError(
                f"fit={path}: its hardware was fitted under the costs of its time; give the "
                "study that was measured, runs/STUDY, to fit it anew"
            )
        fit = {"collective": _links, "codec": _codec}[result["bench"]]
        return fit(result, preset)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"fit={path}: must be a study, or a result of lab.bench collective or codec: "
            f"{type(error).__name__}: {error}"
        ) from None


def _links(result: Mapping[str, Any], preset: Hardware) -> Hardware:
    """Fit latency and bandwidth of the links to collectives of all sizes.

    Least squares of the logarithm of predicted / measured, because sizes span orders of magnitude.
    """
    known = [row for row in result["rows"] if row["algorithm"] in choices_of("exchange")]
    exchanges = {row["algorithm"]: _exchange(row["algorithm"]) for row in known}
    measured = np.log([row["time_s"]["median"] for row in known])

    def residuals(x: np.ndarray) -> np.ndarray:
        network = Network(with_values(preset, LINK, np.exp(x)), result["world_size"])
        predicted = [
            sum(
                stage.seconds
                for stage in stages_of(
                    [tuple(row.get("shape", (row["size_bytes"] // VALUE_BYTES,)))],
                    exchanges[row["algorithm"]],
                    network,
                )
            )
            for row in known
        ]
        return np.log(predicted) - measured

    start = np.log([get(preset, name) or 1e-4 for name in LINK])
    return with_values(preset, LINK, np.exp(least_squares(residuals, start).x))


def _codec(result: Mapping[str, Any], preset: Hardware) -> Hardware:
    """Set codec_bytes_per_s: bytes of memory that encoding and decoding move, over their time."""
    rows = [row for row in result["rows"] if row["codec"] == CODEC]
    rate = sum(row["bytes"] for row in rows) / sum(row["time_s"]["median"] for row in rows)
    return replace(preset, codec_bytes_per_s=rate)


def _exchange(choice: str) -> Mapping[str, Any]:
    return load(own_choices([f"exchange={choice}"])).exchange
