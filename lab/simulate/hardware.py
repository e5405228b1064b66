"""Hardware: the few numbers of a cluster that the cost model needs, and files of conf/hardware."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from lab.measure.peaks import gpu_peak
from lab.settings import checks
from lab.settings.checks import AtLeast0, AtLeast1, Count, Flag, made
from lab.simulate.collectives import Curve
from lab.simulate.nccl import GENERATIONS

THIS_CPU = "this CPU"
DRAWS = 39  # the lowest and the highest of so many enclose 95 %
HERE = "here"  # num_cores: those that this process may use
LIBRARIES = ("gloo", "nccl")
NOT_OF_A_FILE = ("learned", "measured", "fitted")
CODEC_RATES = "codec_rates"
WHOLE = ("ranks_per_node", "num_links", "num_cores", "num_slow")  # known, in any range
LINK = ("latency_s", "bandwidth_bytes_per_s")  # what a fit finds of a link
RENAMED = {"alpha_s": "latency_s", "beta_bytes_per_s": "bandwidth_bytes_per_s"}  # of a link
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
MAPPINGS = {"peak_flops_per_s": 1.0, "op_efficiency": 1e-3, "op_rates": 1.0}  # least values
CONVOLUTIONS = ("convolution", "convolution_backward")

Seconds = Annotated[float, partial(checks.number, at_least=0, at_most=1e6)]
Share = Annotated[float, partial(checks.number, at_least=0, at_most=1000)]
Efficiency = Annotated[float, partial(checks.number, at_least=1e-3)]
Duplex = Annotated[float, partial(checks.number, at_least=0.1, at_most=1)]


@dataclass(frozen=True)
class Protocol:
    """A way in which NCCL's kernels hand data on.

    Attributes:
        launch_s: seconds before the first hop.
        hop: a hop's latency, as a share of that under Simple.
        ring_share, tree_share: what remains of the links' rate.
    """

    launch_s: float
    hop: float
    ring_share: float
    tree_share: float


PROTOCOLS = {
    "LL": Protocol(6.6e-6, 0.2, 1 / 4, 0.92 / 3.8),
    "LL128": Protocol(14.0e-6, 0.5, 0.92, 0.92 * 120 / 128),
    "Simple": Protocol(8.4e-6, 1.0, 1.0, 0.92),
}


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

    latency_s: Seconds
    bandwidth_bytes_per_s: AtLeast1
    num_links: int | tuple[tuple[int, int], ...] = 1
    duplex: Duplex = 1.0

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
            torch's name, of one precision (`tf32`), or of both (`tf32.convolution`, which counts
            instead of `convolution`).
        op_rates: bytes per second of single operations, that neither memory nor products bound.
        num_threads: threads of a rank on CPU cores that ranks share; None: a device of its own.
    """

    name: str
    source: str = ""
    peak_flops_per_s: tuple[tuple[str, float], ...] = ()
    bandwidth_bytes_per_s: AtLeast0 = 0.0
    compute_efficiency: Efficiency = 0.5
    memory_efficiency: Efficiency = 0.7
    op_s: Seconds = 0.0
    cache_bytes: AtLeast0 = 0.0
    cache_bytes_per_s: AtLeast0 = 0.0
    op_efficiency: tuple[tuple[str, float], ...] = ()
    op_rates: tuple[tuple[str, float], ...] = ()
    num_threads: Count | None = None

    def rate_of(self, num_bytes: float) -> float:
        """Return the bytes per second at which an operation passes over so many bytes."""
        if num_bytes < self.cache_bytes:
            return self.cache_bytes_per_s
        return self.bandwidth_bytes_per_s * self.memory_efficiency


@dataclass(frozen=True)
class Host:
    """Seconds of the thread that trains, which launches a GPU's work; none of it depends on sizes.

    Attributes:
        kernel_s: to launch an operation of the model.
        parameter_s: of each parameter's hook.
        bucket_s: of each bucket of an exchange: its collectives, and what they wait for.
        codec_s: of each call of a codec.
    """

    kernel_s: Seconds = 0.0
    parameter_s: Seconds = 0.0
    bucket_s: Seconds = 0.0
    codec_s: Seconds = 0.0


