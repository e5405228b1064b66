"""Hardware: the few numbers of a cluster that the cost model needs."""

from __future__ import annotations

from dataclasses import dataclass

THIS_CPU = "this CPU"


@dataclass(frozen=True)
class Link:
    """A link within or between nodes; b bytes take latency_s + b / bandwidth_bytes_per_s.

    Attributes:
        latency_s: seconds that a message takes whatever its size, at both ends and on the way.
        bandwidth_bytes_per_s: per direction.
        num_links: how many such links a rank (within a node) or a node (between nodes) has.
            Collectives of NCCL use all of them, a send uses one. Where it depends on how many
            ranks take part: pairs of that number, ascending, and the links.
        duplex: share of the rate that each direction has while both are busy, as acknowledgements
            travel against the data.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    num_links: int | tuple[tuple[int, int], ...] = 1
    duplex: float = 1.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one message over one link."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    def seconds_both_ways(self, num_bytes: float) -> float:
        """Return the seconds of one message each way at the same time."""
        return self.latency_s + num_bytes / (self.duplex * self.bandwidth_bytes_per_s)

    def links_of(self, participants: int) -> int:
        """Return how many links serve so many ranks of a node, or so many nodes."""
        if isinstance(self.num_links, int):
            return self.num_links
        return max(entry for entry in self.num_links if entry[0] <= max(2, participants))[1]

    def rate_of(self, participants: int) -> float:
        """Return the bytes per second of all the links that serve so many ranks or nodes."""
        return self.bandwidth_bytes_per_s * self.links_of(participants)


@dataclass(frozen=True)
class Range:
    """A value that may be any between `low` and `high`; `key` is dotted."""

    key: str
    low: float
    high: float


@dataclass(frozen=True)
class Device:
    """The processor of one rank, as far as an estimate of its compute needs it.

    Attributes:
        name: as torch reports it, or THIS_CPU, whose peak is asked of this machine.
        source: of the peaks.
        peak_flops_per_s: by precision: fp32, tf32, bf16, fp16.
        bandwidth_bytes_per_s: peak of its memory.
        compute_efficiency: share of the peak that matrix products and convolutions reach.
        memory_efficiency: share of the bandwidth that other operations reach.
        op_s: time of an operation, whatever its size: its launch.
        cache_bytes: an operation that moves less finds it all in a cache, at
        `cache_bytes_per_s`; 0: no cache is considered.
        op_efficiency: factors on `compute_efficiency` for the products of single operations, by
            torch's name.
        op_rates: bytes per second of single operations, that neither memory nor products bound.
        num_threads: threads of a rank on CPU cores that ranks share; None: a device of its own.
    """

    name: str
    source: str = ""
    peak_flops_per_s: tuple[tuple[str, float], ...] = ()
    bandwidth_bytes_per_s: float = 0.0
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.7
    op_s: float = 0.0
    cache_bytes: float = 0.0
    cache_bytes_per_s: float = 0.0
    op_efficiency: tuple[tuple[str, float], ...] = ()
    op_rates: tuple[tuple[str, float], ...] = ()
    num_threads: int | None = None


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
        codec_rates: of single exchanges, by class name; fits find them, because passes
            over memory say nothing of random access, sorting or matrix products.
        codec_s: fixed time of each call of a codec, such as a kernel's launch.
        reduce_bytes_per_s: rate at which ranks add what has arrived, while the links wait.
            None: no time.
        contention: compute takes 1 + contention times as long while an exchange is under way.
        overhead_s: time of a step besides forward, backward, exchange and update.
        overhead_s_per_rank: what each rank of a node beyond the first adds to that, where one
            process drives all GPUs of a node in turn.
        update_bytes_per_s: rate at which the optimizer reads and writes memory. None: no time,
            because the profile's layers or `overhead_s` include it.
        input_samples_per_s: rate at which a node prepares samples, beside the training. None: any.
        burst_s: seconds of its rate that a link saves up while it is idle, as a token bucket does.
        jitter: standard deviation of a rank's compute time from step to step, relative.
        num_slow, slow_factor: so many ranks take `slow_factor` times as long to compute; a run of
            one rank has none of them.
        node_rates: bytes per second of each node's link, where they differ; empty: as `inter`.
        protocols: that NCCL may choose from, keys of lab.simulate.network.PROTOCOLS.
        num_cores: cores that ranks share where they are emulated on one machine; codecs, messages
            and the update then take (ranks per core) times as long. None: every rank has its own.
        crowding: codecs and the update take 1 + crowding times as long once all `num_cores` work,
            because they share caches, memory and perhaps the units of one core.
        memory_bytes: memory of a rank's device. None: unknown.
        device: a rank's processor; None: estimates are refused, because nothing is known of it.
        assumed: ranges of the values that have no source.
    """

    name: str
    source: str
    library: str
    ranks_per_node: int
    intra: Link | None
    inter: Link | None
    codec_bytes_per_s: float
    codec_rates: tuple[tuple[str, float], ...] = ()
    codec_s: float = 0.0
    reduce_bytes_per_s: float | None = None
    contention: float = 0.0
    overhead_s: float = 0.0
    overhead_s_per_rank: float = 0.0
    update_bytes_per_s: float | None = None
    input_samples_per_s: float | None = None
    burst_s: float = 0.0
    jitter: float = 0.0
    num_slow: int = 0
    slow_factor: float = 1.0
    node_rates: tuple[float, ...] = ()
    protocols: tuple[str, ...] = ("LL", "Simple")
    num_cores: int | None = None
    crowding: float | None = None
    memory_bytes: float | None = None
    device: Device | None = None
    assumed: tuple[Range, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """True if ranks compute on GPUs."""
        return self.library == "nccl"

    def codec_rate(self, exchange: str) -> float:
        """Return the bytes per second of an exchange's codec, by its class name."""
        return dict(self.codec_rates).get(exchange, self.codec_bytes_per_s)

    def host_factor(self, num_ranks: int) -> float:
        """Return the factor by which shared cores slow the host's own work."""
        if not self.num_cores or num_ranks == 1:
            return 1.0
        busy = min(1.0, num_ranks / self.num_cores)
        return max(1.0, num_ranks / self.num_cores) * (1 + busy * (self.crowding or 0.0))

    def compute_factor(self, num_ranks: int, num_threads: int | None) -> float:
        """Return the factor by which ranks slow each other that compute on shared cores.

        Args:
            num_threads: of one rank; None: each has a device of its own.
        """
        if num_threads is None or num_ranks == 1:
            return 1.0
        return self.host_factor(num_ranks * num_threads)
