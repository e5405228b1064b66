"""Verdicts, from synthetic records whose losses are known."""

from __future__ import annotations

import errno
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from lab.analysis.results import load as load_results
from lab.diagnosis.evidence import Evidence, gather, own_times
from lab.diagnosis.rules import judge, remedies
from lab.explain import main
from lab.measure import OWN, PHASES, Span
from lab.record.schema import Emulation
from lab.record.trace import write_trace
from lab.settings.config import load
from lab.study import grid as studies
from tests.support.commands import refusal, said
from tests.support.records import leave, make_record

GRADIENT_BYTES = 8_000_000
LARGE, SMALL = 4, 4000  # messages of a step


def write(
    study: Path,
    strategy: str,
    ranks: int,
    step_s: float | None,
    phases: dict[str, list[float]] | None = None,
    **more: Any,
) -> Path:
    """Write a run of 32 images on each of 4 ranks.

    Args:
        phases: a breakdown's phases, seconds by rank.
        more: further keys of the record; `settings`: of the run's settings.
    """
    settings = more.pop("settings", {})
    weak = more.get("scaling") == "weak"
    known: dict[str, Any] = {
        "batch_size": 32 if weak else 128,
        "study": study.name,
        "status": "done",
        "variant": {"model": "mlp"},
        "model": "mlp",
        "measure": "breakdown" if phases else "throughput",
        "phases_s": {name: float(np.mean(values)) for name, values in (phases or {}).items()},
        "gradient_bytes": GRADIENT_BYTES,
        "payload_bytes_per_step": [0 if strategy == "none" else 12_000_000] * ranks,
        "messages_per_step": [float(LARGE)] * ranks,
    }
    folder = study / f"{strategy}-{ranks}-{len(list(study.glob('*')))}"
    leave(folder, make_record(strategy, ranks, step_s, **(known | more)))
    defaults = {"overlap": strategy != "allreduce", "bucket_mb": 25, "compile": False}
    defaults["sync"] = {"_target_": "lab.sync.gradsync.GradSync"}
    (folder / "config.yaml").write_text(OmegaConf.to_yaml({**defaults, **settings}))
    if phases:
        rows = [
            {"rank": rank, "step": step, "timed": step >= 2, "step_s": step_s}
            | {f"{name}_s": phases[name][rank] for name in PHASES}
            for rank in range(ranks)
            for step in range(6)
        ]
        pd.DataFrame(rows).to_parquet(folder / "steps.parquet")
    return folder


def phases(data: float, compute: list[float], exchange: list[float]) -> dict[str, list[float]]:
    """Split each rank's compute: a third forward, the rest backward."""
    backward = [2 / 3 * seconds for seconds in compute]
    forward = [seconds / 3 for seconds in compute]
    same = [data] * len(compute), [0.0] * len(compute)
    parts = (same[0], forward, backward, exchange, same[1])
    return dict(zip(PHASES, parts, strict=True))


def explain(run: Path) -> tuple[str, Evidence]:
    results = load_results(run.parent)
    evidence = gather(results, next(cell for cell in results.study.cells if cell.folder == run))
    return judge(evidence).name, evidence


