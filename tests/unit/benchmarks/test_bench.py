"""Benchmarks: their settings, wrong values, and statistics of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab import bench
from lab.benchmarks import aa, calibrate, codec, collective, compressors, host, step
from lab.benchmarks.catalogue import size_name
from lab.benchmarks.harness import Sent, places
from lab.benchmarks.present import chart_of, text_of
from lab.benchmarks.request import read
from lab.codec.kernels import library
from lab.distributed.comm import Comm, run_ranks
from lab.distributed.launcher import FOREIGN
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Int8
from lab.measure.memory import peak_bytes, reset_peak
from lab.measure.statistics import of_level, of_ratio
from lab.settings.config import ConfigError, build, load
from lab.training import assemble
from tests.support import refusing
from tests.support.commands import refusal
from tests.unit.benchmarks.test_shown import SURROUNDINGS, committed, results

CPU = torch.device("cpu")


def labels(*arguments: str) -> list[str]:
    return [variant.label for variant in read(list(arguments)).variants]


def test_one_list_or_sets_of_settings_are_compared() -> None:
    assert labels("step", "strategy=none,onebit,ddp") == ["none", "onebit", "ddp"]
    assert labels("step", "strategy=overlap", "bucket_mb=1,4") == ["bucket_mb=1", "bucket_mb=4"]
    sets = labels("step", "a=strategy=overlap exchange=none", "b=strategy=ddp", "model=mlp")
    assert sets == ["overlap exchange=none", "ddp"]
    assert labels("collective", "exchange=star") == ["star"]
    assert labels("memory", "strategy=tree") == ["none", "tree"]  # the baseline
    hook = read(["hook", "model=mlp"])
    named = [variant.label for variant in hook.variants]
    assert (hook.bench, *named[0::4]) == ("step", "onebit sync=ddp sync.hook=lab", "onebit")
    assert labels("hook", "strategy=overlap,ddp") == ["overlap", "ddp"]


def test_settings_of_a_set_reach_its_run_alone() -> None:
    first, second = read(
        ["step", "a=strategy=overlap bucket_mb=4", "b=strategy=ddp", "model=mlp"]
    ).variants
    assert (first.config.bucket_mb, second.config.bucket_mb) == (4, 25)
    assert {first.config.model["_target_"], second.config.model["_target_"]} == {
        "lab.model.mlp.mlp"
    }


def test_sizes_are_read_as_they_are_written_in_figures() -> None:
    written = {4: "4 B", 64_000: "64 kB", 2**16: "64 KiB", 10**6: "1 MB", 2**20: "1 MiB"}
    written |= {3 * 10**9: "3 GB", 2**30: "1 GiB", 1500 * 2**20: "1500 MiB"}
    assert {size: size_name(size) for size in written} == written
    text = ",".join(written.values()).replace(" ", "")
    for words in (text, text.lower()):
        assert read(["collective", f"sizes=[{words}]"]).own["sizes"] == list(written)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs one collective|reduce_scatter|codec|step"),
        (["step", "strategy=overlap"], "a comparison needs at least two"),
        (["step", "strategy=overlap,nope"], "strategy=nope: did you mean none? allowed:"),
        (["step", "strategy=ddp,ddp"], "to compare equal ones, use lab.bench step aa=true"),
        (["step", "strategy=tree,ddp", "pairs=9"], "pairs=9 has no effect without aa=true"),
        (["hook", "aa=true"], "aa=true is not used by hook; allowed: world_size"),
        (["codec", "codec.block_size=8"], "codec.block_size=8 is not used by codec; allowed:"),
        (["codec", "threads=1000000"], "threads=1000000: must be an integer from 1 to 1024"),
        (["codec", "rounds=1000000000"], "rounds=1000000000: must be an integer from 1 to 1000000"),
        (["host", "starts=1000000000"], "starts=1000000000: must be an integer from 1 to 1000"),
        *(
            (
                ["host", f"strategy={name}"],
                f"strategy={name}: lab.bench host measures exchanges that",
            )
            for name in ("fsdp", "local_sgd", "zero1", "caffe", "priority", "streaming_diloco")
        ),
        (["step", "strategy=tree,ddp", "bucket_mb=1,4"], "only one setting can have a list"),
        (["step", "a=strategy=ddp", "b='strategy=tree"], "b='strategy=tree: No closing quotation;"),
        (["step", "strategy=tree,ddp", "world_size=3"], "such as 126 or 129"),
        (["step", "strategy=tree,ddp", "world_size=0"], "world_size=0: must be an integer"),
        (["step", "strategy=tree,ddp", "out=absent/a.json"], "out=absent/a.json: must name"),
        (
            ["step", "b=strategy=ddp", "a=strategy=cntk sync.double_buffer=true"],
            "the turns of others",
        ),
        (["step", "strategy=overlap,priority"], "the turns of others"),
        (["step", "strategy=ddp", "tf32=true,false"], "tf32: must be the same for all candidates"),
        (["step", "a=comm.deterministic=true", "b=strategy=ddp"], "comm.deterministic: must be"),
        (["step", "a=strategy=ddp threads=1", "b=strategy=overlap threads=2"], "threads: must be"),
        (["certificate", "benchmark_limit=5,6"], "benchmark_limit: must be the same"),
        (["collective", "exchange_timeout_s=9,10"], "exchange_timeout_s: must be the same for all"),
        (["throughput", "device=cpu,cuda"], "device: must be the same for all candidates"),
        (["layers", "a=batch_size=4 rounds=3", "b=batch_size=8"], "rounds=3 holds for all"),
        (["memory", "strategy=overlap", "model=lenet,mlp"], "model: must be the same for all"),
        (["host", "model=lenet,mlp"], "model: must be the same for all candidates"),
        (["codec", "device=cpu,cuda"], "device=cpu, device=cuda: codec measures only one set"),
        (["recording", "strategy=none,ddp"], "none, ddp: recording measures only one set"),
        (["collective", "sizes=[4KiB,6B]"], "'6B' is not a size; give multiples of 4 bytes in KiB"),
        (["collective", "sizes=[16]"], "MiB, GiB (powers of 1024), kB, MB, GB (powers of 1000)"),
        (["collective", "batch_size=8"], "batch_size=8 is not used by collective; allowed:"),
        (["collective", "world_size=1"], "world_size=1: a single rank exchanges nothing"),
        (["codec", "num_values=100"], "num_values=100: must be at least columns=4096"),
        (["codec", "codec=zip", "num_values=4096"], "codec=zip: no such codec; allowed: onebit"),
        (["codec", "codec=nowhere.Zip"], "codec=nowhere.Zip: no module nowhere in "),
        (["roofline", "batch_size=2,4"], "batch_size=2, batch_size=4: roofline measures only one"),
        (
            ["throughput", "batch_size=2000", "model=mlp"],
            "batch_size=2000: the test set has only 360 samples, which is too few for one batch",
        ),
        (["convolution", "model=mlp"], "model=lab.model.mlp.mlp has no 2-d convolution"),
        (["convolution", "algorithm=magic"], "algorithm=magic: no such algorithm; allowed"),
        (["counters", "isa=avx512"], "isa=avx512: allowed: avx, avx2"),
        (["counters", "trace=a.json", "model=lenet"], "model=lenet has no effect with trace="),
        (
            ["counters", "device=cuda"],
            "device=cuda: the benchmark counts only on CPUs; for a GPU, give trace=FILE",
        ),
        (["footprint", "model=alexnet"], "model=alexnet: images of 32x32 px are too small"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments: list[str], message: str) -> None:
    assert message in refusal(bench.main, *arguments)


def test_what_does_not_fit_is_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.58 GiB.\nSee docs")

    monkeypatch.setattr(codec, "measure", full)
    assert bench.main(["codec", "device=cpu"]) == 1
    line = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.58 GiB\n"
    assert capsys.readouterr().err == f"lab.bench: error: {line}"


OMPI = dict(zip(FOREIGN["mpirun"], ("0", "4", "0", "4"), strict=True))


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "4"}, OMPI])
def test_a_launcher_has_the_last_word_on_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # to be as before afterwards, also if mpirun's are adopted
        monkeypatch.delenv(name)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    own = read(["step", "strategy=tree,ddp"]).own
    assert (own["world_size"], own["starts"]) == (4, 1)
    with pytest.raises(ConfigError, match="starts=3: a launcher has started these ranks once"):
        read(["step", "strategy=tree,ddp", "starts=3"])
    with pytest.raises(ConfigError, match="world_size=2: the launcher has started 4 ranks"):
        read(["step", "strategy=tree,ddp", "world_size=2"])


class Forgetful(Exchange):
    """A broken all-reduce: it omits the last value of the last rank."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.rank == comm.size - 1:
            bucket.flat[-1] += 1
        comm.all_reduce(bucket.flat)
        bucket.flat.div_(comm.size)


