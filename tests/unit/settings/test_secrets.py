"""Secrets are told from what may be kept, in time that grows with the text alone."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from omegaconf import OmegaConf

from lab.settings.config import ConfigError, load
from lab.settings.names import of_all_ranks
from lab.settings.overrides import handed_over
from lab.settings.secrets import is_secret, redacted, redacted_words, without_secrets

SECRETS = [
    "model.api_token",
    "HF_TOKEN",
    "accessToken",
    "wandb_api_key",
    "AWS_SECRET_ACCESS_KEY",
    "NVIDIA_CREDENTIALS",
    "HOROVOD_AUTH",
    "NCCL_PASS",
    "db.password",
    "Authorization",
    "X-Amz-Signature",
    "sig",
]
KEPT = ["num_tokens", "tokens", "data.key", "pass", "forward_pass", "signature", "author", "basic"]


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert redacted({name: "hunter2"}) == {name: "…"}
    assert "hunter2" not in str(redacted({name: ["hunter2"]}))


@pytest.mark.parametrize("name", KEPT)
def test_names_that_are_none(name: str) -> None:
    assert not is_secret(name)
    assert redacted({name: "3"}) == {name: "3"}


@pytest.mark.parametrize(
    "text",
    [
        *(f"{name}=hunter2" for name in SECRETS),
        *(f"{name}: hunter2" for name in SECRETS),
        *(f'{{"{name}": "hunter2 hunter2"}}' for name in SECRETS),
        *(f"--{name} hunter2" for name in ("api-key", "token", "password")),
        "Bearer hunter2",
        "Authorization: Bearer hunter2",
        "https://eva:hunter2@host/x",
        "https://bucket/x?v=1&sig=hunter2&w=2",
        "redis://:hunter2@host:6379/0",
        "ghp_hunter2hunter2hunter2",
        "sk-hunter2hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END",
    ],
)
def test_no_text_shows_a_secret(text: str) -> None:
    assert "hunter2" not in without_secrets(f"cannot reach {text} after 3 tries")
    assert without_secrets(without_secrets(text)) == without_secrets(text)


def test_the_value_of_a_secret_variable_is_hidden_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "correct-horse")
    monkeypatch.setenv("OTHER_TOKEN", "1")  # would be hidden in numbers
    monkeypatch.setenv("TOKEN_TYPE", "classification")
    assert without_secrets("classification by correct-horse, 1") == "classification by …, 1"
    with pytest.raises(ConfigError, match="and no secret"):
        load(["cell=${oc.env:MY_API_TOKEN}"])


def test_words_of_a_command_line_keep_their_keys() -> None:
    words = ["model.api_token=hunter2", "+model.secret=hunter2", "steps=3"]
    assert redacted_words(words) == ["model.api_token=…", "+model.secret=…", "steps=3"]


def test_secrets_are_handed_to_other_processes_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    given = ["model.api_token='hunter2'", "steps=3", "model.password='${oc.env:PW}'"]
    words = handed_over(given)
    assert words[0] == "model.api_token='${oc.env:LAB_MODEL_API_TOKEN_0}'"
    assert words[1:] == ["steps=3", "model.password='${oc.env:PW}'"]
    assert os.environ == {"LAB_MODEL_API_TOKEN_0": "hunter2"}
    assert redacted_words(words) == redacted_words(
        given
    )  # so names of runs are those of lab.train alone


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("+model.tokens={a: 1}", {"a": 1}),
        ("+model.passwords=['a,b',\"it's\"]", ["a,b", "it's"]),
        ("+model.options={client_secret:'x y'}", {"client_secret": "x y"}),
        ("+model.pin_password=1234", 1234),
        ("+model.url='https://eva:pw@host'", "https://eva:pw@host"),
    ],
)
def test_what_is_handed_over_arrives_as_it_was_given(word: str, values: object) -> None:
    config = load(["strategy=none", *handed_over([word])])
    found: Any = OmegaConf.to_container(config.model, resolve=True)
    assert found[word.split(".")[1].split("=")[0]] == values


def test_a_list_of_secrets_stays_a_list_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    (word,) = handed_over(["model.api_token='a,b',c"])
    assert word == (
        "model.api_token='${oc.env:LAB_MODEL_API_TOKEN_0}','${oc.env:LAB_MODEL_API_TOKEN_1}'"
    )
    assert list(os.environ.values()) == ["a,b", "c"]


@pytest.mark.parametrize(
    "piece",
    ["token.", "a", "a=b ", "--a ", "x://", "bearer ", 'token="', "'\"=", " ", "-", "eyJ", "sk-"]
    + ["-----BEGIN PRIVATE KEY-----", "token=x ", "\\", "a   "],
)
def test_time_grows_with_the_text_alone(piece: str) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        begin = time.thread_time()
        without_secrets(text)
        return time.thread_time() - begin

    # 16 times the text: quadratic patterns take 256 times as long, cubic ones 4096 times, whenever
    # they are timed. Busy neighbours make some times longer, and none shorter.
    least_s = min(seconds(5_000) for _ in range(5))
    assert any(seconds(80_000) < 80 * max(least_s, 1e-3) for _ in range(4))


def test_ranks_compare_secrets_by_a_digest() -> None:
    one, other = (of_all_ranks({"model": {"api_token": text}}) for text in ("hunter2", "hunter3"))
    assert one != other
    assert "hunter" not in f"{one} {other}"