@dataclass(frozen=True)
class Learned:
    """Terms learned from published figures; their logarithms are jointly normal.

    Attributes:
        keys: of lab.simulate.terms.TERMS. means, covariance: of their logarithms.
        residual: scale of the error that remains in the logarithm of a step.
    """

    keys: tuple[str, ...]
    means: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    residual: float

    def without(self, given: Collection[str]) -> Learned:
        """Leave out terms whose values are given."""
        kept = [place for place, key in enumerate(self.keys) if key not in given]
        return Learned(
            tuple(self.keys[i] for i in kept),
            tuple(self.means[i] for i in kept),
            tuple(tuple(self.covariance[i][j] for j in kept) for i in kept),
            self.residual,
        )


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
        incast: with each doubling of the nodes, bytes between them take so much longer, as a share
            of their time: links vary, and several senders meet at a port.
        server: links of a node's ranks to its CPUs, where these hold the weights of a star; None:
            a rank holds them.
        codec_bytes_per_s: rate at which a codec reads and writes a rank's memory.
        codec_rates: of single exchanges, by class name; fits find them, because passes
            over memory say nothing of random access, sorting or matrix products.
        codec_s: fixed time of each call of a codec, such as a kernel's launch.
        reduce_bytes_per_s: rate at which ranks add what has arrived, while the links wait.
            None: no time.
        contention: compute takes 1 + contention times as long while an exchange is under way.
        wire_passes: how often a library's kernels pass over a device's memory for a byte that they
            send: compute beside them takes as much longer as that is of `codec_bytes_per_s`.
        codec_contention: share of a codec's time by which it delays compute beside it on a stream,
            because both use one device: of kernels that fill it, 1.
        overhead_s: time of a step besides forward, backward, exchange and update.
        overhead_s_per_rank: what each rank of a node beyond the first adds to that, where one
            process drives all GPUs of a node in turn.
        update_bytes_per_s: rate at which the optimizer reads and writes memory. None: the profile's
            times or `overhead_s` include an update with SGD, and others differ from it at the
            device's rate.
        input_samples_per_s: rate at which a node prepares samples, beside the training. None: any.
        burst_s: seconds of its rate that a link saves up while it is idle, as a token bucket does.
        engage: compute takes 1 + engage times as long in a step that exchanges gradients, on two
            ranks and more: hooks, launches, and what kernels of a library take from a device.
        jitter: standard deviation of a rank's compute time from step to step, relative.
        num_slow, slow_factor: so many ranks take `slow_factor` times as long to compute; a run of
            one rank has none of them.
        node_rates: bytes per second of each node's link, where they differ; empty: as `inter`.
        protocols: that NCCL may choose from, keys of PROTOCOLS.
        nccl: the generation of GPUs, one of lab.simulate.nccl.GENERATIONS: NCCL's collectives then
            take what its own tuning says, and of the links only rates count. None: by `protocols`.
        host: a step takes no less than its host needs to launch it. None: no time.
        num_cores: cores that ranks share where they are emulated on one machine; codecs, messages
            and the update then take (ranks per core) times as long. None: every rank has its own.
        message_cpu: share of a message's latency in which it keeps a core busy: this part takes
            longer where ranks share cores, and the rest does not.
        send_buffer_bytes: of a message that a host still holds when its send has returned: the next
            message then shares the link with them.
        step_cpu_s: for which a rank keeps a core busy in a step, besides its exchange. Ranks that
            wait for each other in an exchange do this work at the same time, and queue for the
            cores that they share.
        crowding: codecs and the update take 1 + crowding times as long once all `num_cores` work,
            because they share caches, memory and perhaps the units of one core.
        memory_bytes: memory of a rank's device. None: unknown.
        device: a rank's processor; None: estimates are refused, because nothing is known of it.
        residual: scale of the error that would remain in the logarithm of a step that exchanges if
            all values were known. None: unknown; intervals hold only what `assumed` leaves open.
        assumed: ranges of the values that have no source.
        published_terms: on a GPU, predictions start from the terms learned from published figures.
        learned: these, once they are in; not of a file.
        measured: a log's times of collectives; not of a file. Those that span nodes if they do, or
            do not, are as many times longer or shorter than modelled as the log's.
        fitted: dotted keys whose values a fit has found; not of a file.
    """

    name: str
    source: str
    library: Annotated[str, partial(checks.one_of, allowed=LIBRARIES)]
    ranks_per_node: Count
    intra: Link | None
    inter: Link | None
    codec_bytes_per_s: AtLeast1
    codec_rates: tuple[tuple[str, float], ...] = ()
    codec_s: Seconds = 0.0
    reduce_bytes_per_s: AtLeast1 | None = None
    contention: Share = 0.0
    codec_contention: Share = 0.0
    overhead_s: Seconds = 0.0
    overhead_s_per_rank: Seconds = 0.0
    update_bytes_per_s: AtLeast1 | None = None
    input_samples_per_s: AtLeast1 | None = None
    burst_s: Seconds = 0.0
    engage: Share = 0.0
    wire_passes: Share = 0.0
    incast: Share = 0.0
    server: Link | None = None
    jitter: Share = 0.0
    num_slow: AtLeast0 = 0
    slow_factor: AtLeast1 = 1.0
    node_rates: tuple[float, ...] = ()
    protocols: tuple[str, ...] = ("LL", "Simple")
    nccl: Annotated[str, partial(checks.one_of, allowed=GENERATIONS)] | None = None
    host: Host | None = None
    num_cores: Count | None = None
    message_cpu: Share = 1.0
    send_buffer_bytes: AtLeast0 = 0.0
    step_cpu_s: Seconds = 0.0
    crowding: Share | None = None
    memory_bytes: AtLeast1 | None = None
    device: Device | None = None
    residual: Share | None = None
    assumed: tuple[Range, ...] = ()
    published_terms: Flag = True
    learned: Learned | None = None
    measured: tuple[Curve, ...] = ()
    fitted: tuple[str, ...] = ()

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


def parse(node: Mapping[str, Any]) -> Hardware:
    """Parse the content of a file of conf/hardware.

    Raises:
        ValueError: a value that is missing, unknown or out of range.
    """
    name = f"hardware={node.get('name')}"
    try:
        given = {key: value for key, value in node.items() if key != "assumed"}
        for way in ("intra", "inter", "server"):
            if node.get(way):
                given[way] = _link(f"{name}: {way}", node[way])
        for key in {"node_rates", "protocols"} & node.keys():
            given[key] = tuple(checks.listed(f"{name}: {key}", node[key]))
        given[CODEC_RATES] = _pairs(f"{name}: {CODEC_RATES}", node.get(CODEC_RATES, {}), 1)
        if given.get("num_cores") == HERE:
            given["num_cores"] = len(os.sched_getaffinity(0))
        given["device"] = parse_device(name, node["device"]) if node.get("device") else None
        given["host"] = made(Host, node["host"], f"{name}: host.") if node.get("host") else None
        hardware = made(Hardware, given, f"{name}: ", apart=NOT_OF_A_FILE)
        _check_hardware(name, hardware)
        ranges = node.get("assumed", {})
        if not isinstance(ranges, Mapping):
            raise ValueError(f"{name}: assumed={ranges}: must map keys to [lowest, highest]")
        assumed = tuple(
            _range(f"{name}: assumed.{key}", hardware, key, ends) for key, ends in ranges.items()
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    return replace(hardware, assumed=assumed)


def uncertainty_samples(hardware: Hardware, number: int = DRAWS) -> Iterator[Hardware]:
    """Draw each assumed value anew, `number` times: logarithms evenly over their range.

    The draws are the same each time, so that two strategies meet the same machines. Those of the
    device have a generator of their own: only estimates need it, and no other prediction moves.
    """
    chances = {False: random.Random(0), True: random.Random(2)}
    for _ in range(number):
        drawn = hardware
        for each in hardware.assumed:
            share = chances[each.key.startswith("device.")].random()
            if each.low <= 0:
                value = each.low + share * (each.high - each.low)
            else:
                value = each.low * (each.high / each.low) ** share
            drawn = with_value(drawn, each.key, value)
        yield drawn


def places(number: int = DRAWS) -> list[float]:
    """Draw where in its range a profile's assumed value lies, as `uncertainty_samples` does."""
    chance = random.Random(1)
    return [chance.random() for _ in range(number)]


