"""Settings of emulated clusters and stragglers, checked before anything starts. No torch here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lab.distributed import launcher
from lab.settings import checks
from lab.settings.config import ConfigError, build
from lab.settings.errors import as_config_error

if TYPE_CHECKING:
    from omegaconf import DictConfig

EMULATION = "LAB_EMULATION"  # describes the emulation to ranks, for their records
HOSTS = "as network namespaces"  # in that description
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
DEFAULT_RATE = "1gbit"  # unless the settings say otherwise
SLOW_FACTOR = 2.0  # of a slow host, unless its settings say otherwise
MOST_HOSTS = 150  # addresses 10.77.0.101 and up
PHASES = ("input", "forward", "backward", "exchange", "update")  # in which a rank may be delayed
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
CHANGE = re.compile(r"(\d+(?:\.\d+)?)s (h\d+) (\S+)")


@dataclass(frozen=True)
class LinkChange:
    """A change of one host's link during the run.

    Attributes:
        after_s: seconds since the hosts started.
        to: "down", "up" (as before), or a rate.
    """

    after_s: float
    host: int
    to: str

    @property
    def sets_rate(self) -> bool:
        return self.to not in ("down", "up")


@dataclass(frozen=True)
class Cluster:
    """An emulated cluster.

    Attributes:
        rates: rate of each host's link, in both directions, as tc writes it; None: unlimited.
        delay_ms: one way, from any host to any other.
        loss_percent: share of packets lost, one way.
        slow_host: a straggler, whose ranks run 1/slow_factor of the time; None: no straggler.
    """

    ranks_per_host: int
    rates: tuple[str | None, ...]
    delay_ms: float = 0.0
    loss_percent: float = 0.0
    slow_host: int | None = None
    slow_factor: float = 1.0
    changes: tuple[LinkChange, ...] = ()

    @property
    def num_hosts(self) -> int:
        return len(self.rates)

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def needs_netem(self) -> bool:
        return bool(self.delay_ms or self.loss_percent)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        fields = json.loads(text)
        changes = tuple(LinkChange(**change) for change in fields.pop("changes"))
        return cls(**fields | {"rates": tuple(fields["rates"]), "changes": changes})

    def settings(self) -> list[str]:
        """Return the settings of `python -m lab.cluster` that make this cluster."""
        changes = [f"{change.after_s:g}s h{change.host} {change.to}" for change in self.changes]
        return [
            f"hosts={self.num_hosts}",
            f"ranks_per_host={self.ranks_per_host}",
            f"rates={json.dumps(self.rates)}",
            f"delay_ms={self.delay_ms:g}",
            f"loss_percent={self.loss_percent:g}",
            f"slow_host={'null' if self.slow_host is None else f'h{self.slow_host}'}",
            f"slow_factor={'null' if self.slow_host is None else f'{self.slow_factor:g}'}",
            f"changes={json.dumps(changes)}",
        ]

    def describe(self) -> str:
        plural = "s" if self.num_hosts > 1 else ""
        rates = list(self.rates) if len(set(self.rates)) > 1 else [self.rates[0]]
        links = ", ".join(rate or "no limit" for rate in rates)
        text = f"{self.num_hosts} host{plural} {HOSTS}, links of {links}"
        if any(self.rates):
            text += " (tbf)"
        if self.needs_netem:
            text += f", {self.delay_ms:g} ms and {self.loss_percent:g} % loss (netem)"
        if self.slow_host is not None:
            text += f", h{self.slow_host} slowed by a factor of {self.slow_factor:g}"
        for change in self.changes:
            text += f", h{change.host} {change.to} after {change.after_s:g} s"
        return text


def adopt_ranks() -> None:
    """Take ranks of mpirun and srun as such (lab.distributed.launcher.adopt)."""
    hosts = os.environ.get(EMULATION, HOSTS)
    if HOSTS not in hosts:
        raise ConfigError(f"{EMULATION}={hosts}: only cluster=emulated may set it; unset it")
    with as_config_error():
        launcher.adopt()


def num_launched() -> int:
    """Return the number of ranks that a launcher has started; 1 without one."""
    with as_config_error():
        return launcher.world_size()


def cluster_of(config: DictConfig, world_size: int | None = None) -> Cluster | None:
    """Return the cluster that a run's settings ask for; None: the machine's own network.

    Args:
        world_size: number of ranks; None: as many as the hosts have.

    Raises:
        ConfigError: a wrong setting; hosts that do not fit the number of ranks; or a launcher
            started this rank on the machine's own network.
    """
    if "_target_" not in config.cluster:
        return None
    if "horovod" in config.comm["_target_"]:
        raise ConfigError(
            "comm=horovod: needs horovodrun, but cluster=emulated starts ranks with torchrun"
        )
    if launcher.was_launched() and EMULATION not in os.environ:
        raise ConfigError(
            "cluster=emulated: starts its ranks itself; leave the launcher out, as in "
            "python -m lab.train cluster=emulated cluster.hosts=4"
        )
    return build(config.cluster, world_size=world_size)


def emulated(
    hosts: int | None,
    ranks_per_host: int,
    rate: str | None,
    rates: Sequence[str | None] | None,
    delay_ms: float,
    loss_percent: float,
    slow_host: str | None,
    slow_factor: float | None,
    changes: Sequence[str] | None,
    world_size: int | None = None,
) -> Cluster:
    """Build a Cluster from conf/cluster/emulated.yaml; ValueErrors name the wrong setting."""
    checks.integer("cluster.ranks_per_host", ranks_per_host, 1, 1024)
    num_hosts = _number_of_hosts(hosts, ranks_per_host, world_size)
    for key, value in (("rates", rates), ("changes", changes)):
        if isinstance(value, str) or not isinstance(value, Sequence | None):
            raise ValueError(f"cluster.{key}={value}: must be a list, as in [a,b]")
    if rates is not None and rate != DEFAULT_RATE:
        raise ValueError(
            f"cluster.rate={rate}: cluster.rates already sets the rate of each host; leave out one "
            "of the two"
        )
    every = [rate] * num_hosts if rates is None else list(rates)
    if len(every) != num_hosts:
        raise ValueError(f"cluster.rates={every}: must have one rate for each of {num_hosts} hosts")
    for one in every:
        if one is not None and not (isinstance(one, str) and _is_rate(one)):
            raise ValueError(
                f"cluster.{'rate' if rates is None else 'rates'}={one}: must be a rate in kbit, "
                "mbit or gbit, as in 100mbit, or null"
            )
    checks.number("cluster.delay_ms", delay_ms, 0, 10_000)
    checks.number("cluster.loss_percent", loss_percent, 0, 99)
    if slow_factor is not None:
        checks.number("cluster.slow_factor", slow_factor, 1, 100)
    slow = None if slow_host is None else _host("slow_host", slow_host, num_hosts)
    if slow is None and slow_factor is not None:
        raise ValueError(
            f"cluster.slow_factor={slow_factor}: slows no host; set cluster.slow_host=, one of h0 "
            f"to h{num_hosts - 1}"
        )
    parsed = sorted((_change(one, num_hosts) for one in changes or ()), key=lambda one: one.after_s)
    if (delay_ms or loss_percent) and any(not every[one.host] for one in parsed if one.sets_rate):
        raise ValueError(
            f"cluster.changes={changes}: with cluster.delay_ms or cluster.loss_percent, only "
            "the rate of a link that already has a rate can change; set cluster.rate"
        )
    factor = 1.0 if slow is None else SLOW_FACTOR if slow_factor is None else slow_factor
    numbers = delay_ms, loss_percent, slow, factor
    return Cluster(ranks_per_host, tuple(every), *numbers, tuple(parsed))


def bits_per_s(rate: str) -> float:
    """Parse `100mbit` into bits per second; units are powers of 1000, as in tc."""
    match = RATE.fullmatch(rate)
    assert match, rate
    return float(match[1]) * UNITS[match[2]]


def _number_of_hosts(hosts: int | None, ranks_per_host: int, world_size: int | None) -> int:
    if hosts is None:
        if world_size is None:
            raise ValueError("cluster.hosts=null: must be a number of hosts, as in cluster.hosts=4")
        hosts = world_size // ranks_per_host or 1
    checks.integer("cluster.hosts", hosts, 1, MOST_HOSTS)
    if world_size not in (None, hosts * ranks_per_host):
        raise ValueError(
            f"cluster.hosts={hosts}: with cluster.ranks_per_host={ranks_per_host} the hosts have "
            f"{hosts * ranks_per_host} ranks, but world_size={world_size}"
        )
    return hosts


def _host(key: str, name: str, num_hosts: int) -> int:
    if name not in (hosts := [f"h{host}" for host in range(num_hosts)]):
        raise ValueError(f"cluster.{key}={name}: the hosts are h0 to {hosts[-1]}")
    return hosts.index(name)


def _is_rate(text: str) -> bool:
    return bool(RATE.fullmatch(text)) and bits_per_s(text) > 0


def _change(text: object, num_hosts: int) -> LinkChange:
    match = CHANGE.fullmatch(text) if isinstance(text, str) else None
    if not match or not (match[3] in ("down", "up") or _is_rate(match[3])):
        raise ValueError(
            f"cluster.changes={text!r}: must be a time, a host, and a rate or one of the "
            "words down and up, as in '10s h1 100mbit'"
        )
    return LinkChange(float(match[1]), _host("changes", match[2], num_hosts), match[3])


@dataclass(frozen=True)
class Straggler:
    """A rank that is delayed on purpose.

    Attributes:
        phase: of its steps, one of PHASES.
        every: it is delayed in every so many steps.
    """

    rank: int
    phase: str
    delay_s: float
    every: int = 1

    def describe(self) -> str:
        often = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"rank {self.rank} delayed by {1e3 * self.delay_s:g} ms in {self.phase}, {often}"


def straggler_of(config: DictConfig, world_size: int) -> Straggler | None:
    """Return the straggler that a run's settings ask for; its rank must be one of the run's."""
    if "_target_" not in config.get("straggler", {}):  # a loop of one's own has none
        return None
    found: Straggler = build(config.straggler)
    if found.rank >= world_size:
        raise ConfigError(f"straggler.rank={found.rank}: must be below world_size={world_size}")
    return found


def planted(rank: int, phase: str, delay_ms: float, every: int) -> Straggler:
    """Build a Straggler from conf/straggler/planted.yaml."""
    checks.integer("straggler.rank", rank, 0)
    checks.integer("straggler.every", every, 1)
    checks.one_of("straggler.phase", phase, PHASES)
    checks.number("straggler.delay_ms", delay_ms, above=0, at_most=60_000)
    return Straggler(rank, phase, delay_ms / 1e3, every)
