"""Chunk sizes: one for all libraries, or one for each. Nothing here imports torch.

Libraries differ in the cost of a message: Gloo over loopback is fastest with small ones, while
under NCCL each one costs the host a group of transfers.
"""

from __future__ import annotations

from collections.abc import Mapping

LIBRARIES = ("gloo", "nccl")
LAG = 3  # ticks from a chunk's arrival until it may leave: see pipeline.run

ChunkMB = float | Mapping[str, float | None] | None  # in MiB (2**20 bytes); None: no chunks


def chunk_mb_over(chunk_mb: ChunkMB, backend: str) -> float | None:
    """Return the chunk size for `backend`; libraries other than NCCL have Gloo's."""
    if isinstance(chunk_mb, Mapping):
        return chunk_mb["nccl" if backend == "nccl" else "gloo"]
    return chunk_mb


def check_chunk_mb(chunk_mb: ChunkMB) -> None:
    """Check that chunks can have this size.

    Raises:
        ValueError: it is neither a number above 0, nor None, nor one of these for each library.
    """
    by_library = isinstance(chunk_mb, Mapping)
    sizes = list(chunk_mb.values()) if by_library else [chunk_mb]
    right = all(s is None or (isinstance(s, int | float) and s > 0) for s in sizes)
    if not right or (by_library and set(chunk_mb) != set(LIBRARIES)):
        raise ValueError(
            f"exchange.chunk_mb={chunk_mb}: must be a number above 0, or null, or one of these for "
            f"each of {' and '.join(LIBRARIES)}"
        )