def with_value(hardware: Hardware, key: str, value: float) -> Hardware:
    """Return the hardware with another value of a dotted key, as in `intra.latency_s`."""
    way, _, name = key.rpartition(".")
    if not way:
        return replace(hardware, **{name: value})
    if way == CODEC_RATES:
        rates = {**dict(hardware.codec_rates), name: value}
        return replace(hardware, codec_rates=tuple(sorted(rates.items())))
    return replace(hardware, **{way: replace(getattr(hardware, way), **{name: value})})


def slowest(hardware: Hardware) -> Link:
    """Return the slowest kind of links: those between nodes if there are any."""
    link = hardware.inter or hardware.intra
    assert link is not None  # hardware of more than one rank has links
    return link


def with_rate(hardware: Hardware, rate: float) -> Hardware:
    """Return the hardware with another rate, in bytes per second, of its slowest links."""
    kind = "inter" if hardware.inter else "intra"
    return with_value(hardware, f"{kind}.bandwidth_bytes_per_s", rate)


def _check_hardware(name: str, hardware: Hardware) -> None:
    if hardware.ranks_per_node > 1 and hardware.intra is None:
        raise ValueError(
            f"{name}: intra=null: must be the link between the {hardware.ranks_per_node} ranks of "
            "a node"
        )
    checks.integer(f"{name}: num_slow", hardware.num_slow, 0)
    if (hardware.num_slow > 0) != (hardware.slow_factor > 1):
        raise ValueError(
            f"{name}: num_slow={hardware.num_slow} slow_factor={hardware.slow_factor:g}: slows no "
            "rank; set both num_slow=, at least 1, and slow_factor=, above 1"
        )
    for rate in hardware.node_rates:
        checks.number(f"{name}: node_rates", rate, 1)
    if not hardware.protocols or set(hardware.protocols) - set(PROTOCOLS):
        allowed = ", ".join(PROTOCOLS)
        raise ValueError(
            f"{name}: protocols={hardware.protocols}: must be one or more of {allowed}"
        )