def wrong_by_rank(size: int, make: dict[str, Callable[[], Exchange]]) -> list[dict[str, int]]:
    def rank_main(comm: Comm) -> dict[str, int]:
        exchanges = {name: made() for name, made in make.items()}  # each rank has its own
        flat = torch.empty(1000)
        return {
            each.name: collective.count_wrong(each, flat, comm.rank, comm)
            for each in collective.make_candidates(exchanges, comm)
        }

    return run_ranks(size, rank_main)


def test_all_reduces_of_the_lab_are_exact_on_whole_numbers() -> None:
    names = ("ring", "tree", "tree_pipelined", "tree_double", "star", "bf16", "fp16")
    make = {name: partial(build, load([f"exchange={name}"]).exchange) for name in names}
    nothing = dict.fromkeys(("allreduce", *names, "sendrecv"), 0)
    assert wrong_by_rank(5, make) == [nothing] * 5


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        ([[0, 1, 2]], {0: 1}),
        ([[0, 2], [1, 3]], {0: 1, 2: 3}),  # numbered round the hosts
        ([[0, 1, 2], [3], [4, 5]], {0: 3}),
        ([[0], [1, 2], [3, 4], [5, 6, 7]], {0: 1, 3: 5, 4: 6}),
    ],
)
def test_a_plain_send_crosses_hosts_if_there_are_several(
    nodes: list[list[int]], pairs: dict[int, int]
) -> None:
    assert collective.pairs(nodes) == pairs


