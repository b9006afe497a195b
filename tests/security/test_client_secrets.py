"""What clients of ours show to brokers: where the environment has it, and that it is renewed and shown nowhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from cepheid_cli import client_security
from cepheid_security.client_environment import NO_SECRETS, ClientSecrets, NoTokenError, TokenFile, own_secrets
from cepheid_security.oauth2 import ClientCredentials

VARIABLES = ("TOKEN_FILE", "TOKEN", "OAUTH2_FILE", "OAUTH2_AUDIENCE", "USER", "PASSWORD_FILE", "PASSWORD")


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"CEPHEID_{name}", raising=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("hush-1\n")
    (tmp_path / "password").write_text("hush-2\n")
    (tmp_path / "oauth2").write_text(
        json.dumps({"issuer_url": "http://127.0.0.1:1", "client_id": "app", "client_secret": "hush-3"})
    )
    return tmp_path


@pytest.mark.parametrize(
    ("given", "header"),
    [
        ({}, None),
        ({"TOKEN": " hush-4\n"}, "Bearer hush-4"),
        ({"TOKEN_FILE": "{}/token", "TOKEN": "hush-4"}, "Bearer hush-1"),
        ({"USER": "ann", "PASSWORD": "hush-5"}, "Basic YW5uOmh1c2gtNQ=="),
        ({"USER": "ann", "PASSWORD_FILE": "{}/password", "PASSWORD": "hush-5"}, "Basic YW5uOmh1c2gtMg=="),
        ({"USER": "", "TOKEN_FILE": ""}, None),
    ],
)
def test_the_environment_names_a_token_or_a_user(
    monkeypatch: pytest.MonkeyPatch, directory: Path, given: dict[str, str], header: str | None
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"CEPHEID_{name}", value.format(directory))
    secrets = own_secrets()
    assert secrets.authorization() == header
    assert "hush" not in repr(secrets)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"TOKEN_FILE": "/no/such"}, "CEPHEID_TOKEN_FILE names /no/such, which cannot be read"),
        ({"USER": "ann"}, "set without a password: set CEPHEID_PASSWORD_FILE or CEPHEID_PASSWORD"),
        ({"USER": "ann", "PASSWORD_FILE": "/no/such"}, "CEPHEID_PASSWORD_FILE names /no/such, which cannot be read"),
    ],
)
def test_what_is_named_and_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], reason: str) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"CEPHEID_{name}", value)
    with pytest.raises(NoTokenError, match=reason):
        own_secrets()


def test_a_token_that_is_replaced_in_its_file_is_shown_from_then_on(directory: Path) -> None:
    path = directory / "token"
    secrets = ClientSecrets(TokenFile(str(path)))
    path.write_text("hush-6")
    assert secrets.authorization() == "Bearer hush-6"
    path.unlink()
    in_a_task: ClientSecrets = pickle.loads(pickle.dumps(secrets))
    assert in_a_task.authorization() == "Bearer hush-6", "the task's machine has no such file"
    assert "hush" not in repr(in_a_task)


def test_a_task_fetches_tokens_of_its_own_from_the_issuer(directory: Path) -> None:
    credentials = ClientCredentials.from_file(directory / "oauth2", audience="cluster")
    credentials._token = "hush-7"
    in_a_task: ClientCredentials = pickle.loads(pickle.dumps(credentials))
    assert (in_a_task.client_secret, in_a_task.audience, in_a_task._token) == ("hush-3", "cluster", "")
    assert "hush" not in repr(in_a_task)


def test_commands_renew_tokens_of_an_issuer_and_show_users(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """One long command, such as `cepheid consume`, outlives a token."""
    shown: list[tuple[object, object]] = []
    monkeypatch.setattr(client_security, "connect", lambda _url, *, token, password, **_: shown.append((token, password)))
    monkeypatch.setenv("CEPHEID_OAUTH2_FILE", str(directory / "oauth2"))
    client_security.connect_admin("http://a")
    assert isinstance(shown[-1][0], ClientCredentials)
    monkeypatch.delenv("CEPHEID_OAUTH2_FILE")
    monkeypatch.setenv("CEPHEID_USER", "ann")
    monkeypatch.setenv("CEPHEID_PASSWORD", "hush-5")
    client_security.connect_admin("http://a")
    assert shown[-1] == (None, ("ann", "hush-5"))


def test_a_token_that_cannot_be_sent_is_not_shown() -> None:
    with pytest.raises(NoTokenError, match="its text is not shown"):
        ClientSecrets("hush\nhush").authorization()
    assert NO_SECRETS.authorization() is None
