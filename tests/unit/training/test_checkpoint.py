"""Checkpoints among other things: what the lab did not name stays, a damaged one is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lab.settings.errors import ConfigError
from lab.training import checkpoint
from lab.training.checkpoint import check_fit, load_optimizer, names_of, require_resumable
from tests.support.optimizers import Forgets, InFloat64, Scaled, WithArrays


class Alone:
    """A world of one rank."""

    rank, size = 0, 1

    def barrier(self) -> None:
        pass


def save(root: Path, step: int) -> Path:
    checkpoint.save(root, step, {"step": step}, {}, Alone())  # type: ignore[arg-type]
    return root / f"step_{step:06d}"


def test_what_the_lab_did_not_name_is_left_alone(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    for name in ("step_000010.bak", "step_best", "step_12", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "DONE").write_text("mine")
    elsewhere = tmp_path / "larger_disk"
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    for step in range(2, 6):
        save(tmp_path, step)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step_000010.bak", "step_best", "step_12", "notes", "larger_disk"),
        *("step_000001", "step_000004", "step_000005"),
    }
    assert checkpoint.load(first)[0] == {"step": 1}
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000005"


def test_a_damaged_newest_checkpoint_falls_back_to_a_whole_one_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = save(tmp_path, 4), save(tmp_path, 5)
    (newer / "shared.pt").write_bytes(b"cut short")
    assert checkpoint.newest(tmp_path) == older
    said = capsys.readouterr().err
    assert said == (
        f"resume={newer}: corrupt checkpoint: changed or missing: shared.pt; "
        "trying the previous checkpoint\n"
    )
    with pytest.raises(ValueError, match="corrupt checkpoint: changed or missing: shared.pt"):
        checkpoint.load(newer)  # asked for by path


def test_without_a_whole_checkpoint_nothing_begins_anew_silently(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    (save(tmp_path, 4) / "DONE").write_text("{")
    with pytest.raises(ValueError, match="step_000004: corrupt checkpoint: .*not JSON"):
        checkpoint.newest(tmp_path)


def test_a_checkpoint_names_its_exchange_by_class() -> None:
    """Earlier versions have other modules for the same class."""
    now = {
        "_target_": "lab.exchange.schedule.Schedule",
        "first": {"_target_": "lab.exchange.a.Ring"},
    }
    config: Any = OmegaConf.create(
        {"channels_last": False, "optim": {"_target_": "torch.optim.SGD"}, "exchange": now}
    )
    ranks = [{"exchange": {"residual": {}}}]

    def saved(first: str) -> dict[str, Any]:
        then = {"_target_": "lab.exchange.old.Schedule", "first": {"_target_": first}}
        return {"channels_last": False, "exchange": then}

    check_fit(config, saved("lab.exchange.b.Ring"), ranks)
    for other in ("lab.exchange.a.Tree", "mine.Ring"):
        with pytest.raises(ValueError, match=f"residuals of exchange=.*{other.split('.')[-1]}"):
            check_fit(config, saved(other), ranks)


def of(kind: type[torch.optim.SGD]) -> Any:
    target = f"{kind.__module__}.{kind.__name__}"
    return OmegaConf.create({"optim": {"_target_": target, "lr": 0.1}})


@pytest.mark.parametrize("kind", [InFloat64, Scaled])
def test_a_state_in_float64_or_of_all_parameters_is_loaded_as_it_was(
    kind: type[torch.optim.SGD],
) -> None:
    model = nn.Linear(2, 3)
    before, after = (kind(model.parameters(), lr=0.1) for _ in range(2))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    before.step()
    saved = before.state_dict()
    whole = {"optimizer": saved, "names": names_of(before, model.named_parameters())}
    load_optimizer(after, model.named_parameters(), {}, whole, [{}])
    loaded = after.state_dict()["state"]
    assert str(loaded) == str(saved["state"]) and "total" in str(loaded)
    require_resumable(of(kind), model, batch_size=8)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Forgets, "goes on differently after a resume, because state_dict lacks some"),
        (WithArrays, "a checkpoint cannot be read, because the optimizer's state has more than"),
    ],
)
def test_an_optimizer_that_does_not_go_on_as_before_is_refused(
    kind: type[torch.optim.SGD], line: str
) -> None:
    target = of(kind).optim["_target_"]
    with pytest.raises(ConfigError, match=f"^optim={target}: {line}"):
        require_resumable(of(kind), nn.Linear(2, 3), batch_size=8)


def test_a_state_that_only_some_ranks_have_is_their_mean() -> None:
    one, other, third = (
        {"state": {0: {"sum": torch.tensor([number]), "step": 1}}} for number in (1.0, 2.0, 6.0)
    )
    other["state"][1], third["state"][1] = {"sum": torch.tensor([4.0])}, {"sum": None}
    merged = checkpoint.mean_state([one, other, third])["state"]
    assert merged == {0: {"sum": torch.tensor([3.0]), "step": 1}, 1: {"sum": torch.tensor([4.0])}}