def test_the_bound_is_of_a_hosts_link_if_there_are_several() -> None:
    # An all-reduce of 16 bytes on four ranks, as two hosts of two and as one.
    assert collective._share(Sent(24, 24, None), Sent(16, 32, None)) == 0.75
    assert collective._share(Sent(24, 0, None), Sent(16, 0, None)) == 3


def test_an_exchange_with_residuals_is_measured_at_several_sizes() -> None:
    onebit = load(["exchange=onebit"]).exchange

    def rank_main(comm: Comm) -> list[int]:
        candidates = collective.make_candidates({"onebit": build(onebit)}, comm)
        tensors = [torch.empty(size) for size in (1024, 16384, 1024)]
        return [collective.count_wrong(candidates[1], t, comm.rank, comm) for t in tensors]

    assert run_ranks(2, rank_main) == [[0, 0, 0]] * 2


def test_one_wrong_value_is_counted_on_every_rank() -> None:
    assert [each["broken"] for each in wrong_by_rank(3, {"broken": Forgetful})] == [1, 1, 1]


def test_what_delivers_no_mean_is_refused() -> None:
    exchanges = {"none": build(load(["exchange=none"]).exchange)}
    with pytest.raises(ConfigError, match="exchange=none does not average gradients; use an"):
        run_ranks(2, lambda comm: collective.make_candidates(exchanges, comm))


class OnItsOwn(Int8):
    """A broken compressing exchange: rank 1 ends with another value."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        bucket.flat[7] += comm.rank


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("exchange=none", "exchange=none does not average gradients"),
        ("exchange.threshold=foo", "exchange.threshold=foo: allowed:"),
        ("comm.nccl_algo=Ring", "comm.nccl_algo=Ring has an effect only with NCCL"),
    ],
)
def test_calibration_refuses_settings_before_it_measures(
    wrong: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(_device: str) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr(calibrate, "_host_seconds", measured)
    chosen = [wrong] if wrong.startswith("exchange=") else ["exchange=onebit", wrong]
    with pytest.raises(ConfigError) as refused:
        calibrate.measure(read(["calibrate", *chosen, "device=cpu", "world_size=1"]))
    assert str(refused.value).startswith(line)


def test_ranks_must_agree_on_what_a_lossy_exchange_delivers() -> None:
    make = {"int8": Int8, "broken": OnItsOwn}
    found = [(each["int8"], each["broken"]) for each in wrong_by_rank(2, make)]
    assert found == [(0, 0), (0, 1)]


@pytest.mark.skipif(library("onebit") is None, reason="no compiler")
def test_the_kernels_of_a_cpu_are_named_after_its_instructions() -> None:
    assert codec.kernels(CPU)["level"] == torch.backends.cpu.get_cpu_capability()


def test_a_users_codec_is_measured() -> None:
    made = compressors.maker("tests.unit.codec.test_trial.Plain")(4, 64, CPU)
    assert made.payload_bytes == 4 * 4 * 64
    assert codec.count_wrong(made, torch.randn(4, 64), torch.randn(4, 64)) == 0


@pytest.mark.parametrize("name", codec.CODECS)
def test_codecs_lose_nothing_beside_the_residual(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, residual = torch.randn(2, 7, 101, generator=generator)
    made, define = codec.CODECS[name](7, 101, CPU), compressors.definition_of(name)
    before = residual.clone()
    assert codec.count_wrong(made, gradient, residual, define and define(7, 101, CPU)) == 0
    assert torch.equal(residual, before)  # the check does not change the tensors


def test_eager_baselines_quantise_as_their_formulas_say() -> None:
    gradient = torch.tensor([[-3.0, -1.0, 0.0, 4.0]])
    expected = {"grace_like": [-2.0, -2.0, 2.0, 2.0], "deepspeed_like": [-1, -1, 1, 1]}
    for name, values in expected.items():
        made, out = codec.CODECS[name](1, 4, CPU), torch.zeros(1, 4)
        made.encode(gradient, torch.zeros(1, 4))
        made.decode(out)
        scale = (26 / 4) ** 0.5 if name == "deepspeed_like" else 1.0
        torch.testing.assert_close(out, scale * torch.tensor([values]).float())


class Broken(compressors.LabCompressor):
    """A broken codec: the first bit is flipped, and one residual is wrong."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__(compressors.OneBit(), True, rows, columns, device)

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        super().encode(gradient, residual)
        self.message[self.layout.pieces[0].payload] ^= 1
        residual[1, 1] += 1


