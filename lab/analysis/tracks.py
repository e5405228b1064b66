"""The tracks of a timeline: per rank one of computation, and of transfers as many as overlap."""

from __future__ import annotations

from collections import defaultdict

from lab.analysis.step_parts import PHASE_LOOKS
from lab.draw.looks import ORANGE
from lab.measure.spans import Span
from lab.record.trace import lanes

COMPUTE, LAYER, TRANSFER, CODEC = "compute", "layer", "exchange", "codec"


NAMES = {
    "data": "Data",
    "forward": "Forward",
    "backward": "Backward",
    LAYER: "Layer",
    "wait": "Waits",
    "optimizer": "Update",
    TRANSFER: "Transfer",
    CODEC: "Encode, decode",
}


COLOURS = {
    "data": PHASE_LOOKS["data"],
    "forward": PHASE_LOOKS["forward"],
    "backward": PHASE_LOOKS["backward"],
    LAYER: "#F0E442",  # the yellow of Okabe and Ito, which stands out on blue
    "wait": "white",
    "optimizer": PHASE_LOOKS["update"],
    TRANSFER: PHASE_LOOKS["exchange"],
    CODEC: ORANGE,
}


ON_ONE_LINE = ("data", "forward", "backward", "wait", "optimizer")


Track = tuple[int, str, int]  # rank, compute or exchange, lane


def tracks_of(spans: list[Span]) -> list[tuple[Span, Track]]:
    """Assign spans to tracks; computation never overlaps itself. Pieces have none."""
    transfers = lanes(span for span in spans if span.row == TRANSFER)
    return [
        *((span, (span.rank, COMPUTE, 0)) for span in spans if span.row in ON_ONE_LINE),
        *((span, (span.rank, TRANSFER, lane)) for span, lane in transfers),
    ]


def pieces_of(spans: list[Span], placed: list[tuple[Span, Track]]) -> list[tuple[Span, Track]]:
    """Assign layers to the computation, and codec spans to the transfers they are pieces of."""
    transfers = defaultdict[tuple[int, str], list[tuple[Span, Track]]](list)
    for span, track in placed:
        if span.row == TRANSFER:
            transfers[span.rank, span.name].append((span, track))
    layers = [(span, (span.rank, COMPUTE, 0)) for span in spans if span.row == LAYER]
    return layers + [
        (piece, track)
        for piece in spans
        if piece.row == CODEC
        for span, track in transfers[piece.rank, piece.name]
        if span.start_s <= piece.start_s <= span.end_s
    ]