def first_remedy(evidence: Evidence) -> str:
    return remedies(evidence, judge(evidence))[0].text


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Write a study in which `none` scales perfectly: 0.4 s on one rank, 0.1 s on four."""
    folder = tmp_path / "runs" / "demo"
    write(folder, "none", 1, 0.4)
    write(folder, "none", 4, 0.1)
    return folder


def test_a_run_that_scales_is_compute_bound(study: Path) -> None:
    verdict, evidence = explain(write(study, "overlap", 4, 0.105))
    assert verdict == "compute-bound"
    assert (evidence.ideal_s, evidence.fixed_s) == pytest.approx((0.1, 0.0))
    assert first_remedy(evidence) == "8 ranks"


def test_large_messages_are_bound_by_bandwidth(study: Path) -> None:
    verdict, evidence = explain(write(study, "overlap", 4, 0.3))
    assert verdict == "bandwidth-bound"
    assert evidence.exposed_s == pytest.approx(0.2)
    assert first_remedy(evidence) == "strategy=onebit"


def test_small_messages_are_bound_by_latency(study: Path) -> None:
    many = {"messages_per_step": [SMALL] * 4, "settings": {"bucket_mb": 0}}
    run = write(study, "overlap", 4, 0.3, **many)
    verdict, evidence = explain(run)
    assert verdict == "latency-bound"
    assert "bucket_mb=25" in [r.switch for r in remedies(evidence, judge(evidence))]


def test_overlap_is_preferred_where_backward_can_hide_the_exchange(study: Path) -> None:
    """Overlap keeps gradients exact; if backward is too short, fewer bytes save more."""
    _, short = explain(write(study, "allreduce", 4, 0.14))
    _, long = explain(write(study, "allreduce", 4, 0.5, variant={"model": "mlp", "a": "b"}))
    assert first_remedy(short) == "overlap=true bucket_mb=25"
    assert first_remedy(long) == "strategy=onebit"


def test_a_busy_root_is_advised_to_share_its_load(study: Path) -> None:
    run = write(study, "star", 4, 0.3, payload_bytes_per_step=[48_000_000, *[8_000_000] * 3])
    _, evidence = explain(run)
    assert evidence.payload_bytes == 48e6
    switches = [remedy.switch for remedy in remedies(evidence, judge(evidence))]
    assert "exchange=allreduce" in switches


def test_encoding_that_costs_what_it_saves_is_compute(study: Path) -> None:
    write(study, "onebit", 4, 0.3)
    run = write(study, "onebit", 4, 0.3, phases(0.0, [0.1] * 4, [0.2] * 4))
    spans = [Span(0, "step", "step 5", 0.0, 0.3), Span(0, "codec", "fc", 0.1, 0.25)]
    write_trace(run / "timeline.json", spans)
    verdict, evidence = explain(run)
    assert verdict == "compute-bound"
    assert evidence.codec_s == pytest.approx(0.15)
    assert first_remedy(evidence) == "strategy=auto"


def test_waiting_for_data_is_bound_by_input(study: Path) -> None:
    write(study, "overlap", 4, 0.105)
    settings = {"data": {"workers": 2, "size": 224}}
    run = write(study, "overlap", 4, 0.15, phases(0.05, [0.05] * 4, [0.0] * 4), settings=settings)
    verdict, evidence = explain(run)
    assert verdict == "input-bound"
    assert first_remedy(evidence) in ("data.workers=4", "data=synthetic data.shape=[3,224,224]")


def test_one_slow_rank_is_a_straggler(study: Path) -> None:
    slow = phases(0.0, [0.1, 0.1, 0.19, 0.1], [0.09, 0.09, 0.001, 0.09])
    run = write(study, "allreduce", 4, 0.2, slow, variant={"model": "mlp"})
    verdict, evidence = explain(run)
    assert verdict == "straggler-bound"
    assert (evidence.slowest_rank, evidence.straggler_s) == (2, pytest.approx(0.09))
    assert evidence.exposed_s == pytest.approx(0.001)  # the others wait for it, not for bytes


def planted(run: Path, ranks: int, share: float = 1.0, **columns: float) -> Path:
    """Give a run steps in which rank 2 takes longer, by seconds of own work."""
    random = np.random.default_rng(0)
    steps = pd.DataFrame(
        {"rank": np.repeat(np.arange(ranks), 200), "step": np.tile(np.arange(200), ranks)}
    )
    steps["timed"], steps["step_s"] = steps["step"] >= 5, 0.15
    for name in OWN:
        late = (steps["rank"] == 2) & (steps["step"] % round(1 / share) == 0)
        noise = 1 + 0.02 * random.standard_normal(len(steps))
        steps[f"own_{name}_s"] = 0.02 * noise + columns.get(name, 0.0) * late
    steps.to_parquet(run / "steps.parquet")
    return run


def test_a_throughput_run_alone_names_rank_phase_and_delay(tmp_path: Path) -> None:
    run = planted(write(tmp_path / "demo", "overlap", 4, 0.15), 4, backward=0.05, update=0.02)
    verdict, evidence = explain(run)
    assert verdict == "straggler-bound"
    assert (evidence.slowest_rank, evidence.straggler_s) == (2, pytest.approx(0.07, rel=0.05))
    text = said(main, str(run))
    assert "47 % of the step waits for rank 2, slow in backward and to update\n" in text
    assert re.search(
        r"slow rank +rank 2 takes (49|50|51)\.\d ms \(33 %\) longer than the oth", text
    )
    assert "its input" not in text


def test_a_rank_that_is_slow_in_one_step_of_ten_is_told_so(tmp_path: Path) -> None:
    run = planted(write(tmp_path / "demo", "overlap", 4, 0.15), 4, share=0.1, between=0.05)
    assert "longer than the others between steps in 10 % of the steps" in said(main, str(run))


def test_ranks_that_are_alike_are_not_accused(study: Path) -> None:
    verdict, evidence = explain(planted(write(study, "overlap", 4, 0.105), 4))
    assert verdict == "compute-bound"
    assert (evidence.slowest_rank, evidence.straggler_s, evidence.slow) == (-1, 0.0, ())


def test_a_root_that_updates_alone_is_not_slow(study: Path) -> None:
    settings = {"sync": {"_target_": "lab.sync.zero1.RootUpdate"}}
    run = write(study, "caffe", 4, 0.15, settings=settings)
    assert explain(planted(run, 4, update=0.05))[1].slow == ()


def test_most_repeats_must_show_a_slow_rank(tmp_path: Path) -> None:
    runs = [write(tmp_path / "demo", "overlap", 4, 0.15, repeat=repeat) for repeat in range(3)]
    planted(runs[0], 4, backward=0.05)
    for run in runs[1:]:
        planted(run, 4, forward=0.05)
    assert [slow.phase for slow in explain(runs[0])[1].slow] == ["forward"]


def test_ranks_that_share_cores_are_bound_by_compute(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shared = [Emulation("shared_cores", "4 threads of 4 ranks share 2 CPU cores")]
    write(folder, "none", 1, 0.4)
    write(folder, "none", 4, 0.3, emulation=shared)
    verdict, evidence = explain(write(folder, "overlap", 4, 0.31, emulation=shared))
    assert verdict == "compute-bound"
    assert evidence.fixed_s == pytest.approx(0.2)
    assert first_remedy(evidence) == "2 ranks"


def test_a_rank_that_is_late_because_ranks_share_cores_is_no_straggler(tmp_path: Path) -> None:
    slow = phases(0.0, [0.1, 0.1, 0.19, 0.1], [0.09, 0.09, 0.0, 0.09])
    shared = [Emulation("shared_gpus", "4 ranks share 1 GPUs")]
    run = write(tmp_path / "demo", "overlap", 4, 0.2, slow, emulation=shared)
    verdict, evidence = explain(run)
    assert verdict == "compute-bound"
    assert [remedy.text for remedy in remedies(evidence, judge(evidence))] == ["2 ranks"]


def test_weak_scaling_is_compared_with_the_same_batch_per_rank(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    write(folder, "none", 1, 0.1, scaling="weak")
    write(folder, "none", 4, 0.1, scaling="weak")
    verdict, evidence = explain(write(folder, "overlap", 4, 0.2, scaling="weak"))
    assert verdict == "bandwidth-bound"
    assert evidence.ideal_s == pytest.approx(0.1)


def test_two_losses_of_about_the_same_size_are_both_named(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    write(folder, "none", 1, 0.4)
    write(folder, "none", 4, 0.2)  # 0.1 s fixed
    verdict, evidence = explain(write(folder, "overlap", 4, 0.31))  # 0.11 s exposed
    assert verdict == "bandwidth-bound and launch-bound"
    switches = [remedy.switch for remedy in remedies(evidence, judge(evidence))]
    assert switches[:2] == ["strategy=onebit", "batch_size=256"]


def test_more_ranks_are_advised_only_if_compute_is_known_to_shrink(tmp_path: Path) -> None:
    write(tmp_path / "demo", "none", 4, 0.1)
    verdict, evidence = explain(write(tmp_path / "demo", "overlap", 4, 0.101))
    assert verdict == "compute-bound" and remedies(evidence, judge(evidence)) == []
    write(tmp_path / "demo", "none", 1, 0.4)
    assert explain(tmp_path / "demo" / "overlap-4-1")[1].fixed_s == 0.0
    assert first_remedy(explain(tmp_path / "demo" / "overlap-4-1")[1]) == "8 ranks"


def test_without_a_reference_or_phases_nothing_is_decided(tmp_path: Path) -> None:
    run = write(tmp_path / "demo", "overlap", 4, 0.3)
    verdict, evidence = explain(run)
    assert verdict == "undecided"
    assert remedies(evidence, judge(evidence)) == []
    assert set(evidence.to_run) == {"one rank and the ceiling", "its phases"}


def test_phases_alone_decide(tmp_path: Path) -> None:
    run = write(tmp_path / "demo", "overlap", 4, 0.3, phases(0.0, [0.1] * 4, [0.2] * 4))
    verdict, evidence = explain(run)
    assert verdict == "bandwidth-bound"
    assert evidence.exposed_s == pytest.approx(0.2)
    assert set(evidence.to_run) == {"one rank and the ceiling", "its step, unmarked"}


def test_phases_of_ddp_hide_its_exchange(tmp_path: Path) -> None:
    settings = {"sync": {"_target_": "lab.sync.ddp.DDPSync"}}
    hidden = phases(0.0, [0.3] * 4, [0.0] * 4)
    verdict, _ = explain(write(tmp_path / "demo", "ddp", 4, 0.3, hidden, settings=settings))
    assert verdict == "undecided"


def test_another_model_is_no_reference(study: Path) -> None:
    verdict, evidence = explain(write(study, "fc1x1", 4, 0.3, transform="FCToConv"))
    assert verdict == "undecided"
    assert "transform=fc1x1" in evidence.to_run["one rank and the ceiling"]


def test_a_round_of_several_steps_counts_as_a_whole(tmp_path: Path) -> None:
    """Only the last step of a round exchanges; its time is shared by all steps of the round."""
    run = write(
        tmp_path / "demo",
        *("local_sgd", 4, 0.15, phases(0.0, [0.1] * 4, [0.0] * 4)),
        settings={"sync": {"_target_": "lab.sync.local.LocalSync", "every": 2}},
    )
    steps = pd.read_parquet(run / "steps.parquet")
    steps.loc[steps["step"] % 2 == 1, "exchange_s"] = 0.1
    steps.to_parquet(run / "steps.parquet")
    # The timeline holds a part of a round, which exchanged, and a whole one.
    traced = [Span(0, "step", f"step {at}", 0.15 * at, 0.15 * (at + 1)) for at in (3, 4, 5)]
    coded = [Span(0, "codec", "fc", 0.15 * at + 0.1, 0.15 * at + 0.12) for at in (3, 5)]
    write_trace(run / "timeline.json", [*traced, *coded])
    verdict, evidence = explain(run)
    assert verdict == "bandwidth-bound"
    assert evidence.exposed_s == pytest.approx(0.05)
    assert evidence.codec_s == pytest.approx(0.01)
    assert "sync.every=4" in [remedy.switch for remedy in remedies(evidence, judge(evidence))]


def test_switches_and_commands_are_accepted(tmp_path: Path) -> None:
    """The lab accepts the settings that it recommends."""
    folder = tmp_path / "runs" / "demo"
    variant = {"model": "alexnet_small", "steps": "20", "exchange.threshold": "mean"}
    run = write(folder, "onebit", 4, 0.3, variant=variant, scaling="weak")
    _, evidence = explain(run)
    assert len(evidence.to_run) == 2
    for command in evidence.to_run.values():
        python, dash_m, module, *arguments = shlex.split(command)
        assert (python, dash_m, module) == ("python", "-m", "lab.sweep")
        cells = studies.read(arguments).cells
        assert {cell.batch_size for cell in cells} <= {32, 128}
    slow = write(folder, "allreduce", 4, 0.3, phases(0.0, [0.1] * 4, [0.2] * 4))
    for remedy in remedies(explain(slow)[1], judge(explain(slow)[1])):
        load(shlex.split(remedy.switch))


def test_the_text_has_verdict_evidence_and_remedy(study: Path) -> None:
    run = write(study, "overlap", 4, 0.3)
    first, *rest = said(main, str(run)).splitlines()
    expected = "bandwidth-bound: 67 % of the step waits for gradients"
    assert first == f"overlap on 4 ranks, batch 128: {expected}"
    text = "\n".join(rest)
    assert "300.0 ms: 1.33 times as fast as one rank (400.0 ms); ideal is 4" in text
    assert (
        "12 MB in 4 messages from the busiest rank: 60 MB/s in the time that is not hidden" in text
    )
    assert re.search(r"try +strategy=onebit: .* \(up to 193\.[78] ms less\)", text)
    assert "strategy=overlap world_size=4 batch_size=128 model=mlp measure=breakdown" in text


def test_a_message_is_one_and_numbers_are_written_in_full(study: Path) -> None:
    run = write(study, "overlap", 4, 0.102, messages_per_step=[1.0] * 4)
    text = said(main, str(run))
    assert "12 MB in 1 message from the busiest rank: 6000 MB/s in the time that is" in text
    short = write(study, "onebit", 4, 0.10047)
    assert "exchange    0.47 ms (0 %) not hidden" in said(main, str(short))
    hidden = write(study, "tree", 4, 0.1 + 1e-9)
    assert "12 MB in 4 messages from the busiest rank\n" in said(main, str(hidden))


def test_own_times_are_those_of_each_rank_in_whatever_order_their_rows_are() -> None:
    """A run that was resumed by an earlier version has the rows of each start apart."""
    columns = {f"own_{name}_s": 0.0 for name in OWN}
    rows = pd.DataFrame(
        {"rank": rank, "step": step, "timed": True, **columns, "own_forward_s": rank + 0.1 * step}
        for start in (range(2), range(2, 4))
        for rank in range(2)
        for step in start
    )
    found = own_times(rows, 1)[:, :, OWN.index("forward")]
    assert found.tolist() == [[0.0, 0.1, 0.2, pytest.approx(0.3)], [1.0, 1.1, 1.2, 1.3]]
    assert own_times(rows.assign(timed=False), 2).shape == (0, 0, len(OWN))


def test_what_did_nothing_is_told(study: Path) -> None:
    run = write(study, "overlap", 4, 0.3, idle=["overlap=true: nothing overlaps"])
    assert "  no effect   overlap=true: nothing overlaps\n" in said(main, str(run))


@pytest.mark.parametrize("ending", [".txt", ".md"])
def test_out_holds_what_is_printed(study: Path, tmp_path: Path, ending: str) -> None:
    run, out = write(study, "overlap", 4, 0.3), tmp_path / f"why{ending}"
    printed, text = said(main, str(run), f"out={out}"), out.read_text()
    assert text.startswith("overlap on 4 ranks, batch 128: bandwidth-bound: ")
    assert printed == f"{text}wrote {out}\n"


def test_out_stays_as_it_was_if_the_disk_is_full(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_text(path: Path, text: str, **_: str) -> None:
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    run, out = write(study, "overlap", 4, 0.3), tmp_path / "why.txt"
    out.write_bytes(b"old")
    monkeypatch.setattr(Path, "write_text", write_text)
    assert main([str(run), f"out={out}"]) == 1
    assert capsys.readouterr().err.endswith(f"No space left on device: '{out}'\n")
    assert out.read_bytes() == b"old"


def test_out_is_refused_before_anything_is_read(study: Path, tmp_path: Path) -> None:
    for name in ("why.pdf", "absent/why.txt", f"{'y' * 300}.txt"):
        assert refusal(main, str(study), f"out={tmp_path / name}").startswith("out=")
    assert refusal(main, str(tmp_path / "nothing"), f"out={tmp_path / 'why.txt'}")
    assert not (tmp_path / "why.txt").exists()


def test_a_study_has_a_line_for_each_point(study: Path) -> None:
    write(study, "overlap", 4, 0.3)
    lines = said(main, str(study)).splitlines()
    assert [line.split(": ")[1] for line in lines[:2]] == ["compute-bound", "bandwidth-bound"]
    assert f"python -m lab.advise fit={study}" in lines[-1]


def test_unlike_repeats_are_compared_in_pairs_as_in_tables(tmp_path: Path) -> None:
    """The machine is slower in each repeat, and one rank has not run in the last."""
    runs = [
        write(tmp_path, strategy, ranks, factor * 1.5**repeat, repeat=repeat)
        for strategy, ranks, factor, repeats in (
            *(("none", 1, 0.4, (0, 1, 2)), ("none", 4, 0.1, (0, 1, 2, 3))),
            ("tree", 4, 0.125, (1, 2, 3)),
        )
        for repeat in repeats
    ]
    _, evidence = explain(runs[-1])
    assert evidence.one_s == pytest.approx(evidence.point.speedup.mid * evidence.step_s)
    assert evidence.point.speedup.mid == pytest.approx(3.2)
    assert evidence.ceiling_s == pytest.approx(evidence.step_s / 1.25)


def test_damaged_and_failed_runs_are_told(study: Path) -> None:
    damaged = write(study, "overlap", 4, 0.3)
    (damaged / "record.json").write_text("{")
    write(study, "tree", 4, None, status="oom", error="rank 0: out of memory")
    told = said(main, str(study))
    assert f"missing: {damaged.name}: {damaged / 'record.json'}: not JSON" in told
    assert "out of memory" in told
    assert "not JSON" in refusal(main, str(damaged))


def test_a_run_with_a_noise_scale_hides_no_other_point(study: Path) -> None:
    write(study, "ring", 4, 0.3, measure="noise")
    write(study, "tree", 4, None, status="done")
    write(study, "tree", 4, 0.3, repeat=1)
    told = said(main, str(study))
    assert "tree on 4 ranks" in told and "ring" not in told


def test_what_cannot_be_explained_is_refused(study: Path, tmp_path: Path) -> None:
    failed = write(study, "tree", 4, None, status="oom", error="rank 0: out of memory")
    single = write(study, "overlap", 1, 0.4)
    untimed = write(study, "ring", 4, None)
    noise = write(study, "ddp", 4, 0.3, measure="noise")
    reasons = {
        failed: "status=oom: rank 0: out of memory",
        single: "world_size=1: a single rank exchanges nothing",
        untimed: "step_s=null: no step was timed",
        noise: "measure=noise: slows steps down; only runs with measure=throughput or ",
        tmp_path / "nothing": "no such folder",
        tmp_path: "contains no <cell>/record.json",
    }
    for path, reason in reasons.items():
        assert reason in refusal(main, str(path))