def test_a_flipped_bit_and_a_lost_residual_are_counted() -> None:
    true = codec.CODECS["onebit_reference"](2, 64, CPU)
    # The first decoded value, its bit, and the second residual, which counts twice.
    assert codec.count_wrong(Broken(2, 64, CPU), torch.randn(2, 64), torch.zeros(2, 64), true) == 4


def test_a_wrong_result_is_shown_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(codec.CODECS, "onebit", Broken)
    settings = ["codec=onebit", "num_values=128", "columns=64", "threads=1", "device=cpu"]
    assert bench.main(["codec", *settings, "rounds=1"]) == 1
    shown = capsys.readouterr()
    assert "#wrong" in shown.out
    assert "lab.bench: error: the benchmark found wrong values" in shown.err


def test_ratios_are_to_the_last_and_exposed_exchange_is_beyond_none() -> None:
    times = {"none": 0.1, "onebit": 0.15, "ddp": 0.2}
    rows = step.compare(*[{name: np.full(9, seconds) for name, seconds in times.items()}] * 2)
    none, onebit, ddp = rows
    assert none["ratio"]["median"] == pytest.approx(0.5) and ddp["ratio"] is None
    assert none["exposed_exchange_s"] is None and ddp["exposed_to_ddp"] is None
    assert onebit["exposed_exchange_s"]["median"] == pytest.approx(0.05)
    assert onebit["exposed_to_ddp"]["median"] == pytest.approx(0.5)
    assert onebit["exposed_to_ddp"]["low"] == pytest.approx(0.5)


def test_without_none_nothing_is_exposed_and_no_number_is_made_up() -> None:
    (first, _) = step.compare(*[{"a": np.ones(1), "b": np.ones(1)}] * 2)
    assert first["exposed_exchange_s"] is None
    assert first["ratio"] == {"median": 1.0, "low": None, "high": None}


def test_a_wall_clock_counts_the_slow_steps_that_a_median_leaves_out() -> None:
    steps, slow = {"a": np.ones(9), "b": np.ones(9)}, np.array([10.0, *np.ones(8)])
    (first, _) = step.compare(steps, {"a": slow, "b": np.ones(9)})
    assert first["ratio"]["median"] == 1 and first["wall_ratio"]["median"] == 2


def test_between_starts_is_students_interval_of_one_ratio_a_start() -> None:
    def start(seed: int, seconds: float) -> dict[str, Any]:
        times = {"none": np.full(9, 0.5), "tree": np.full(9, seconds), "ddp": np.ones(9)}
        return {"rows": step.compare(times, times), "num_pairs": 9, "order_seed": seed}

    found = step.combine([start(7, 1.2), start(8, 1.3), start(9, 1.25)])
    _, tree, ddp = found["rows"]
    expected = of_ratio([1.2, 1.3, 1.25], [1, 1, 1])
    for key in ("ratio", "wall_ratio"):
        ends = [tree[key][end] for end in ("low", "median", "high")]
        assert ends == pytest.approx([expected.lo, expected.mid, expected.hi])
    assert tree["step_s"]["median"] == 1.25 and ddp["ratio"] is None
    assert tree["exposed_to_ddp"]["median"] == pytest.approx(1.5)
    assert [each["order_seed"] for each in found["starts"]] == [7, 8, 9]
    assert step.combine([start(0, 2.0), start(1, 2.0)])["rows"][1]["ratio"]["low"] is None
    shown = text_of({"bench": "step", **SURROUNDINGS, **found, "steps_per_round": 1})
    assert "Student's t over 3 fresh starts, order_seed=7 to 9" in shown