def _range(where: str, hardware: Hardware, dotted: str, ends: Any) -> Range:
    """Refuse a range of what is no number of the hardware, or that leaves out its value."""
    if not isinstance(ends, list) or len(ends) != 2:
        raise ValueError(f"{where}={ends}: must be [lowest, highest]")
    low, high = ends
    way, _, key = str(dotted).rpartition(".")
    part: Any = getattr(hardware, way, None) if way else hardware
    value = dict(part).get(key) if way == CODEC_RATES else getattr(part, key, None)
    if not checks.is_number(value) or key in WHOLE:
        raise ValueError(f"{where}: must be the key of a number that may be uncertain")
    checks.number(where, low, 0)
    checks.number(where, high, low)
    if value is None or not low <= value <= high or math.isnan(value):
        raise ValueError(f"{where}=[{low}, {high}] does not contain its value {value}")
    return Range(dotted, low, high)


def _link(where: str, figures: Mapping[str, Any]) -> Link:
    if not isinstance(figures, Mapping):
        return made(Link, figures, f"{where}.")  # refuses it
    for key in figures.keys() & RENAMED.keys():
        raise ValueError(f"{where}.{key}={figures[key]} has been renamed to {RENAMED[key]}")
    links = figures.get("num_links", 1)
    if isinstance(links, Mapping):
        links = tuple(sorted((int(ranks), count) for ranks, count in links.items()))
        if not links or links[0][0] != 2:
            raise ValueError(f"{where}.num_links={dict(links)}: must begin with 2 ranks")
    for count in [count for _, count in links] if isinstance(links, tuple) else [links]:
        checks.integer(f"{where}.num_links", count, 1)
    return made(Link, {**figures, "num_links": links}, f"{where}.")


def parse_device(name: str, node: Mapping[str, Any]) -> Device:
    """Parse the `device:` of hardware `name`. ValueError as in `parse`.

    Peaks that it leaves out are those of lab/measure/peaks.py.
    """
    pairs = {
        key: _pairs(f"{name}: device.{key}", node[key], least)
        for key, least in MAPPINGS.items()
        if isinstance(node, Mapping) and key in node
    }
    device = made(Device, {**node, **pairs} if pairs else node, f"{name}: device.")
    for precision, _ in device.peak_flops_per_s:
        checks.one_of(f"{name}: device.peak_flops_per_s", precision, PRECISIONS)
    if peak := gpu_peak(device.name):
        return replace(
            device,
            source=device.source or peak.source,
            peak_flops_per_s=device.peak_flops_per_s or tuple(peak.flops_per_s.items()),
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s or peak.bandwidth_bytes_per_s or 0.0,
        )
    if not device.bandwidth_bytes_per_s or not (device.peak_flops_per_s or device.name == THIS_CPU):
        raise ValueError(
            f"{name}: device.name={device.name} is not in lab/measure/peaks.py; give "
            "device.peak_flops_per_s.fp32 and device.bandwidth_bytes_per_s"
        )
    return device


def _pairs(key: str, node: object, least: float) -> tuple[tuple[str, float], ...]:
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must map names to values")
    for name, value in node.items():
        checks.number(f"{key}.{name}", value, least)
    return tuple((str(name), float(value)) for name, value in node.items())


def of_this_machine(device: Device) -> Device:
    """Return the device with its peak; that of THIS_CPU is measured here, which imports torch.

    Its peak is the rate of large matrix products, and the rate of convolutions is in its
    `op_efficiency`, unless the device has figures of its own.
    """
    if device.name != THIS_CPU or device.peak_flops_per_s:
        return device
    from lab.measure.peaks import measured_rates

    num_threads = device.num_threads or 1
    rates = measured_rates(num_threads)
    to_product = rates.convolution / rates.product
    found = f"measured: large products on {num_threads} thread{'s' if num_threads > 1 else ''}"
    return replace(
        device,
        source=device.source or f"{found}; convolutions reach {to_product:.2f} times as much",
        peak_flops_per_s=(("fp32", rates.product),),
        op_efficiency=(*((name, to_product) for name in CONVOLUTIONS), *device.op_efficiency),
    )
