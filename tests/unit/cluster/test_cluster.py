"""Emulated clusters: their settings, and the command lines that make them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from lab.cluster import __main__ as command
from lab.cluster import network, sandbox
from lab.cluster.settings import (
    EMULATION,
    Cluster,
    LinkChange,
    Straggler,
    bits_per_s,
    cluster_of,
    straggler_of,
)
from lab.settings.config import ConfigError, load
from lab.study.grid import read
from lab.study.launch import starter
from tests.conftest import wait_for
from tests.support import HANG_S
from tests.support.commands import refusal, said


def cluster(*settings: str, world_size: int | None = None) -> Cluster:
    own = [f"cluster.{setting}" for setting in settings]
    made = cluster_of(load(["cluster=emulated", *own]), world_size)
    assert made
    return made


def test_hosts_do_not_wait_long_for_one_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "GRACE_S", 0.1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, sandbox.AWAITED)
    lines = (["sleep", "60"], ["sh", "-c", "kill -KILL $$"], ["sleep", "60"])
    hosts = [subprocess.Popen(line, text=True) for line in lines]
    try:
        sandbox.wait(hosts, [])
        assert [host.returncode for host in hosts] == [None, -signal.SIGKILL, None]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for host in hosts:
            host.kill()
            host.wait()


def test_hosts_follow_from_the_number_of_ranks() -> None:
    assert cluster_of(load([]), 4) is None
    assert cluster(world_size=4).num_hosts == 4
    assert cluster("ranks_per_host=2", world_size=4).num_hosts == 2
    assert cluster("hosts=3", "ranks_per_host=2").num_ranks == 6


def test_each_host_has_the_rate_or_one_of_its_own() -> None:
    assert cluster("hosts=2", "rate=100mbit").rates == ("100mbit", "100mbit")
    assert cluster("hosts=2", "rates=[1gbit,null]").rates == ("1gbit", None)
    assert bits_per_s("2.5gbit") == 2.5e9


def test_a_slow_host_takes_twice_as_long_unless_told_otherwise() -> None:
    assert cluster("hosts=2", "slow_host=h1").slow_factor == 2
    assert cluster("hosts=2", "slow_host=h1", "slow_factor=3").slow_factor == 3
    assert cluster("hosts=2").slow_factor == 1


def test_changes_are_in_order_of_time() -> None:
    assert cluster("hosts=2", "changes=null").changes == ()
    made = cluster("hosts=2", "changes=['20s h1 down','1.5s h0 10mbit']")
    assert made.changes == (LinkChange(1.5, 0, "10mbit"), LinkChange(20, 1, "down"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["hosts=0"], "cluster.hosts=0: must be an integer from 1 to 150"),
        (["hosts=a"], "cluster.hosts=a: must be an integer"),
        ([], "cluster.hosts=null: must be a number of hosts"),
        (["hosts=2", "rate=5"], "cluster.rate=5: must be a rate in kbit, mbit or gbit"),
        (["hosts=2", "rate=0mbit"], "cluster.rate=0mbit: must be"),
        (["hosts=1", "rates=[1gbit]", "rate=1mbit"], "cluster.rate=1mbit: cluster.rates already"),
        (["hosts=2", "rates=[1gbit]"], "must have one rate for each of 2 hosts"),
        (["hosts=2", "rates=1gbit"], "cluster.rates=1gbit: must be a list"),
        (["hosts=2", "loss_percent=100"], "cluster.loss_percent=100: must be a number from 0"),
        (["hosts=2", "delay_ms=-1"], "cluster.delay_ms=-1: must be a number from 0"),
        (["hosts=2", "changes=['h1 down']"], "cluster.changes='h1 down': must be a time, a host"),
        (["hosts=2", "changes=['1s h1 0mbit']"], "cluster.changes='1s h1 0mbit': must be"),
        (["hosts=2", "changes=['1s h2 down']"], "cluster.changes=h2: the hosts are h0 to h1"),
        (["hosts=2", "slow_host=1"], "cluster.slow_host=1: the hosts are h0 to h1"),
        (["hosts=2", "slow_factor=0.5"], "cluster.slow_factor=0.5: must be a number from 1 to 100"),
        (
            ["hosts=2", "slow_factor=2"],
            "slow_factor=2: slows no host; set cluster.slow_host=",
        ),
        (
            ["hosts=2", "rate=null", "delay_ms=1", "changes=['1s h1 1mbit']"],
            "only the rate of a link that already has a rate can change; set cluster.rate",
        ),
        (["hosts=2", "changes=1"], "cluster.changes=1: must be a list"),
    ],
)
def test_wrong_settings_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster(*settings)
    assert says in str(error.value)


def test_hosts_must_fit_the_ranks() -> None:
    with pytest.raises(ConfigError, match="have 4 ranks, but world_size=3"):
        cluster("hosts=4", world_size=3)
    with pytest.raises(ConfigError, match="have 2 ranks, but world_size=3"):
        cluster("ranks_per_host=2", world_size=3)


def test_ranks_of_another_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="leave the launcher out"):
        cluster(world_size=2)
    monkeypatch.setenv(EMULATION, "2 hosts as network namespaces")
    assert cluster(world_size=2).num_hosts == 2


def test_other_ways_to_start_are_refused() -> None:
    with pytest.raises(ConfigError, match="horovodrun"):
        cluster_of(load(["cluster=emulated", "comm=horovod"]), 2)


def test_a_cluster_survives_its_journey_inside() -> None:
    """It goes as JSON to the supervisor, and as settings to the command that starts a cell."""
    made = cluster(
        "hosts=2",
        "rates=[1gbit,null]",
        "delay_ms=0.5",
        "slow_host=h1",
        "slow_factor=1.5",
        "changes=['1.5s h1 down']",
    )
    assert Cluster.from_json(made.to_json()) == made
    assert cluster(*made.settings()) == made
    line = starter(2, False, made)
    assert line == [sys.executable, "-m", "lab.cluster", "run", *made.settings(), "--"]


def test_what_a_record_says() -> None:
    made = cluster("hosts=2", "rates=[1gbit,null]", "changes=['1s h1 down']")
    expected = "2 hosts as network namespaces, links of 1gbit, no limit (tbf), h1 down after 1 s"
    assert made.describe() == expected
    unlimited = "1 host as network namespaces, links of no limit"
    assert cluster("hosts=1", "rate=null").describe() == unlimited
    assert (
        cluster("hosts=4")
        .describe()
        .endswith("4 hosts as network namespaces, links of 1gbit (tbf)")
    )


def test_cells_have_as_many_hosts_as_ranks() -> None:
    study = read(["cluster=emulated", "world_size=1,2", "strategy=tree"])
    assert [one.cluster.num_hosts for one in study.cells if one.cluster] == [1, 2]


def test_addresses_sort_as_the_hosts_do() -> None:
    """torchrun gives ranks to nodes in the order of their addresses as texts."""
    addresses = [network.address(host) for host in range(150)]
    assert sorted(addresses) == addresses


def test_a_link_is_limited_at_both_ends() -> None:
    shape = "root handle 1: tbf rate 100mbit burst 16384b latency 50ms"
    assert [" ".join(line) for line in network.limit(1, "100mbit")] == [
        "ip -n h1 link set eth0 gso_max_size 13107",  # less than a burst
        "ip link set link1 gso_max_size 13107",
        f"tc -n h1 qdisc replace dev eth0 {shape}",
        f"tc qdisc replace dev link1 {shape}",
    ]
    fast = [" ".join(line) for line in network.limit(0, "1gbit")]
    assert "65536" in fast[0] and "125000b" in fast[-1]  # TCP's largest; a millisecond


def test_only_what_is_asked_for_is_shaped() -> None:
    lines = [" ".join(line) for line in network.build(cluster("hosts=2", "rates=[null,1mbit]"))]
    assert {line.split()[2] for line in lines if line.startswith("tc -n")} == {"h1"}
    assert not any("netem" in line for line in lines)


def test_delay_and_loss_are_what_a_host_sends() -> None:
    made = cluster("hosts=1", "delay_ms=2", "loss_percent=0.1")
    lines = [" ".join(line) for line in network.build(made) if "netem" in line]
    assert lines == ["tc -n h0 qdisc add dev eth0 parent 1: netem delay 2ms loss 0.1%"]


def test_changes_of_a_link() -> None:
    assert list(network.change_link(LinkChange(1, 2, "down"))) == [
        ["ip", "link", "set", "link2", "down"]
    ]
    assert list(network.change_link(LinkChange(1, 2, "1mbit"))) == list(network.limit(2, "1mbit"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "needs one run|check; --help has examples"),
        (["walk"], "walk: the first word must be run or check"),
        (["run", "hosts=2"], "run needs torchrun's arguments after --"),
        (["check", "hosts=2", "--", "-m", "lab.train"], "run needs torchrun's arguments after --"),
        (["check", "rate=2"], "hosts=null: must be a number of hosts, as in hosts=4"),
        (["check", "host=2"], "host=2: no such setting; did you mean hosts?"),
    ],
)
def test_command_lines_are_checked(arguments: list[str], says: str) -> None:
    assert refusal(command.main, *arguments).startswith(says)


def test_a_straggler_is_halted_again_and_again_and_then_runs_on() -> None:
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE, text=True)
    throttle = threading.Thread(target=sandbox.slow_down, args=(process, 3.0))
    throttle.start()
    seen: set[str] = set()
    wait_for(lambda: list(sandbox.descendants(process.pid)))
    (rank,) = map(psutil.Process, sandbox.descendants(process.pid))
    wait_for(lambda: seen.add(rank.status()) or {"stopped", "sleeping"} <= seen)
    process.communicate("\n", timeout=HANG_S)
    throttle.join(20)
    assert process.returncode == 0


def test_help_names_every_setting() -> None:
    printed = said(command.main, "run", "--help")
    for key in load(["cluster=emulated"]).cluster:
        assert str(key).startswith("_") or f"{key}:" in printed


def test_without_the_tools_one_line_says_what_is_needed(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "lab.cluster", "check", "hosts=2"]
    environment = {"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)" in done.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rank=4", "straggler.rank=4: must be below world_size=4"),
        ("rank=-1", "straggler.rank=-1: must be an integer of at least 0"),
        ("phase=sleep", "straggler.phase=sleep: allowed: input, forward, backward, exchange"),
        ("delay_ms=0", "straggler.delay_ms=0: must be a number above 0"),
        ("every=0", "straggler.every=0: must be an integer of at least 1"),
    ],
)
def test_a_straggler_that_cannot_be_planted_is_refused(setting: str, message: str) -> None:
    config = load(["strategy=overlap", "straggler=planted", f"straggler.{setting}"])
    with pytest.raises(ConfigError, match=re.escape(message)):
        straggler_of(config, 4)


def test_a_planted_straggler_is_described_for_the_record() -> None:
    words = ["straggler=planted", "straggler.rank=2", "straggler.every=10"]
    planted = straggler_of(load(["strategy=overlap", *words]), 4)
    assert planted == (expected := Straggler(2, "backward", 0.05, 10))
    assert expected.describe() == "rank 2 delayed by 50 ms in backward, every 10 steps"
    assert straggler_of(load(["strategy=overlap"]), 4) is None