def test_as_many_starts_as_candidates_give_each_of_them_each_place() -> None:
    drawn = np.array([places(3, seed) for seed in range(12)])
    for block in drawn.reshape(4, 3, 3):
        assert all(sorted(column) == [0, 1, 2] for column in block.T)
    assert len({tuple(each) for each in drawn[::3]}) > 1


def test_equal_candidates_are_called_different_as_often_as_their_level_says() -> None:
    """4000 pairs, each with a start's own luck, which all rounds of that start share."""
    rng = np.random.default_rng(0)
    starts: list[dict[str, Any]] = []
    for _ in range(3):
        ratios = np.exp(0.1 * rng.standard_normal(4_000))
        ends = {"low": (ratios * 0.99).tolist(), "high": (ratios * 1.01).tolist()}
        pairs = {"ratio": ratios.tolist(), "wall_ratio": ratios.tolist(), **ends}
        starts.append({"order_seed": 0, "pairs": {"overlap": pairs}})
    between, wall, within = aa._judged(starts)["rows"]
    for covered in between["covered"]:
        assert covered["median"] == pytest.approx(covered["level"], abs=0.02)
    assert between["num_different"] == 4_000 - round(4_000 * between["covered"][3]["median"])
    assert wall["covered"] == between["covered"] and within["num_pairs"] == 12_000
    assert within["covered"][0]["median"] < 0.1  # resampled rounds know nothing of other starts


def test_a_half_width_is_that_of_the_ratio_and_not_of_its_logarithm() -> None:
    pairs = [{"ratio": [r], "wall_ratio": [r], "low": [None], "high": [None]} for r in (1, 2, 4)]
    starts = [{"order_seed": 0, "pairs": {"overlap": each}} for each in pairs]
    between, *_ = aa._judged(starts)["rows"]
    ratio = of_level([1.0, 2.0, 4.0])
    assert between["half_width"] == pytest.approx((ratio.hi - ratio.lo) / 2)


def test_pairs_of_equal_candidates_are_measured() -> None:
    small = ["model=mlp", "model.hidden=[8]", "batch_size=8", "steps=17", "device=cpu"]
    request = read(["step", "aa=true", "pairs=2", "starts=1", "world_size=1", *small])
    assert (request.bench, [each.label for each in request.variants]) == ("aa", ["overlap"])
    result = aa.measure(request)
    assert result
    (row,) = result["rows"]
    assert (row["kind"], row["num_pairs"]) == (aa.WITHIN, 2)
    assert all(0 < ratio < 100 for ratio in result["starts"][0]["pairs"]["overlap"]["ratio"])


class Loop:
    """A trainer whose steps take a second, but where they follow a wait for the device 100."""

    def __init__(self, total_steps: int, every: int, settled_at: int | None = 0) -> None:
        self.total_steps, self.step_s = total_steps, list[float]()
        self.sync, self.settled_at = SimpleNamespace(every=every), settled_at
        self.config = SimpleNamespace(warmup_steps=5, strategy="auto")
        self.progress = SimpleNamespace(step=0)
        self.clock = SimpleNamespace(step_seconds=lambda: np.array(self.step_s))
        self.end_turn()

    def steps(self) -> Iterator[int]:
        while self.progress.step < self.total_steps:
            self.step_s.append(100.0 if self.is_drained else 1.0)
            self.is_drained = False
            self.progress.step += 1
            yield self.progress.step

    def end_turn(self) -> None:
        self.is_drained = True


ALONE: Any = SimpleNamespace(
    rank=1, device=CPU, barrier=lambda: None, gather=lambda each: each[None]
)


