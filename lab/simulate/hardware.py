"""Hardware: the few numbers of a cluster that the cost model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIBRARIES = ("gloo", "nccl")
OPTIONAL = ("reduce_bytes_per_s",)
LEAST = {
    "codec_bytes_per_s": 1,
    "codec_s": 0,
    "reduce_bytes_per_s": 1,
    "contention": 0,
    "overhead_s": 0,
}
RENAMED = {"alpha_s": "latency_s", "beta_bytes_per_s": "bandwidth_bytes_per_s"}  # of a link


@dataclass(frozen=True)
class Link:
    """A link within or between nodes; b bytes take latency_s + b / bandwidth_bytes_per_s.

    Attributes:
        latency_s: seconds that a message takes whatever its size, at both ends and on the way.
        bandwidth_bytes_per_s: per direction; both directions at once are assumed to have it each.
        num_links: how many such links a rank (within a node) or a node (between nodes) has.
            Collectives of NCCL use all of them, a send uses one.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    num_links: int = 1

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one message over one link."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Hardware:
    """Nodes of several ranks, joined by a fabric.

    Attributes:
        name: as in conf/hardware.
        source: where the figures come from.
        library: whose all-reduce it is, and how exchanges overlap: gloo (on the
            computing thread, or a separate one) or nccl (on a stream).
        ranks_per_node: how many ranks `intra` joins.
        intra, inter: links within a node and between nodes; None where there are none.
        codec_bytes_per_s: rate at which a codec reads and writes a rank's memory.
        codec_s: fixed time of each call of a codec, such as a kernel's launch.
        reduce_bytes_per_s: rate at which Gloo's all-reduce adds what has arrived, while the links
            wait. None: no time.
        contention: compute takes 1 + contention times as long while an exchange is under way.
        overhead_s: time of a step besides forward, backward and exchange.
        num_cores: cores that ranks share where they are emulated on one machine; codecs then
            take (ranks per core) times as long. None: every rank has its own cores.
    """

    name: str
    source: str
    library: str
    ranks_per_node: int
    intra: Link | None
    inter: Link | None
    codec_bytes_per_s: float
    codec_s: float = 0.0
    reduce_bytes_per_s: float | None = None
    contention: float = 0.0
    overhead_s: float = 0.0
    num_cores: int | None = None

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Hardware:
        """Parse the content of a file of conf/hardware.

        Raises:
            ValueError: a value that is missing, unknown or out of range.
        """
        name = f"hardware={node.get('name')}"
        try:
            links = {way: node[way] and _link(name, way, node[way]) for way in ("intra", "inter")}
            hardware = cls(**{**node, **links})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
        if hardware.library not in LIBRARIES:
            allowed = ", ".join(LIBRARIES)
            raise ValueError(f"{name}: library={hardware.library}: allowed are {allowed}")
        for way, link in links.items():
            if link:
                _check(f"{name}: {way}.latency_s", link.latency_s, 0)
                _check(f"{name}: {way}.bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, 1)
                _check_count(f"{name}: {way}.num_links", link.num_links)
        for key, least in LEAST.items():
            if getattr(hardware, key) is not None or key not in OPTIONAL:
                _check(f"{name}: {key}", getattr(hardware, key), least)
        _check_count(f"{name}: ranks_per_node", hardware.ranks_per_node)
        if hardware.num_cores is not None:
            _check_count(f"{name}: num_cores", hardware.num_cores)
        if hardware.ranks_per_node > 1 and hardware.intra is None:
            raise ValueError(f"{name}: intra=null: must join the {hardware.ranks_per_node} ranks")
        return hardware

    def host_factor(self, num_ranks: int) -> float:
        """Return the factor by which shared cores slow the host's own work."""
        return max(1.0, num_ranks / self.num_cores) if self.num_cores else 1.0


def _check(key: str, value: object, least: float) -> None:
    if not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ValueError(f"{key}={value}: must be a number of at least {least}")


def _check_count(key: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value}: must be an integer of at least 1")


def _link(name: str, way: str, figures: Mapping[str, Any]) -> Link:
    for key in figures.keys() & RENAMED.keys():
        raise ValueError(f"{name}: {way}.{key}={figures[key]}: is {RENAMED[key]} now")
    return Link(**figures)
