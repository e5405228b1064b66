"""A published table of seconds per mini-batch, beside those of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.claims.device import Device
from lab.claims.metrics import Missing
from lab.claims.swept import mini_batch_s
from lab.draw.text import markdown
from lab.measure.intervals import Interval

Seconds = tuple[float | None, ...]  # None: not published
MACHINES = {"desktop": (1, 2, 4, 8), "server": (1, 2, 4, 8, 16, 32)}  # threads
GPUS = ("GTX 980", "GTX 1080", "K80")


@dataclass(frozen=True)
class Network:
    """A network of the table.

    Attributes:
        tools: published seconds by tool and machine: desktop, server (MACHINES), gpu (GPUS).
        here: seconds by number of threads, as the study measured them.
    """

    name: str
    model: str
    batch_size: int
    tools: Mapping[str, Mapping[str, Seconds]]
    here: Mapping[int, Interval]

    def published(self, machine: str, place: int) -> dict[str, float]:
        """Return the seconds of each tool that has a figure for one column of a machine."""
        figures = {tool: seconds[machine][place] for tool, seconds in self.tools.items()}
        return {tool: seconds for tool, seconds in figures.items() if seconds is not None}

    def fastest(self, machine: str) -> str:
        """Name the shortest seconds on a machine, with tool and column."""
        columns = GPUS if machine == "gpu" else MACHINES[machine]
        found = [
            (seconds, f"{seconds:g} ({tool}, {column}{'' if machine == 'gpu' else ' threads'})")
            for place, column in enumerate(columns)
            for tool, seconds in self.published(machine, place).items()
        ]
        return min(found)[1] if found else "–"


def networks(table: Mapping[str, Any], device: Device) -> tuple[Network, ...]:
    """Read a paper's table, and join what its study measured.

    Raises:
        ValueError: an entry is malformed; the message names its network.
    """
    return tuple(_network(name, entry, device) for name, entry in table.items())


def lines(found: Sequence[Network]) -> list[str]:
    """Write a line for each network, in seconds."""
    header = ["network", "batch", "Torch, desktop, 1 and 2 threads", "all tools, desktop, 1 thread"]
    header += ["fastest on the desktop", "on the server", "on a GPU", "here, 1 thread", "2 threads"]
    return markdown(header, [_line(each) for each in found])


def _network(name: str, entry: Any, device: Device) -> Network:
    try:
        tools = {
            tool: {machine: tuple(seconds) for machine, seconds in machines.items()}
            for tool, machines in entry["tools"].items()
        }
        here: dict[int, Interval] = {}
        for threads in (1, 2):
            try:
                here[threads] = mini_batch_s(device, entry["model"], threads)
            except Missing:
                continue
        return Network(name, entry["model"], entry["batch_size"], tools, here)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"table: {name}: {error}") from None


def _line(one: Network) -> list[str]:
    torch = [one.published("desktop", place).get("Torch") for place in (0, 1)]
    alone = sorted(one.published("desktop", 0).values())
    return [
        *(one.name, str(one.batch_size), ", ".join(f"{s:g}" if s else "–" for s in torch)),
        f"{alone[0]:g} to {alone[-1]:g}" if alone else "–",
        *(one.fastest(machine) for machine in ("desktop", "server", "gpu")),
        *(_interval(one.here.get(threads)) for threads in (1, 2)),
    ]


def _interval(value: Interval | None) -> str:
    return "–" if value is None else f"{value.mid:.3g} [{value.lo:.3g}, {value.hi:.3g}]"