@pytest.mark.parametrize(
    ("total_steps", "every", "turn", "num_turns"),
    [(9, (1, 1), 2, 2), (65, (1, 1), 10, 6), (500, (1, 1), 10, 49), (60, (1, 4), 8, 6)],
)
def test_a_turn_is_some_steps_of_which_the_first_round_does_not_count(
    total_steps: int, every: tuple[int, int], turn: int, num_turns: int
) -> None:
    parts: Any = [SimpleNamespace(trainer=Loop(total_steps, each)) for each in every]
    turns, with_host_s, step_s = step.in_turns(parts, ALONE)
    assert (turns.size, turns.every) == (turn, max(every))
    assert step_s.tolist() == [[1.0] * num_turns] * 2
    assert with_host_s.shape == (2, num_turns)
    for part in parts:
        assert part.trainer.progress.step == turns.num_warmup + num_turns * turn <= total_steps
        assert part.trainer.step_s.count(100.0) == 1 + num_turns


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (Loop(6, 1), "steps=6: too few: 5 steps are warm-up, and at least 2 more"),
        (Loop(9, 1, None), "steps=9: too few: strategy=auto is not measured in the first 5 steps"),
    ],
)
def test_steps_that_leave_no_turn_are_too_few(loop: Loop, line: str) -> None:
    part: Any = SimpleNamespace(trainer=loop)
    with pytest.raises(ConfigError, match=line):
        step.in_turns([part], ALONE)


def test_one_rank_says_what_it_skips() -> None:
    said = text_of(committed("step") | {"world_size": 1, "steps_per_turn": 10})
    assert (
        "on 1 rank (gloo); a round has a turn of 10 steps for each row, not counting the first"
        in said
    )
    assert "1 rank sends nothing" in said


def test_peak_sees_what_was_freed_before_it_is_read() -> None:
    reset_peak(CPU)
    before = peak_bytes(CPU)
    torch.ones(2**24)
    assert peak_bytes(CPU) - before == pytest.approx(2**26, rel=0.05)
    reset_peak(CPU)
    assert peak_bytes(CPU) < before + 2**22


def test_memory_compares_the_busiest_rank_with_none_and_theory() -> None:
    none, gossip, tree = results()["memory"]["rows"]
    assert none["optimizer_share"] == 1.0
    share = max(tree["optimizer_bytes"]) / max(none["optimizer_bytes"])
    assert tree["optimizer_share"] == pytest.approx(share) and share > 1
    assert none["of_theory"] == 1.0 and none["rank"] == 1
    assert gossip["of_theory"] is None and gossip["extra_bytes"] == pytest.approx(1.1e8)
    assert tree["theory_bytes"] == pytest.approx(3.3e8)
    assert tree["of_theory"] == pytest.approx(3.5 / 3.3)


def test_each_candidate_is_compiled_for_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch makes the second one's kernels for any batch, which are slower."""
    compiled: list[list[Any]] = []

    def note(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append([each for each in inputs if isinstance(each, torch.SymInt)])
        return module.forward

    monkeypatch.setattr(assemble, "BACKEND", note)
    words = ("strategy=none", "batch_size=8,16", "compile=true", "model=mlp", "steps=12")
    request = read(["step", *words, "world_size=1", "starts=1"])
    assert step.measure(request)
    assert compiled == [[], []]


def test_ranks_that_do_not_exist_cost_no_copies() -> None:
    with host._fake_comm(torch.device("cpu")) as comm:
        output = torch.zeros(comm.size, 4)
        comm.all_gather(output, torch.ones(4))
        assert not output.any()


def test_host_time_is_measured_beside_ddp() -> None:
    request = read(["host", "strategy=overlap,onebit", "model=mlp", "rounds=6"])
    result = host.measure(request)
    assert [row["name"] for row in result["rows"]] == [host.DDP, "overlap", "onebit"]
    assert all(row["added_s"]["median"] > 0 for row in result["rows"])
    assert result["rows"][0]["over_ddp"]["median"] == 1
    assert result["num_parameters"] == 6 and not torch.distributed.is_initialized()
    assert "one rank stands for 8" in result["emulation"]
    assert chart_of({"bench": "host", "command": "", **result})
    again = host.combine([result] * 3)
    for row, once in zip(again["rows"], result["rows"], strict=True):
        assert row["added_s"]["median"] == pytest.approx(once["added_s"]["median"])
    assert "t over 3 fresh starts" in text_of({"bench": "host", **again})


def test_host_time_of_what_cannot_be_measured_is_refused() -> None:
    with refusing("strategy=horovod: runs only over comm=horovod"):
        host.measure(read(["host", "strategy=horovod", "model=mlp", "rounds=1"]))
