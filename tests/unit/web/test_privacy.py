"""A page keeps paths, names and secrets from strangers."""

from __future__ import annotations

import pytest

from lab.web import page
from lab.web.page import clean, clean_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no such file: /home/eva/data/train.npz", "no such file: …/train.npz"),
        ("data.path=/mnt/x/photos batch 3", "data.path=…/photos batch 3"),
        (r"C:\Users\eva\runs", "…/runs"),
        ("wandb_api_key=0123456789abcdef", "wandb_api_key=…"),
        ("HF_TOKEN: hf_abc, then", "HF_TOKEN: …, then"),
        ("https://eva:pw@host/x", "https://…@host/x"),
        ("a\u202eb\x1b[31m", "a\ufffdb\ufffd[31m"),
        ("3 images/s in 2 ranks and/or 5 ms/step", "3 images/s in 2 ranks and/or 5 ms/step"),
        ("model/layer", "model/layer"),
    ],
)
def test_paths_secrets_and_controls_are_not_shown(text: str, shown: str) -> None:
    assert clean_text(text) == shown
    assert clean({"a": [text], text: 1}) == {"a": [shown], shown: 1}


def test_the_users_name_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "evamaria")
    page._user.cache_clear()
    assert clean_text("run by evamaria on h1") == "run by … on h1"
    page._user.cache_clear()


def test_a_user_who_is_called_as_a_strategy_hides_no_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOGNAME", "ring")
    page._user.cache_clear()
    assert clean_text("ring was the fastest on 2 ranks") == "ring was the fastest on 2 ranks"
    page._user.cache_clear()
